"""The conversion as one call: look at everything first, then write, then compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megappo.convert.destination import check_destination, destination_folder, is_made, places, tidy, writing
from megappo.convert.from_checkpoint import FromCheckpoint
from megappo.convert.options import Made, Options
from megappo.convert.source import Source, find_source, has_adapters
from megappo.convert.to_hugging_face import ToHuggingFace
from megappo.convert.to_megatron import ToMegatron
from megappo.formats.dtypes import DTYPES
from megappo.formats.safetensors_files import set_aside
from megappo.models.spec import ModelError


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
        found = find_source(Path(source), options.role, None if options.model is None else Path(options.model))
        folder = destination_folder(destination)
        _check(found, folder, options)
        record = _record(found, options)
    if is_made(folder, record):
        tidy(folder)
        say(f"{folder}: is there already, made from the same: nothing to do")
    else:
        _write(found, folder, options, record, say)
    if options.verify:
        from megappo.convert.verify import verify

        to_hf = found.format == "megatron"
        pair = (folder, found.folder) if to_hf else (found.folder, folder)
        say(verify(*pair, to_hf=to_hf, processes=options.most_processes))


def _write(found: Source, folder: Path, options: Options, record: dict[str, Any], say: Callable[[str], None]) -> None:
    begin = time.monotonic()
    dtype = DTYPES[options.dtype] if options.dtype else None
    work: ToMegatron | FromCheckpoint
    with reading(found.folder):
        if found.format == "hf":
            for remark in set_aside(found.folder):
                say(f"warning: {remark}")
            work = ToMegatron(found.folder, dtype, options.layout, options.bucket_bytes)
        else:
            sizes = options.shard_bytes, options.bucket_bytes
            work = _kind(found, options)(found.folder, found.model_folder, dtype, *sizes, role=found.role)
            if found.role != found.folder.name and found.role and (found.role == "actor") == work.scalar_head:
                head = "scalar" if work.scalar_head else "language-model"
                raise ModelError([f"--role {found.role}: {found.folder} ends in a {head} head: leave it out"])
    check_destination(folder, overwrite=options.overwrite, needed_bytes=work.num_bytes)
    try:
        with writing(folder, record) as partial:
            work.write(partial, options.most_processes)
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
    made = _made(found, options)
    if made == "hf":
        return ToHuggingFace
    from megappo.convert.adapters import ToMerged, ToPeft  # which import torch

    return ToPeft if made == "peft" else ToMerged


def _made(found: Source, options: Options) -> Made:
    if found.format == "hf":
        return "megatron"
    if not has_adapters(found.folder):
        return "hf"
    return "peft" if options.to == "peft" else "merged"


def _check(found: Source, folder: Path, options: Options) -> None:
    """What is wrong with the call itself."""
    other = {"hf": "megatron", "megatron": "hf"}[found.format]
    problems = []
    if options.to == "peft" and not has_adapters(found.folder):
        problems.append(f"--to peft: {found.folder} has no adapters: leave it out")
    elif options.to not in (None, other, "peft"):
        problems.append(f"--to {options.to}: {found.folder} is in that format already: give --to {other}, or copy it")
    if found.format == "hf":
        problems += [
            f"--{name} {value}: {found.folder} is a Hugging Face folder, with one model and a config: leave it out"
            for name, value in (("role", options.role), ("model", options.model))
            if value is not None
        ]
    problems += options.problems(_made(found, options))
    source, model = found.folder.resolve(), found.model_folder.resolve()
    for place in (path.resolve() for path in places(folder)):
        if source in (place, *place.parents) or place in source.parents:
            problems.append(f"{place}: lies in {found.folder} or around it: choose a DST elsewhere")
            break
        if place in (model, *model.parents):
            problems.append(f"{place}: is or holds {found.model_folder}, which has the config: choose a DST elsewhere")
            break
    if problems:
        raise ModelError(problems)


def _record(found: Source, options: Options) -> dict[str, Any]:
    """What decides the result: if this is the same, so is the result."""
    role = {} if found.role in (None, found.folder.name) else {"role": found.role}
    files = {str(path.resolve()): [path.stat().st_size, path.stat().st_mtime_ns] for path in found.files()}
    return {
        "source": str(found.folder.resolve()),
        "model": str(found.model_folder.resolve()),
        "files": files,
        **options.form(),
        **role,
    }
