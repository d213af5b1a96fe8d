"""A whole run in a folder of its own, started by the command line and watched from outside."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import psutil
from tiny import make_model

from megappo.check.guards import says_nothing
from megappo.config import load_config
from megappo.data.arithmetic import write_arithmetic
from megappo.metric_names import FIXED, unknown_name
from megappo.report.run_log import read_log

ROOT = Path(__file__).resolve().parent.parent
MARK = "MEGAPPO_TEST_RUN"
"""Environment variable by which all processes of one command are known, however they were started."""

LIMIT_S = 400
"""On anything a command does: only a hang takes that long, however busy the machine is."""

CONFIG = """\
run:
  {dir: run, steps: 5, seed: 3, device: cpu, dtype: float32, validate_every: 3, save_every: 2, keep_checkpoints: 2,
   trackers: [tensorboard], timeout_s: 300}
model: model
data:
  {train: data/train.parquet, validation: data/validation.parquet, canary: data/validation.parquet,
   prompts_per_step: 7, max_prompt: 8, max_response: 9}
pools:
  train: {devices_per_node: 4}
  value: {devices_per_node: 2}
  score: {devices_per_node: 1}
  serve: {devices_per_node: 1}
roles:
  actor: {pool: train, tp: 2, pp: 2, sequence_parallel: true, micro_batch_tokens: 100}
  critic: {pool: value, pp: 2, micro_batch_tokens: 90}
  reference: {pool: score, micro_batch_tokens: 80}
  rollout: {pool: serve, samples_per_prompt: 3, kv_cache_gib: 0.1}
  reward: {function: "score.py:compute_score", processes: 1}
ppo:
  mini_batch: 8
  actor_lr: 1.0e-3
  critic_lr: 1.0e-3
  entropy_coef: 0.001
  kl: {coef: 0.05, target: 0.2, horizon: 1000}
  optimizer: {warmup_steps: 2, schedule: linear}
  guards:
    long: {metric: response_length/mean, above: 1, for_steps: 3, action: lower_lr, factor: 0.5}
    kl: {metric: actor/ppo_kl, below: 100, for_steps: 4, action: raise_kl, factor: 0.5}
"""
REWARD = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if ground_truth.endswith("7"):
        return float("nan")
    return sum(character.isdigit() for character in solution_str) / 9
"""


def make_run_folder(folder: Path) -> Path:
    """Data, a random tiny model with a vocabulary that needs padding, a reward (NaN for some) and ``config.yaml``."""
    write_arithmetic(folder / "data", train=20, validation=9, digits=1)
    make_model(folder / "model", hidden_size=128, vocab_size=51, tie_word_embeddings=True)
    make_tiny_model().make_tokenizer().save_pretrained(folder / "model")
    (folder / "score.py").write_text(REWARD)
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def make_tiny_model() -> Any:
    """The quickstart's script as a module."""
    spec = importlib.util.spec_from_file_location("make_tiny_model", ROOT / "launch" / "make_tiny_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Command:
    """``python -m megappo train config.yaml ...`` in a session of its own.

    ``installed``: a folder of packages that come before those of the environment. ``words``: instead of ``train``.
    """

    def __init__(
        self, folder: Path, *overrides: str, installed: Path | None = None, words: Sequence[str] = ("train",)
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.output = folder / f"output-{self.mark[:8]}.txt"
        self.began = time.monotonic()
        inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        path = os.pathsep.join(map(str, [*([installed] if installed else []), ROOT, *inherited]))
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megappo", *words, "config.yaml", *overrides],
                cwd=folder,
                env={**os.environ, MARK: self.mark, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A shell that put the tests into the background has told them to ignore Ctrl-C; the command shall not.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )

    @property
    def text(self) -> str:
        """Everything on standard output and standard error so far."""
        return self.output.read_text()

    def until(self, happened: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
        """Wait for something to happen while the command runs."""
        deadline = time.monotonic() + limit_s
        while not happened():
            assert self.process.poll() is None, f"ended early with {self.process.returncode}:\n{self.text}"
            if time.monotonic() > deadline:
                self.kill_all()
                raise AssertionError(f"waited {limit_s} s in vain; output so far:\n{self.text}")
            time.sleep(0.01)

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """The exit status."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"not done after {limit_s} s; output:\n{self.text}") from None

    def processes(self) -> list[psutil.Process]:
        """All living processes of this command, Ray's and vLLM's included."""
        return marked(self.mark)

    def kill_all(self) -> None:
        """SIGKILL for the command and for everything that it started."""
        while alive := self.processes():
            for process in alive:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)

    def assert_nothing_left(self, limit_s: float = 10) -> None:
        """Every process of the command is gone after it ended: within a second or two, longer on a busy machine."""
        deadline = time.monotonic() + limit_s
        while alive := self.processes():
            if time.monotonic() > deadline:
                names = [" ".join(process.cmdline())[:120] for process in alive]
                self.kill_all()
                raise AssertionError(f"still alive {limit_s} s after the end: {names}")
            time.sleep(0.1)


def until(happened: Callable[[], Any], seen: Callable[[], Any] = str, limit_s: float = LIMIT_S) -> None:
    """Wait for something to happen; ``seen``: what is shown if it does not."""
    deadline = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < deadline, f"waited {limit_s} s in vain: {seen()}"
        time.sleep(0.01)


def marked(mark: str) -> list[psutil.Process]:
    """All living processes that were started under a mark, children of children included."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def worker_pid(processes: list[psutil.Process], log_file: Path) -> int:
    """The process that writes to a worker's log: its standard output goes there."""
    found = []
    for process in processes:
        with contextlib.suppress(OSError):
            if Path(os.readlink(f"/proc/{process.pid}/fd/1")) == log_file.resolve():
                found.append(process)
    parents = {process.pid for process in found}
    roots = [process.pid for process in found if process.ppid() not in parents]
    assert len(roots) == 1, f"{log_file}: written by {found}"
    return roots[0]


def kill(pid: int) -> None:
    """SIGKILL one process."""
    os.kill(pid, signal.SIGKILL)


def log_steps(folder: Path) -> list[int]:
    """Steps in the log so far, in order."""
    path = folder / "log.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.is_file() else []


def assert_logs_what_check_says(run: Path | str, after: int = 0, but: Collection[str] = ()) -> None:
    """A run has logged, in steps after this one, what its configuration lets guards watch, and nothing else alive.

    ``but``: not these, which depend on the files that are replayed.
    """
    config = load_config(Path(run) / "config.yaml")
    logged: dict[str, set[float]] = {}
    for row in read_log(Path(run)):
        for name, value in row["metrics"].items() if row["step"] > after else ():
            logged.setdefault(name, set()).add(value)
    assert not [name for name in logged if unknown_name(name)]
    silent = {name: says_nothing(config, name) for name in FIXED}
    assert {name for name in FIXED if not silent[name]} - logged.keys() == {*but}
    late = "is known only when guards have seen the step"
    wrong = {name: why for name, why in silent.items() if why not in ("", late) and name in logged}
    assert all("always 0" in why or "coefficient of nothing" in why for why in wrong.values()), wrong
    assert all(len(logged[name]) == 1 for name in wrong), {name: logged[name] for name in wrong}
