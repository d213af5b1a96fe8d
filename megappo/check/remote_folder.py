"""``run.dir`` as a URL: whether this installation can reach and write such. Whether the place answers is seen at the
start."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from megappo.check.findings import Advice
from megappo.config import RunConfig
from megappo.config.run import is_url

SHOWN = ("s3", "gs", "abfs", "sftp", "file")
READ_ONLY = {*("data", "dvc", "gist", "git", "github", "http", "https", "libarchive", "pyscript", "tar", "zip")}
WRAPPERS = {
    *("async_wrapper", "asyncwrapper", "blockcache", "cached", "dir", "filecache", "generic", "reference"),
    "simplecache",
}
"""Protocols of fsspec that are a view of another place."""


def remote_folder_findings(run: RunConfig) -> Iterator[str]:
    """Of a run's folder, wherever it is."""
    from fsspec.registry import known_implementations

    if not run.is_remote:
        one_slash = re.match(r"([A-Za-z][\w+.-]+):/", run.dir)
        if one_slash and one_slash[1] in known_implementations:
            meant = run.dir.replace(":/", ":///" if one_slash[1] in ("file", "local") else "://", 1)
            yield f"run.dir: {run.dir} is neither a URL nor a folder: did you mean {meant}?"
        elif run.work_dir is not None:
            yield (
                f"run.work_dir: {run.work_dir} is for a run.dir that is a URL, and {run.dir} is a folder, in which the "
                "run works itself: leave it out"
            )
        return
    protocol, _, path = run.dir.partition("://")
    if not path.strip("/") or "::" in run.dir or ".." in path.split("/"):
        yield f"run.dir: {run.dir} names no folder: give PROTOCOL://PATH, as s3://bucket/run"
        return
    known = known_implementations.get(protocol)
    shown = ", ".join(SHOWN)
    if known is None:
        yield f"run.dir: {protocol}:// is no protocol that fsspec knows: known are, among others, {shown}"
    elif protocol in READ_ONLY | WRAPPERS:
        why = "cannot be written" if protocol in READ_ONLY else "is no place of its own"
        yield f"run.dir: {protocol}:// {why}: give a folder here, or a URL of, for example, {shown}"
    elif reason := _lacking(known["class"]):
        yield f"run.dir: {protocol}:// needs {reason}, or give a folder here"
    elif run.work_dir is not None and is_url(run.work_dir):
        yield f"run.work_dir: {run.work_dir} is a URL: give a folder here, which goes up to run.dir"
    elif problem := overlap(run.dir, run.folder):
        yield f"run.dir: {problem}"
    elif protocol == "memory":
        yield Advice(f"run.dir: {run.dir} is memory of this process, and vanishes with it: give a place that stays")


def local_place(url: str) -> Path | None:
    """The folder that a URL names, where it is one of this machine."""
    if url.partition("://")[0] not in ("file", "local"):
        return None
    from fsspec.implementations.local import LocalFileSystem

    return Path(LocalFileSystem._strip_protocol(url))


def overlap(url: str, folder: Path) -> str:
    """What is wrong with a working folder that is the URL's place, or in it, or around it; empty if it is apart."""
    if (place := local_place(url)) is None:
        return ""
    there, here = place.resolve(), folder.resolve()
    if there != here and there not in here.parents and here not in there.parents:
        return ""
    how = "is" if there == here else "lies in" if there in here.parents else "is around"
    return f"{url}: the working folder {folder} {how} that place, and would be copied onto itself: give another"


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
