"""``run.dir`` as a URL: whether this installation can reach such. Whether the place answers is seen at the start."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator

from megappo.config import RunConfig

SHOWN = ("s3", "gs", "abfs", "sftp", "file")


def remote_folder_findings(run: RunConfig) -> Iterator[str]:
    """Of a run's folder, wherever it is."""
    if not run.is_remote:
        if run.work_dir is not None:
            yield (
                f"run.work_dir: {run.work_dir} is for a run.dir that is a URL, and {run.dir} is a folder, in which the "
                "run works itself: leave it out"
            )
        return
    protocol, _, path = run.dir.partition("://")
    if not path.strip("/") or "::" in run.dir or ".." in path.split("/"):
        yield f"run.dir: {run.dir} names no folder: give PROTOCOL://PATH, as s3://bucket/run"
        return
    from fsspec.registry import known_implementations

    known = known_implementations.get(protocol)
    if known is None:
        yield f"run.dir: {protocol}:// is no protocol that fsspec knows: known are, among others, {', '.join(SHOWN)}"
        return
    if reason := _lacking(known["class"]):
        yield f"run.dir: {protocol}:// needs {reason}, or give a folder here"


def _lacking(implementation: str) -> str:
    """What is not installed, and how to have it. Others' packages are looked for, and not imported: they are large."""
    module = implementation.rpartition(".")[0]
    package = module.partition(".")[0]
    if package != "fsspec":
        missing = importlib.util.find_spec(package) is None
        return f"the package {package}, which is not installed: pip install {package}" if missing else ""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"what is not installed ({error}): pip install {error.name or package}"
    return ""
