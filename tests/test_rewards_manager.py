"""Real processes, and rewards that do what rewards should not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from megappo.rewards.manager import SCHEMA, RewardManager
from megappo.rewards.resolve import RewardError
from megappo.rewards.worker import Outcome, judge

pytestmark = pytest.mark.alone

LIMIT_S = 0.8

# Does what the response says, after noting row and process in the file that extra_info names as its mark.
SOURCE = """
import ctypes, os, pathlib, signal, subprocess, sys, time

print("imported")

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    what, _, argument = solution_str.partition(" ")
    if "mark" in extra_info:
        with open(extra_info["mark"], "a") as file:
            file.write(f"{extra_info['row']} {os.getpid()}\\n")
    if what == "right":
        return 1.0 if argument == ground_truth else 0.0
    if what == "return":
        return eval(argument)
    if what == "raise":
        raise ValueError("no " + argument)
    if what == "quit":
        sys.exit("enough")
    if what == "sleep":
        time.sleep(float(argument))
        return 1.0
    if what == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            try:
                time.sleep(600)
            except BaseException:
                pass
    if what == "hold_the_gil":
        ctypes.PyDLL(None).sleep(600)
    if what == "exit":
        os._exit(3)
    if what == "segfault":
        ctypes.string_at(0)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "child":
        child = subprocess.Popen(["sleep", "600"])
        pathlib.Path(argument).write_text(str(child.pid))
        child.wait()
    if what == "print":
        print("NOISE on stdout"); print("NOISE on stderr", file=sys.stderr); os.system("echo NOISE from a child")
        return 1
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("reward") / "obedient.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.fixture(scope="module")
def manager(file: str) -> Iterator[RewardManager]:
    with RewardManager(file, {}, timeout_s=LIMIT_S, processes=2) as manager:
        yield manager


def table(count: int, truth: str = "1", source: str = "s", mark: Path | None = None) -> pa.Table:
    info = [json.dumps({} if mark is None else {"mark": str(mark), "row": i}) for i in range(count)]
    return pa.table(
        {
            "id": pa.array(range(100, 100 + count), pa.int64()),
            "data_source": pa.array([source] * count, pa.string()),
            "ground_truth": pa.array([truth] * count, pa.string()),
            "extra_info": pa.array(info, pa.string()),
        }
    )


