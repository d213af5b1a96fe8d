"""The process that runs reward functions; `megappo.rewards.manager` starts it and talks to it.

It says "ready" (or what is wrong), then takes chunks of samples and answers each sample as soon as it is scored, so
that the other side knows which sample a slow or dying process was at. It imports nothing but the standard library and
the reward functions.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from megappo.rewards.resolve import TOKENS, RewardFunction, RewardTable

FLOAT32_MAX = 3.4028234663852886e38  # scores are stored as float32
TOKEN_SCORES = "token_scores"  # key of a reward function's dict
MAX_MESSAGE = 300  # characters of a failure


class Sample(NamedTuple):
    """What a reward function is called with; `extra_info` is JSON, `tokens` the text of each token of the response."""

    data_source: str
    solution_str: str
    ground_truth: str
    extra_info: str
    tokens: tuple[str, ...] = ()


class Outcome(NamedTuple):
    """What a reward function gave.

    `score` is all of it, `token_scores` the part that is each token's own, if any; `failure` is empty where the
    function worked; `extras` has the other numbers of its dict, and `pred`, as JSON.
    """

    score: float
    failure: str = ""
    extras: str = "{}"
    token_scores: tuple[float, ...] = ()


def serve(
    channel_fd: int,
    life_fd: int,
    function: str | None,
    by_source: Mapping[str, str],
    sandbox: Mapping[str, Any] | None = None,
) -> None:
    """Score chunks until the channel closes.

    Args:
        channel_fd: a duplex `Connection`. Received: list[Sample]. Sent: once ready, whether
            functions reward tokens; or a message and the end; then
            an Outcome for each sample, in order.
        life_fd: read end of a pipe whose write end only the parent holds.
        function, by_source, sandbox: as in RewardTable.
    """
    _die_with_parent(life_fd)
    channel = Connection(channel_fd)
    try:
        rewards = RewardTable(function, by_source, sandbox)
    except ValueError as error:
        channel.send(str(error))
        return
    channel.send(rewards.rewards_tokens)
    try:
        while True:
            for sample in channel.recv():
                reward = rewards.choose(sample.data_source)
                channel.send(score(reward, sample, with_tokens=rewards.takes_tokens(reward)))
    except (EOFError, OSError):  # the parent closed the channel
        return


def score(reward: RewardFunction, sample: Sample, *, with_tokens: bool = False) -> Outcome:
    """Call a reward function, with the response's tokens if asked to; what it raises or returns becomes an Outcome."""
    try:
        result = reward(
            data_source=sample.data_source,
            solution_str=sample.solution_str,
            ground_truth=sample.ground_truth,
            extra_info=json.loads(sample.extra_info),
            **({TOKENS: list(sample.tokens)} if with_tokens else {}),
        )
        return judge(result, len(sample.tokens) if with_tokens else 0)
    except BaseException as error:  # SystemExit too: it costs this sample only
        return Outcome(0.0, _cut(f"{type(error).__name__}: {error}"))


def judge(result: Any, tokens: int = 0) -> Outcome:
    """The Outcome of what a reward function returned for a response of so many tokens."""
    extras: dict[str, float | str] = {}
    value = result
    own: tuple[float, ...] = ()
    if isinstance(result, Mapping):
        if "score" not in result and TOKEN_SCORES not in result:
            return Outcome(0.0, _cut(f"returned a dict without 'score': its keys are {', '.join(map(str, result))}"))
        value = result.get("score", 0.0)
        if TOKEN_SCORES in result:
            try:
                own = _token_scores(result[TOKEN_SCORES], tokens)
            except ValueError as error:
                return Outcome(0.0, _cut(f"returned {error}"))
        numbers = {str(key): _number(item) for key, item in result.items() if key not in ("score", TOKEN_SCORES)}
        extras = {key: item for key, item in numbers.items() if item is not None and abs(item) <= FLOAT32_MAX}
        if isinstance(result.get("pred"), str):
            extras["pred"] = _cut(result["pred"])
    number = _number(value)
    if number is None:
        return Outcome(0.0, _cut(f"returned {value!r}, not a number"))
    number = math.fsum((number, *own))
    if not abs(number) <= FLOAT32_MAX:  # false for nan
        return Outcome(0.0, f"returned {number}")
    return Outcome(number, "", json.dumps(extras), own)


def _token_scores(given: Any, tokens: int) -> tuple[float, ...]:
    """Raise ValueError, in words that follow "returned", unless it is a finite number for each token."""
    if isinstance(given, str | Mapping) or not hasattr(given, "__iter__"):
        raise ValueError(f"{TOKEN_SCORES} {given!r}, not a list of numbers")
    if not tokens:
        raise ValueError(f"{TOKEN_SCORES}, but takes no response_tokens to know how many")
    numbers = [_number(item) for item in given]
    if len(numbers) != tokens:
        raise ValueError(f"{len(numbers)} {TOKEN_SCORES} for a response of {tokens} tokens")
    wrong = [(at, item) for at, item in enumerate(numbers) if item is None or not abs(item) <= FLOAT32_MAX]
    if wrong:
        raise ValueError(f"{TOKEN_SCORES} with {wrong[0][1]} for token {wrong[0][0]}, not a number")
    return tuple(item for item in numbers if item is not None)


def _number(value: Any) -> float | None:
    """As a float: numbers, numpy and torch scalars; not strings, not None, not arrays of several elements."""
    try:
        return float(value) if hasattr(value, "__float__") else None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _cut(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."


def _die_with_parent(life_fd: int) -> None:
    """Have the kernel kill this process group once the parent is gone, even where Python code can no longer run.

    The parent's end closes the pipe `life_fd`, and the pipe's event signals its owner: SIGKILL to our process group,
    which also holds whatever processes a reward starts. (`PR_SET_PDEATHSIG` would fire when the *thread* that started
    us ends.) Elsewhere than on Linux an idle worker still ends as its channel closes.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(life_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(life_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)
