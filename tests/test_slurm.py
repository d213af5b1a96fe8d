"""Jobs through a real Slurm with two nodes on this machine; skipped, with the reason, where there is no Slurm.

What is pretended: the nodes share one host, its files and its cores; each has an IP address, ports, a temporary folder
and a Ray of its own. Slurm 22.05 is what Debian has; there are no GPUs, no cgroups, no accounting.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from slurm_cluster import Slurm, slurm_cluster, why_not
from small_run import LIMIT_S, ROOT, log_steps, make_run_folder

SMALLER = [
    *("run.steps=3", "run.save_every=0", "run.validate_before=false", "data.validation=[]", "run.validate_every=0"),
    *("pools={train: {devices_per_node: 1}, serve: {devices_per_node: 1}}", "roles.actor={pool: train}"),
    *("roles.critic={pool: train}", "roles.reference=null", "ppo.kl={in_reward: false}", "roles.reward.timeout_s=300"),
    "ppo.guards={}",
]
FLAGS = ["--devices-per-node=1", "--time=60"]
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}

HELD_REWARD = """\
import os, time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    while os.path.exists({hold!r}):
        time.sleep(0.1)
    return sum(character.isdigit() for character in solution_str) / 9
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    for parent in (folder, *folder.parents):  # munge's user must come through
        if parent.owner() == "root" and parent.is_relative_to(tmp_path_factory.getbasetemp().parent):
            parent.chmod(parent.stat().st_mode | 0o011)
    with slurm_cluster(folder) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run_folder(tmp_path_factory.mktemp("job"))


@dataclass(frozen=True)
class Job:
    number: int
    folder: Path
    slurm: Slurm

    @property
    def text(self) -> str:
        path = self.folder / "logs" / f"slurm-{self.number}.log"
        return path.read_text() if path.is_file() else ""

    def until(self, words: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while words not in self.text:
            state = self.slurm.state(self.number)["JobState"]
            assert state not in ENDED and time.monotonic() < deadline, f"{state}, no {words!r} in:\n{self.text}"
            time.sleep(0.2)

    def ended(self) -> str:
        deadline = time.monotonic() + LIMIT_S
        while (state := self.slurm.state(self.number)["JobState"]) not in ENDED:
            assert time.monotonic() < deadline, f"{state}:\n{self.text}"
            time.sleep(0.2)
        return state

    def processes(self) -> dict[str, list[psutil.Process]]:
        """What runs on each node's Ray."""
        found: dict[str, list[psutil.Process]] = {"n1": [], "n2": []}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                job, _, node = process.environ().get("MEGAPPO_NODE", "").partition("/")
                if job == str(self.number) and process.status() != psutil.STATUS_ZOMBIE:
                    found[node].append(process)
        return found

    def assert_nothing_left(self) -> None:
        deadline = time.monotonic() + 15
        while any(self.processes().values()) or list(Path("/tmp").glob(f"megappo-{self.number}-*")):
            assert time.monotonic() < deadline, self.processes()
            time.sleep(0.2)


def launch(folder: Path, slurm: Slurm, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``megappo launch slurm config.yaml ...``."""
    return subprocess.run(
        [sys.executable, "-m", "megappo", "launch", "slurm", "config.yaml", *SMALLER, *FLAGS, *arguments],
        cwd=folder,
        env={**slurm.env, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "127.0.0.1:1"},  # somebody else's
        capture_output=True,
        text=True,
        timeout=60,
    )


def submit(folder: Path, slurm: Slurm, run: str, *arguments: str) -> Job:
    done = launch(folder, slurm, f"run.dir={run}", "--submit", *arguments)
    found = re.search(r"Submitted batch job (\d+)", done.stdout)
    assert done.returncode == 0 and found, done.stdout + done.stderr
    return Job(int(found[1]), folder / run, slurm)


def pools_on(processes: list[psutil.Process]) -> set[str]:
    """The pools whose workers' logs these processes write."""
    names = set()
    for process in processes:
        with contextlib.suppress(OSError):
            names.add(Path(os.readlink(f"/proc/{process.pid}/fd/1")).name.split("-")[0])
    return names & {"train", "rollout"}


def test_a_job_stops_before_its_limit_requeues_itself_and_finishes(folder: Path, slurm: Slurm) -> None:
    hold = folder / "hold"
    hold.touch()  # no step ends before Slurm's signal
    (folder / "held.py").write_text(HELD_REWARD.format(hold=str(hold)))
    job = submit(folder, slurm, "whole", "roles.reward.function=held.py:compute_score", "--checkpoint-before=240")
    job.until("connecting actor and engines")
    running = job.processes()
    assert {node: pools_on(processes) for node, processes in running.items()} == {"n1": {"train"}, "n2": {"rollout"}}
    hours, minutes, _ = slurm.state(job.number)["RunTime"].split(":")
    limit = int(hours) * 60 + int(minutes) + 4  # less than what the checkpoint is to come before
    slurm.call("scontrol", "update", f"JobId={job.number}", f"TimeLimit={limit}")
    job.until("the time limit is near")
    hold.unlink()
    job.until("back into the queue")
    slurm.call("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")  # as it was: the next start has its time
    assert (job.folder / "checkpoints" / "step_1" / "trainer.json").is_file()
    job.until("resumed from the checkpoint of step 1")
    assert job.ended() == "COMPLETED", job.text
    assert slurm.state(job.number)["Restarts"] == "1"
    assert log_steps(job.folder) == [1, 2, 3]
    assert (job.folder / "checkpoints" / "step_3").is_dir() and (job.folder / "report.html").is_file()
    job.assert_nothing_left()
    logs = {path.name for path in (job.folder / "logs").iterdir()}
    assert {"node-n1.log", "node-n2.log", "train-rank0.log", "rollout-engine0.log"} <= logs


@pytest.mark.parametrize(
    ("on_n2", "words"),
    [("sleep 1000", "error: 1 of 2 nodes did not come: n2\n"), ("return 7", "n2: task 1: Exited with exit code 1")],
    ids=["hangs", "fails"],
)
def test_a_node_that_does_not_come_is_named(folder: Path, slurm: Slurm, on_n2: str, words: str) -> None:
    setup = folder / "setup.sh"
    setup.write_text(f'if [ "$SLURMD_NODENAME" = n2 ]; then {on_n2}; fi\n')
    limit_s = 60 + int(5 * os.getloadavg()[0])  # on a busy machine the head alone takes a minute to start
    job = submit(folder, slurm, f"late-{on_n2[0]}", "--setup=setup.sh", f"--node-timeout={limit_s}")
    assert job.ended() == "FAILED"
    assert words in job.text
    job.assert_nothing_left()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["roles.actor.tp=3"], "roles.actor.tp: 3 does not divide"),
        (["--partition=long"], "--partition: long does not exist: partitions are short"),
        (["--time=2:00:00"], "--time: 2:00:00 is more than the 1 h that partition short allows"),
        (["pools.train.devices_per_node=2"], "pools.train.devices_per_node: 2 does not fit on a node"),
        (["pools.train.nodes=3"], "pools: they need 4 nodes, partition short has 2"),
    ],
)
def test_mistakes_stop_before_sbatch(folder: Path, slurm: Slurm, arguments: list[str], words: str) -> None:
    done = launch(folder, slurm, *arguments, "run.dir=refused", "--submit")
    assert done.returncode == 2 and f"error: {words}" in done.stderr, done.stderr
    assert "Submitted" not in done.stdout and not (folder / "refused" / "launch").exists()
