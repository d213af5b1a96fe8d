"""A real Slurm on this machine: a controller and two nodes, each with an address of its own in 127.0.0.0/8."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
INSTALL = "apt-get install -y --no-install-recommends slurm-wlm munge"

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MinJobAge=300
KillWait=10
OverTimeLimit=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SchedulerParameters=sched_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.2 Port={port1} CPUs=4 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.3 Port={port2} CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=short Nodes=n1,n2 Default=YES MaxTime=60 State=UP
"""


def why_not() -> str:
    """Why no Slurm is started here; empty if one is.

    ``MEGAPPO_TEST_SLURM=1`` starts the one that is installed, ``=install`` has Debian's installed first. Not by
    default: it takes minutes, and daemons have no business on a machine that belongs to a cluster.
    """
    wish = os.environ.get("MEGAPPO_TEST_SLURM", "")
    if not wish:
        return "starts Slurm's daemons and takes minutes: set MEGAPPO_TEST_SLURM=1, or =install to have it installed"
    missing = [name for name in DAEMONS if shutil.which(name) is None]
    if missing and wish == "install" and os.geteuid() == 0:
        done = subprocess.run(INSTALL.split(), capture_output=True, text=True, env={**os.environ, **_QUIET})
        missing = [name for name in DAEMONS if shutil.which(name) is None]
        if missing:
            return f"{INSTALL} failed: {done.stderr.strip()[-200:]}"
    if missing:
        return f"Slurm is not installed (no {', '.join(missing)}): {INSTALL}, or set MEGAPPO_TEST_SLURM=install"
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    return ""


_QUIET = {"DEBIAN_FRONTEND": "noninteractive"}


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Slurm:
    """Attributes: ``env``, with which Slurm's commands talk to this one."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env

    def call(self, *command: str) -> str:
        """Standard output of one of Slurm's commands."""
        return subprocess.run(command, env=self.env, check=True, capture_output=True, text=True, timeout=30).stdout

    def state(self, job: int) -> dict[str, str]:
        """What ``scontrol`` knows of a job."""
        pairs = (word.partition("=") for word in self.call("scontrol", "show", "job", str(job)).split())
        return {name: value for name, equals, value in pairs if equals}


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Slurm]:
    """Start everything; end everything."""
    munge = pwd.getpwnam("munge")
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    (folder / "munge").mkdir(mode=0o755)
    for path in (key, folder / "munge"):
        os.chown(path, munge.pw_uid, munge.pw_gid)
    port, port1, port2 = _free_ports(3)
    host = socket.gethostname().split(".")[0]
    conf = CONF.format(host=host, folder=folder, port=port, port1=port1, port2=port2)
    (folder / "slurm.conf").write_text(conf)
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    daemons: list[subprocess.Popen[bytes]] = []

    def start(command: Sequence[str], **more: int) -> None:
        log = (folder / f"{Path(command[0]).name}{len(daemons)}.out").open("wb")
        # A session of its own: what a node leaves behind must not be taken for ours.
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **more,  # type: ignore[call-overload]
        )
        daemons.append(process)

    try:
        own = {"user": munge.pw_uid, "group": munge.pw_gid}
        names = {"key-file": key, **{f"{n}-file": folder / "munge" / n for n in ("pid", "log", "seed")}}
        options = [f"--{name}={path}" for name, path in names.items()]
        start(["munged", "--foreground", "--force", f"--socket={folder}/munge/socket", *options], **own)
        _until(lambda: (folder / "munge" / "socket").exists(), folder)
        start(["slurmctld", "-D"])
        for node in ("n1", "n2"):
            start(["slurmd", "-D", "-N", node])
        slurm = Slurm(env)

        def ready() -> bool:
            with contextlib.suppress(subprocess.CalledProcessError):
                return slurm.call("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2"
            return False

        _until(ready, folder)
        yield slurm
    finally:
        for process in reversed(daemons):
            process.send_signal(signal.SIGTERM)
        for process in daemons:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _until(happened: object, folder: Path, limit_s: float = 30) -> None:
    assert callable(happened)
    deadline = time.monotonic() + limit_s
    while not happened():
        if time.monotonic() > deadline:
            logs = "\n".join(f"--- {path}\n{path.read_text()[-1500:]}" for path in folder.glob("*.out"))
            raise AssertionError(f"Slurm did not start in {limit_s} s\n{logs}")
        time.sleep(0.1)
