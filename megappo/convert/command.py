"""The conversion as one call: look at everything first, then write, then compare."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megappo.convert.destination import check_destination, destination_folder, is_made, places, writing
from megappo.convert.from_checkpoint import FromCheckpoint
from megappo.convert.source import Source, find_source, has_adapters
from megappo.convert.to_hugging_face import ToHuggingFace
from megappo.convert.to_megatron import ToMegatron
from megappo.formats.dtypes import DTYPES
from megappo.formats.safetensors_files import set_aside
from megappo.layout.mesh import Layout
from megappo.models.spec import ModelError

SIZES = ("tp", "pp", "vpp", "ep", "etp")
"""Options that say whose ranks' parts a checkpoint's files will be."""


@dataclass(frozen=True)
class Options:
    """How to convert.

    Attributes:
        to: "hf" or "megatron"; by default the one that the source is not. Of adapters: "hf" (merged) or "peft".
        tp, pp, vpp: to Megatron: whose ranks' parts the files will be; vpp chunks of each of pp stages.
        ep, etp: of a mixture: over how many ranks of a stage its experts are dealt out, and for how many each of them
            is cut (as many as ``tp`` by default).
        role: of a run's checkpoint; by default the actor, or the reward model of reward-train.
        model: folder of the config and tokenizer of a Megatron checkpoint that does not say.
        dtype: "bfloat16", "float16" or "float32"; by default the weights' own.
        shard_gb: to Hugging Face: limit of a shard, in 10^9 bytes.
        bucket_mb: limit of a chunk of a checkpoint, and of a piece of a merged weight, in 2^20 bytes.
        processes: that share the work; 0: one for each core, 8 at most.
        overwrite: replace what is at the destination.
        verify: compare both sides in the end.
    """

    to: str | None = None
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    role: str | None = None
    model: str | None = None
    dtype: str | None = None
    shard_gb: float = 4.0
    bucket_mb: int = 32
    processes: int = 0
    overwrite: bool = False
    verify: bool = False


def convert(source: str | Path, destination: str | Path, options: Options, say: Callable[[str], None]) -> None:
    """Convert ``source`` into the new folder ``destination``.

    Args:
        say: told what was done, a line at a time.

    Raises:
        ModelError: something is wrong with the source, the destination or the options; nothing was written.
        ShareError: a process died; nothing is left at ``destination``.
        VerifyError: the two sides differ.
    """
    with reading(source):
        found = find_source(Path(source), options.role, Path(options.model) if options.model else None)
        folder = destination_folder(destination)
        _check(found, folder, options)
        record = _record(found, options)
    if is_made(folder, record):
        say(f"{folder}: is there already, made from the same: nothing to do")
    else:
        _write(found, folder, options, record, say)
    if options.verify:
        from megappo.convert.verify import verify

        to_hf = found.format == "megatron"
        pair = (folder, found.folder) if to_hf else (found.folder, folder)
        say(verify(*pair, to_hf=to_hf, processes=_processes(options)))


def _write(found: Source, folder: Path, options: Options, record: dict[str, Any], say: Callable[[str], None]) -> None:
    begin = time.monotonic()
    dtype = DTYPES[options.dtype] if options.dtype else None
    bucket_bytes = options.bucket_mb * 2**20
    work: ToMegatron | FromCheckpoint
    with reading(found.folder):
        if found.format == "hf":
            for remark in set_aside(found.folder):
                say(f"warning: {remark}")
            work = ToMegatron(found.folder, dtype, _layout(options), bucket_bytes)
        else:
            kind, shard_bytes = _kind(found, options), int(options.shard_gb * 1e9)
            scores = found.folder.name == "reward"
            work = kind(found.folder, found.model_folder, dtype, shard_bytes, bucket_bytes, scores=scores)
    check_destination(folder, overwrite=options.overwrite, needed_bytes=work.num_bytes)
    try:
        with writing(folder, record) as partial:
            work.write(partial, _processes(options))
            if _record(found, options) != record:
                raise ModelError([f"{found.folder}: was changed while it was read: give the same command again"])
    except OSError as error:
        raise ModelError([f"{folder}: cannot be written ({error}): free or change its disk"]) from None
    if isinstance(work, FromCheckpoint) and work.unproven:
        say(
            f"warning: {found.folder}: {work.unproven} have no checksum "
            "(torch.serialization.set_crc32_options(False)), so that damage to them would not be seen: "
            "compare the files with those that were saved"
        )
    head = "scalar" if work.scalar_head else "language-model"
    what = "adapters of " if options.to == "peft" else ""
    say(
        f"{folder}: {what}{work.spec.family} with a {head} head, {work.num_bytes / 1e9:.2f} GB "
        f"in {time.monotonic() - begin:.1f} s"
    )


@contextmanager
def reading(source: str | Path) -> Iterator[None]:
    """Name what cannot be read, for want of permissions say.

    Raises:
        ModelError: what is done here raised OSError.
    """
    try:
        yield
    except OSError as error:
        why = f"cannot be read ({error.strerror or error}): change its permissions, or copy it again"
        raise ModelError([f"{error.filename or source}: {why}"]) from None


def _kind(found: Source, options: Options) -> type[FromCheckpoint]:
    if not has_adapters(found.folder):
        return ToHuggingFace
    from megappo.convert.adapters import ToMerged, ToPeft  # which import torch

    return ToPeft if options.to == "peft" else ToMerged


def _layout(options: Options) -> Layout:
    """The smallest layout with these sizes: a stage has room for both the dense weights' ranks and the experts'."""
    tp, experts = options.tp, (options.etp or options.tp) * options.ep
    dp = math.lcm(tp, experts) // tp
    return Layout(tp=tp, ep=options.ep, dp=dp, pp=options.pp, vpp=options.vpp, etp=options.etp or 0)


def _processes(options: Options) -> int:
    return options.processes or min(len(os.sched_getaffinity(0)), 8)


def _check(found: Source, folder: Path, options: Options) -> None:
    """What is wrong with the call itself."""
    other = {"hf": "megatron", "megatron": "hf"}[found.format]
    problems = []
    adapted = has_adapters(found.folder)
    if options.to == "peft" and not adapted:
        problems.append(f"--to peft: {found.folder} has no adapters: leave it out")
    elif options.to not in (None, other, "peft"):
        problems.append(f"--to {options.to}: {found.folder} is in that format already: give --to {other}, or copy it")
    if found.format == "megatron" and any(getattr(options, name) != getattr(Options, name) for name in SIZES):
        named = ", ".join(f"--{name}" for name in SIZES)
        problems.append(f"{named}: a Hugging Face folder has no layout: leave them out")
    if found.format == "hf":
        problems += [
            f"--{name} {value}: {found.folder} is a Hugging Face folder, with one model and a config: leave it out"
            for name, value in (("role", options.role), ("model", options.model))
            if value
        ]
    if options.verify and adapted:
        problems.append("--verify: adapters have no other side to be compared with: leave it out")
    for name in (*SIZES, "shard_gb", "bucket_mb"):
        if (value := getattr(options, name)) is not None and not 0 < value < math.inf:
            problems.append(f"--{name.replace('_', '-')} {getattr(options, name)}: must be positive")
    if options.processes < 0:
        problems.append(f"--processes {options.processes}: must be at least 1")
    source = found.folder.resolve()
    for place in (path.resolve() for path in places(folder)):
        if source in (place, *place.parents) or place in source.parents:
            problems.append(f"{place}: lies in {found.folder} or around it: choose a DST elsewhere")
            break
    if problems:
        raise ModelError(problems)


def _record(found: Source, options: Options) -> dict[str, Any]:
    """What decides the result: if this is the same, so is the result."""
    form: dict[str, Any] = {"to": "peft"} if options.to == "peft" else {}
    form |= {name: getattr(options, name) for name in ("ep", "etp") if getattr(options, name) != getattr(Options, name)}
    files = {str(path.resolve()): [path.stat().st_size, path.stat().st_mtime_ns] for path in found.files()}
    chosen = {name: asdict(options)[name] for name in ("tp", "pp", "vpp", "dtype", "shard_gb", "bucket_mb")}
    return {
        "source": str(found.folder.resolve()),
        "model": str(found.model_folder.resolve()),
        "files": files,
        **chosen,
        **form,
    }
