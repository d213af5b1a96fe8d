"""``megappo doctor``: what hurts is named with its fix, rates are measured, and all nodes are looked at."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from small_run import make_run_folder

from megappo.cli import main
from megappo.config import load_config
from megappo.doctor.facts import GIB, Facts, look
from megappo.doctor.findings import Link, Needs, findings, slow_links
from megappo.doctor.measure import measure_device, write_profile
from megappo.doctor.probes import Seat, pairs, seats
from megappo.fit.devices import Device
from megappo.plan.limits import checkpoint_bytes
from megappo.plan.profile import load_profile
from megappo.stack import Wanted

pytestmark = pytest.mark.runs

GOOD = Facts(
    host="n1",
    clock=0.0,
    cores=64,
    memory=512 * GIB,
    shared_memory=(256 * GIB, 250 * GIB),
    open_files=(1048576, 1048576),
    locked_memory=(None, None),
    versions={"python": "3.12.1", "ray": "2.60.0"},
    lacking=(),
    devices=(Device("NVIDIA H200", 140 * GIB, 139 * GIB),) * 8,
    disk_free=10**13,
    write_rate=2e9,
)
NEEDS = Needs(checkpoint=10**11, kept=2, call_s=1800, host={"n1": 500 * GIB, "n7": 500 * GIB})


def test_nothing_hurts_on_good_nodes() -> None:
    assert list(findings({"n1": GOOD, "n2": replace(GOOD, host="n2")}, {"n1": 0.01, "n2": -0.9}, NEEDS)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shared_memory": (64 << 20, 64 << 20)}, ("/dev/shm: 0.1 GiB", "Ray wants 154 GiB", "--shm-size=154g")),
        ({"shared_memory": (256 * GIB, 20 * GIB)}, ("only 20.0 of 256.0 GiB are free", "remove")),
        ({"open_files": (1024, 1048576)}, ("open files: 1024", "ulimit -n 65536")),
        ({"open_files": (4096, 4096)}, ("open files: 4096", "LimitNOFILE")),
        ({"lacking": ("ray: not installed: pip install 'ray==2.60.0'",)}, ("pip install 'ray==2.60.0'",)),
        ({"devices": (Device("NVIDIA H200", 140 * GIB, 100 * GIB),)}, ("device 0: 40.0 GiB are taken", "nvidia-smi")),
        ({"write_rate": None}, ("run.dir: nothing can be written",)),
        ({"write_rate": 2e8}, ("200 MB/s", "100 GB takes 8 min", "faster file system")),
        ({"memory": 400 * GIB}, ("host memory: 400 GiB, and what is offloaded and saved takes 500: offload less",)),
        ({"disk_free": 2 * 10**11}, ("200 GB are free, 3 checkpoints take 300", "run.keep_checkpoints")),
    ],
)
def test_what_hurts_is_named_with_its_fix(change: dict[str, object], words: tuple[str, ...]) -> None:
    (line,) = findings({"n7": replace(GOOD, **change)}, {}, NEEDS)  # type: ignore[arg-type]
    assert line.startswith("n7: ") and all(word in line for word in words), line


def test_writing_a_checkpoint_is_one_call() -> None:
    slow, limit = findings({"n7": replace(GOOD, write_rate=1e8)}, {}, NEEDS)
    assert "100 GB takes 17 min" in slow
    assert limit.startswith("n7: run.timeout_s: 1800 s is less than twice the 1000 s that a checkpoint takes if one")
    assert limit.endswith(": give 2000")


def test_rays_store_is_never_larger_than_ray_lets_it_be() -> None:
    large = replace(GOOD, memory=2048 * GIB, shared_memory=(200 * GIB, 190 * GIB))
    assert list(findings({"n7": large}, {}, NEEDS)) == []
    (line,) = findings({"n7": replace(large, shared_memory=(180 * GIB, 180 * GIB))}, {}, NEEDS)
    assert "Ray wants 186 GiB" in line  # 200e9 bytes


@pytest.mark.parametrize(
    ("limits", "fix"),
    [
        ((8 << 20, None), 'ulimit -l "$(ulimit -Hl)" in the job'),
        ((8 << 20, 8 << 20), "have LimitMEMLOCK=infinity set for Slurm's or Ray's daemon"),
        ((64 << 30, None), ""),
    ],
)
def test_locked_memory_counts_between_nodes(limits: tuple[int, int | None], fix: str) -> None:
    n1 = replace(GOOD, locked_memory=limits)
    assert list(findings({"n1": n1}, {}, NEEDS)) == []
    found = list(findings({"n1": n1, "n2": GOOD}, {}, NEEDS))
    assert [line.split(": ")[:2] for line in found] == [["n1", "locked memory"]] * bool(fix)
    assert all("0.0078 GiB" in line and line.endswith(fix) for line in found)
    on_cpu = {name: replace(facts, devices=()) for name, facts in (("n1", n1), ("n2", GOOD))}
    assert list(findings(on_cpu, {}, NEEDS)) == []


def test_a_single_node_does_with_fewer_open_files() -> None:
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    (line,) = findings({"node 10.0.0.7 (train, serve)": replace(GOOD, open_files=(1024, 1048576))}, {}, NEEDS)
    assert f"\nwill hurt: {line}\n" in readme
    n1 = replace(GOOD, open_files=(20000, 20000))
    assert list(findings({"n1": n1}, {}, NEEDS)) == []
    (line,) = findings({"n1": n1, "n2": GOOD}, {}, NEEDS)
    assert line == (
        "n1: open files: 20000, of which Ray and NCCL run out; 65536 are usual: have LimitNOFILE raised for jobs"
    )


def test_nodes_that_differ_are_named() -> None:
    other = replace(GOOD, devices=(Device("NVIDIA H100", 80 * GIB, 80 * GIB),), versions={"ray": "2.59.0"})
    clock, devices, versions = findings({"n1": GOOD, "n2": other}, {"n2": 3.2}, NEEDS)
    assert clock.startswith("n2: its clock is +3.2 s off") and "chronyc" in clock
    assert "NVIDIA H200 on n1; NVIDIA H100 on n2" in devices
    assert "ray 2.59.0 on n2" in versions


def test_links_are_compared_with_what_such_devices_usually_reach() -> None:
    links = [
        Link("a", 360e9, across=False, device="NVIDIA H200"),
        Link("b", 20e9, across=False, device="NVIDIA H200"),
        Link("c", 40e9, across=True, device="NVIDIA H200"),
        Link("d", 1e9, across=True, device="NVIDIA H200"),
        Link("e", 1e6, across=True, device="cpu"),
    ]
    inside, across = slow_links(links)
    assert inside.startswith("b: 20.0 GB/s where 367 are usual") and "nvidia-smi topo" in inside
    assert across.startswith("d: 1.0 GB/s where 45 are usual") and "NCCL_SOCKET_IFNAME" in across


def test_this_machine_is_looked_at(tmp_path: Path) -> None:
    wanted = (Wanted("pyyaml", (1,), (99,), "pyyaml"), Wanted("no-such-package", (1,), (2,), "no-such-package==1"))
    facts = look(str(tmp_path / "not" / "yet"), wanted, probe_bytes=1 << 20)
    assert abs(facts.clock - time.time()) < 60
    assert facts.cores >= 1 and facts.memory > GIB and facts.open_files[0] > 0
    assert facts.write_rate is not None and facts.write_rate > 1e5 and facts.disk_free > 0
    assert list(tmp_path.iterdir()) == []  # nothing is left
    assert [line.split(":")[0] for line in facts.lacking] == ["no-such-package"]
    assert facts.versions["no-such-package"] == "-" and facts.versions["pyyaml"] == yaml.__version__


def test_a_measured_device_is_a_profile_for_plan(tmp_path: Path) -> None:
    began = time.perf_counter()
    profile = measure_device(matrix=256, copied=8 << 20)
    spent = time.perf_counter() - began
    write_profile(tmp_path / "mine.yaml", profile)
    found = load_profile(str(tmp_path / "mine.yaml"))
    # It ran 6 products and 6 copies in that time, so that the best of them was no slower than that.
    assert found.flops > 6 * 2 * 256**3 / spent / 6
    assert found.bandwidth > 2 * (8 << 20) / spent
    assert found.memory > GIB and found.host_gb_s > 0


def test_which_devices_talk_to_which() -> None:
    places = [Seat("a", 0, 0), Seat("a", 0, 7), Seat("a", 1, 0), Seat("a", 1, 7), Seat("a", 2, 0), Seat("b", 0, 0)]
    assert list(pairs(places)) == [(0, 1), (0, 2), (0, 5), (2, 3), (2, 4)]


def test_all_nodes_of_the_pools_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent))
    text = Path("config.yaml").read_text()
    begin, end = text.index("pools:"), text.index("  rollout:")
    pools = "pools: {train: {devices_per_node: 2}, serve: {devices_per_node: 1}}\n"
    roles = "roles:\n  actor: {pool: train}\n  critic: {pool: train}\n  reference: {pool: train}\n"
    Path("config.yaml").write_text(text[:begin] + pools + roles + text[end:])
    config = load_config("config.yaml", [])
    assert seats(config) == [Seat("train", 0, 0), Seat("train", 0, 1), Seat("serve", 0, 0)]
    assert checkpoint_bytes(config) > 2 * 12 * 51 * 128
    assert main(["doctor", "config.yaml"]) in (0, 1)  # this machine may have its faults
    out, err = capsys.readouterr()
    assert re.match(r"node [\d.]+ \(train, serve\)\n  python 3", out), err
    for link in ("inside train", "train to serve"):
        (rate,) = re.findall(rf"([\d.]+) GB/s  {link}, between processes of a node \([\d.]+\)", out)
        assert 0.001 < float(rate) < 100
    assert re.search(r"clock [+-]0\.\d+ s", out)
