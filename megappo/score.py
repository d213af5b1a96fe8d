"""``megappo score``: log-probabilities and rewards of given responses, and how often they beat others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megappo.cluster.dataflow import batch_of
from megappo.cluster.forks import Forks
from megappo.cluster.scoring import ScoringCluster
from megappo.config import Config, RewardConfig
from megappo.data import batch as rows_of
from megappo.data.answers import load_answers
from megappo.data.given import limits_of
from megappo.data.prompts import DataError
from megappo.rewards.mix import PARTS, check_covered


@dataclass(frozen=True)
class Options:
    """What to score.

    Attributes:
        column: that has the responses.
        against: file of other responses to the same prompts, row by row; by default the same file.
        against_column: that has them; with neither, nothing is compared.
    """

    column: str = "response"
    against: str | None = None
    against_column: str | None = None


LOGPROBS = {"actor": "logprobs", "reference": "ref_logprobs"}


def score(
    config: Config, data: str, out: str, options: Options, say: Callable[[str], None], forks: Forks | None = None
) -> None:
    """Score the responses in ``data`` and write them with what was found to ``out``, a parquet file.

    The file has what a step needs of its responses, so that ``data.replay`` takes it; the actor's log-probabilities
    stand for those of whoever sampled them.

    Args:
        say: told what was done, a line at a time.
        forks: what to fork processes from.

    Raises:
        DataError, RewardError, PoolError, StackError, WorkerFailed: with words for the user.
    """
    from transformers import AutoTokenizer

    _check_files(data, options)
    if problem := _same_responses(data, options):
        raise DataError(problem)
    for role in (name for name in LOGPROBS if name in config.roles.megatron):
        say(f"{role}: {config.model_folder(role)}")
    tokenizer = AutoTokenizer.from_pretrained(config.model_folder("actor"))
    limits = limits_of(config)
    answers = load_answers(data, options.column, tokenizer, limits=limits)
    others = None
    if options.against is not None or options.against_column is not None:
        others = load_answers(
            options.against or data, options.against_column or options.column, tokenizer, limits=limits
        )
        _check_same_prompts(data, answers, options.against or data, others)
    sources = sorted(set(answers.column("data_source").to_pylist()))
    check_covered(sources, config.roles.reward)
    for path, given in ((data, answers), (options.against or data, others)):
        if given is not None:
            check_truths(path, given, config.roles.reward)
    with writing(out) as file:
        with ScoringCluster(config, sources, say, forks) as cluster:
            scored = _scored(config, cluster, answers)
            beaten = None if others is None else _rewards(cluster, others)
        if beaten is not None:
            wins = win_values(rows_of.column(scored, "score"), rows_of.column(beaten, "score"))
            scored = scored.append_column("against_score", beaten.column("score")).append_column("win", pa.array(wins))
        pq.write_table(scored, file)
    for line in summary(scored):
        say(line)
    say(f"{out}: {scored.num_rows:,} rows")


def win_values(scores: np.ndarray, others: np.ndarray) -> np.ndarray:
    """1 where a score is the higher one, 0 where it is the lower, 0.5 where they are equal; float64 [rows]."""
    return 0.5 + 0.5 * np.sign(scores.astype(np.float64) - others)


def summary(scored: pa.Table) -> Iterator[str]:
    """Means for people, one line a data source: of scores and their parts, log-probabilities, and wins."""
    sources = np.array(scored.column("data_source").to_pylist())
    failed = rows_of.column(scored, "failed").astype(bool)
    for source in sorted(set(sources)):
        here = sources == source
        means = {"score": rows_of.column(scored, "score")[here].mean()}
        for column, name in PARTS.items():
            if column in scored.column_names and not np.isnan(values := rows_of.column(scored, column)[here]).all():
                means[name] = np.nanmean(values)
        for column in LOGPROBS.values():
            if column in scored.column_names:
                rows = [row for row, is_here in zip(rows_of.split_rows(scored, column), here, strict=True) if is_here]
                means[f"{column} a token"] = np.concatenate(rows).mean()
        if "win" in scored.column_names:
            means["win rate"] = rows_of.column(scored, "win")[here].mean()
        text = ", ".join(f"{name} {value:.4f}" for name, value in means.items())
        failures = f", {failed[here].sum()} failed" if failed[here].any() else ""
        yield f"{source}: {here.sum():,} responses, {text}{failures}"


@contextmanager
def writing(out: str) -> Iterator[IO[bytes]]:
    """A file that gets its name once it is whole. It is opened here, so that scoring does not begin for nothing.

    Raises:
        DataError: it cannot be written.
    """
    path, partial = Path(out), Path(f"{out}.partial")
    if not (folder := path.absolute().parent).is_dir():
        raise DataError(f"{out}: there is no folder {folder}: make it, or choose another")
    if path.exists() and not path.is_file():
        raise DataError(f"{out}: is {'a folder' if path.is_dir() else 'no file'}: name a parquet file to write")
    try:
        file = partial.open("wb")
    except OSError as error:
        raise DataError(f"{out}: cannot be written ({error.strerror}): choose another place") from None
    try:
        with file:
            yield file
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _scored(config: Config, cluster: ScoringCluster, answers: pa.Table) -> pa.Table:
    """Answers with rewards and log-probabilities; the actor's also as those of the sampler."""
    batch = batch_of(answers, cluster.calls.timeout_s)
    temperature = config.roles.rollout.temperature
    pending: list[Any] = [cluster.reward.score(batch)]
    for role, column in LOGPROBS.items():
        if role in cluster.groups:
            pending.append(cluster.groups[role].score("logprobs", batch, column=column, temperature=temperature))
    batch = batch.with_columns(*cluster.calls.gather(*pending))
    table = batch.read(*sorted(batch.columns))
    return table.append_column("rollout_logprobs", table.column("logprobs"))


