"""The process that runs reward functions; `megappo.rewards.manager` starts it and talks to it.

It says "ready" (or what is wrong), then takes chunks of samples and answers each sample as soon as it is scored, so
that the other side knows which sample a slow or dying process was at. It imports nothing but the standard library and
the reward functions.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from megappo.rewards.resolve import RewardFunction, RewardTable

FLOAT32_MAX = 3.4028234663852886e38  # scores are stored as float32
MAX_MESSAGE = 300  # characters of a failure


class Sample(NamedTuple):
    """What a reward function is called with; `extra_info` is JSON."""

    data_source: str
    solution_str: str
    ground_truth: str
    extra_info: str


class Outcome(NamedTuple):
    """`failure` is empty where the reward worked; `extras` has the other numbers of its dict, and `pred`, as JSON."""

    score: float
    failure: str = ""
    extras: str = "{}"


def serve(
    channel_fd: int,
    life_fd: int,
    function: str | None,
    by_source: Mapping[str, str],
    sandbox: Mapping[str, Any] | None = None,
) -> None:
    """Score chunks until the channel closes.

    Args:
        channel_fd: a duplex `Connection`. Received: list[Sample]. Sent: "" once ready, or a message and the end; then
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
    channel.send("")
    try:
        while True:
            for sample in channel.recv():
                channel.send(score(rewards.choose(sample.data_source), sample))
    except (EOFError, OSError):  # the parent closed the channel
        return


def score(reward: RewardFunction, sample: Sample) -> Outcome:
    """Call a reward function; whatever it raises or returns becomes an Outcome."""
    try:
        result = reward(
            data_source=sample.data_source,
            solution_str=sample.solution_str,
            ground_truth=sample.ground_truth,
            extra_info=json.loads(sample.extra_info),
        )
        return judge(result)
    except BaseException as error:  # SystemExit too: it costs this sample only
        return Outcome(0.0, _cut(f"{type(error).__name__}: {error}"))


def judge(result: Any) -> Outcome:
    """The Outcome of what a reward function returned."""
    extras: dict[str, float | str] = {}
    value = result
    if isinstance(result, Mapping):
        if "score" not in result:
            return Outcome(0.0, _cut(f"returned a dict without 'score': its keys are {', '.join(map(str, result))}"))
        value = result["score"]
        numbers = {str(key): _number(item) for key, item in result.items() if key != "score"}
        extras = {key: item for key, item in numbers.items() if item is not None and abs(item) <= FLOAT32_MAX}
        if isinstance(result.get("pred"), str):
            extras["pred"] = _cut(result["pred"])
    number = _number(value)
    if number is None:
        return Outcome(0.0, _cut(f"returned {value!r}, not a number"))
    if not abs(number) <= FLOAT32_MAX:  # false for nan
        return Outcome(0.0, f"returned {number}")
    return Outcome(number, "", json.dumps(extras))


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