def gone(pid: int, limit_s: float = 60.0) -> bool:
    """Whether the process ends (or is a zombie that nobody has reaped yet) within the limit."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_scores_come_in_order_with_their_ids(manager: RewardManager) -> None:
    result = manager.score(table(200, truth="7"), [f"right {i % 10}" for i in range(200)])
    assert result.schema == SCHEMA
    assert result["id"].to_pylist() == list(range(100, 300))
    assert result["score"].to_pylist() == [float(i % 10 == 7) for i in range(200)]
    assert not any(result["failed"].to_pylist())
    assert manager.score(table(0), []).num_rows == 0


@pytest.mark.parametrize(
    ("value", "score", "extras"),
    [
        ("0.5", 0.5, {}),
        ("True", 1.0, {}),
        ("-2", -2.0, {}),
        ("__import__('fractions').Fraction(1, 4)", 0.25, {}),
        (
            "{'score': 1, 'acc': True, 'pred': 'x', 'n': 3, 'bad': float('nan'), 'none': None}",
            1.0,
            {"acc": 1, "n": 3, "pred": "x"},
        ),
    ],
)
def test_numbers_and_dicts_are_scores(
    manager: RewardManager, value: str, score: float, extras: dict[str, float | str]
) -> None:
    [row] = manager.score(table(1), [f"return {value}"]).to_pylist()
    assert (row["score"], row["failed"], row["failure"]) == (score, False, "")
    assert json.loads(row["extras"]) == extras


def test_numpy_scalars_are_numbers_and_arrays_are_not() -> None:
    assert judge(np.float32(0.5)) == Outcome(0.5)
    assert judge({"score": np.int64(2), "acc": np.bool_(True)}) == Outcome(2.0, "", '{"acc": 1.0}')
    assert judge(np.array([1.0, 2.0])).failure == "returned array([1., 2.]), not a number"


@pytest.mark.parametrize(
    ("response", "failure"),
    [
        ("raise luck", "ValueError: no luck"),
        ("quit", "SystemExit: enough"),
        ("sleep 60", f"timeout after {LIMIT_S} s"),
        ("stubborn", f"timeout after {LIMIT_S} s"),
        ("hold_the_gil", f"timeout after {LIMIT_S} s"),
        ("exit", "exited with code 3"),
        ("segfault", "killed by SIGSEGV"),
        ("kill", "killed by SIGKILL (out of memory?)"),
        ("return float('nan')", "returned nan"),
        ("return -float('inf')", "returned -inf"),
        ("return 1e39", "returned 1e+39"),
        ("return 10**400", f"returned {10**400}"[:300] + "..."),
        ("return None", "returned None, not a number"),
        ("return '1'", "returned '1', not a number"),
        ("return [1.0]", "returned [1.0], not a number"),
        ("return 1j", "returned 1j, not a number"),
        ("return {'acc': 1}", "returned a dict without 'score': its keys are acc"),
        ("return {'score': None}", "returned None, not a number"),
        (
            "return object.__new__(type('Odd', (), {'__repr__': lambda s: 1 / 0}))",
            "ZeroDivisionError: division by zero",
        ),
    ],
)
def test_a_bad_reward_costs_its_row_only(manager: RewardManager, response: str, failure: str) -> None:
    texts = ["right 1"] * 40
    texts[17] = response
    rows = manager.score(table(40), texts).to_pylist()
    bad = rows.pop(17)
    assert (bad["id"], bad["score"], bad["failed"], bad["extras"]) == (117, 0.0, True, "{}")
    assert bad["failure"] == failure
    assert all(row["score"] == 1.0 and not row["failed"] for row in rows)


def test_every_row_is_run_once_though_processes_die(manager: RewardManager, tmp_path: Path) -> None:
    texts = ["right 1"] * 60
    for index, bad in ((0, "exit"), (1, "segfault"), (30, "sleep 60"), (31, "exit"), (59, "hold_the_gil")):
        texts[index] = bad
    result = manager.score(table(60, mark=tmp_path / "mark"), texts)
    assert [i for i, failed in enumerate(result["failed"].to_pylist()) if failed] == [0, 1, 30, 31, 59]
    ran = [int(line.split()[0]) for line in (tmp_path / "mark").read_text().splitlines()]
    assert sorted(ran) == list(range(60))


def test_a_limit_is_for_one_row_not_for_a_chunk(manager: RewardManager) -> None:
    result = manager.score(table(12), ["sleep 0.2"] * 12)  # 1.2 s a process, under a limit of 0.8 s
    assert result["score"].to_pylist() == [1.0] * 12


def test_processes_killed_while_idle_are_replaced(manager: RewardManager, tmp_path: Path) -> None:
    manager.score(table(40, mark=tmp_path / "mark"), ["sleep 0.01"] * 40)
    pids = {int(line.split()[1]) for line in (tmp_path / "mark").read_text().splitlines()}
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
    assert manager.score(table(10), ["right 1"] * 10)["score"].to_pylist() == [1.0] * 10


def test_what_a_reward_started_ends_with_it(manager: RewardManager, tmp_path: Path) -> None:
    result = manager.score(table(1), [f"child {tmp_path / 'pid'}"])
    assert result["failure"].to_pylist() == [f"timeout after {LIMIT_S} s"]
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_thousand_trivial_rewards_take_well_under_a_second(manager: RewardManager) -> None:
    took = []
    for _ in range(3):
        start = time.monotonic()
        manager.score(table(1000), ["right 1"] * 1000)
        took.append(time.monotonic() - start)
    assert min(took) < 1  # about 0.05 s; a process for each would take minutes


def test_nothing_reaches_the_console_and_the_log_has_it_all(
    file: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with RewardManager(file, {}, 5, 1, log_file=str(tmp_path / "log")) as manager:
        assert manager.score(table(1), ["print"])["score"].to_pylist() == [1.0]
    assert capfd.readouterr() == ("", "")
    lines = sorted((tmp_path / "log").read_text().splitlines())
    assert lines == ["NOISE from a child", "NOISE on stderr", "NOISE on stdout", "imported"]


def test_sources_have_functions_of_their_own(file: str) -> None:
    with RewardManager(None, {"sums": "megappo.rewards.arithmetic", "s": file}, 5, 1) as manager:
        both = pa.concat_tables([table(1, "46", "sums"), table(1)])
        assert manager.score(both, ["46", "return 3"])["score"].to_pylist() == [1.0, 3.0]
        with pytest.raises(RewardError, match="no reward for data_source 'other'; known: 's', 'sums'"):
            manager.score(table(1, source="other"), ["46"])
        with pytest.raises(RewardError, match="'other'"):
            manager.check_sources(["sums", "other"])
        assert manager.score(table(1), ["return 3"])["score"].to_pylist() == [3.0]  # still in use
        with pytest.raises(ValueError, match="1 rows and 2 texts"):
            manager.score(table(1), ["1", "2"])


def test_a_wrong_reward_fails_at_once(tmp_path: Path) -> None:
    path = tmp_path / "dies.py"
    path.write_text("import os; os._exit(5)")
    with pytest.raises(RewardError, match=r"did not start: exited with code 5"):
        RewardManager(str(path), {}, 5, 2)
    with pytest.raises(RewardError, match=r"'megappo\.rewards\.nothing': no module"):
        RewardManager(None, {"s": "megappo.rewards.nothing"}, 5, 2)
    with pytest.raises(RewardError, match=r"set roles\.reward\.function"):
        RewardManager(None, {}, 5, 2)
    with pytest.raises(ValueError, match="must be positive"):
        RewardManager("megappo.rewards.gsm8k", {}, 0, 2)


def test_a_closed_manager_says_so(file: str) -> None:
    manager = RewardManager(file, {}, 5, 1)
    manager.close()
    manager.close()
    with pytest.raises(RewardError, match="closed"):
        manager.score(table(1), ["right 1"])


def test_a_manager_outlives_the_thread_that_made_it(file: str) -> None:
    made: list[RewardManager] = []
    thread = threading.Thread(target=lambda: made.append(RewardManager(file, {}, 5, 2)))
    thread.start()
    thread.join()
    time.sleep(0.2)
    with made[0] as manager:
        assert manager.score(table(10), ["right 1"] * 10)["score"].to_pylist() == [1.0] * 10


PARENT = """
import sys
import pyarrow as pa
from megappo.rewards.manager import RewardManager
manager = RewardManager(sys.argv[1], {}, 600, 2)
info = '{"mark": "' + sys.argv[2] + '", "row": 0}'
data = pa.table({"id": [0, 1], "data_source": ["s", "s"], "ground_truth": ["1", "1"], "extra_info": [info, info]})
manager.score(data, sys.argv[3:])
"""


@pytest.mark.parametrize("texts", [("hold_the_gil", "stubborn"), ("right 1", "right 1")])
def test_no_process_outlives_a_parent_that_is_killed(file: str, tmp_path: Path, texts: tuple[str, str]) -> None:
    mark = tmp_path / "mark"
    idle = texts[0] == "right 1"
    source = PARENT + ("import time; time.sleep(600)" if idle else "")
    parent = subprocess.Popen([sys.executable, "-c", source, file, str(mark), *texts])
    try:
        deadline = time.monotonic() + 200
        while not (mark.exists() and mark.read_text().count("\n") == 2) and time.monotonic() < deadline:
            time.sleep(0.02)
        pids = [int(line.split()[1]) for line in mark.read_text().splitlines()]
        assert len(pids) == 2 and not any(gone(pid, 0.05) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
    assert all(gone(pid) for pid in pids)