def _rewards(cluster: ScoringCluster, answers: pa.Table) -> pa.Table:
    batch = batch_of(answers, cluster.calls.timeout_s)
    (scores,) = cluster.calls.gather(cluster.reward.score(batch))
    return batch.with_columns(scores).read("score", "failed")


def check_truths(path: str, answers: pa.Table, reward: RewardConfig) -> None:
    """Whether the rules that compare with an answer have one; functions of the user's own may need none.

    Raises:
        DataError: they do not.
    """
    pairs = zip(answers.column("data_source").to_pylist(), answers.column("ground_truth").to_pylist(), strict=True)
    bare = sorted({source for source, truth in pairs if not truth and reward.weights_of(source).function})
    for source in bare:
        function = reward.by_source.get(source, reward.function) or ""
        if function.startswith("megappo.rewards."):
            raise DataError(
                f"{path}: has no reward_model.ground_truth for data_source {source!r}, which {function} compares with: "
                "add it, or give a configuration with a reward model alone"
            )


def _check_files(data: str, options: Options) -> None:
    """Whether what is to be scored is there, by the names that the command line has for it."""
    for word, path in (("DATA", data), ("--against", options.against)):
        if path is not None and not Path(path).is_file():
            what = "is a folder" if Path(path).is_dir() else "no such file"
            raise DataError(f"{word}: {path}: {what}: give a parquet file of prompts and responses")


def _same_responses(data: str, options: Options) -> str | None:
    """What is wrong where responses would be compared with themselves."""
    if (options.against_column or options.column) != options.column:
        return None
    if options.against is not None and Path(options.against).samefile(data):
        return f"--against {options.against}: is DATA itself: give another file, or --against-column for another column"
    if options.against is None and options.against_column is not None:
        return f"--against-column {options.against_column}: is the column that is scored: name another, or --against"
    return None


def _check_same_prompts(path: str, answers: pa.Table, other_path: str, others: pa.Table) -> None:
    if answers.num_rows != others.num_rows:
        raise DataError(
            f"{other_path}: {others.num_rows} rows, {path} has {answers.num_rows}: give responses to the same prompts"
        )
    pairs = zip(answers.column("prompt_text").to_pylist(), others.column("prompt_text").to_pylist(), strict=True)
    if (row := next((row for row, (one, other) in enumerate(pairs) if one != other), None)) is not None:
        raise DataError(
            f"{other_path}, row {row} (counting from 0): another prompt than in {path}: give responses to the same "
            "prompts, in the same order"
        )
