"""What a user points at: a Hugging Face folder, a Megatron checkpoint, or a run that has some."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megappo.checkpoints import PARTIAL, Checkpoints, step_of
from megappo.config import ConfigError, load_config, load_supervised
from megappo.convert.companions import companion_files
from megappo.models.lora import FILE
from megappo.models.spec import ModelError

COMPANIONS = "huggingface"
"""Folder inside a checkpoint that we made: the model's config, tokenizer and so on."""


@dataclass(frozen=True)
class Source:
    """Attributes:
    format: "hf" or "megatron".
    folder: that holds the weights.
    model_folder: that holds config.json, the tokenizer and so on.
    role: whose weights they are, if that is known.
    """

    format: str
    folder: Path
    model_folder: Path
    role: str | None = None

    def files(self) -> list[Path]:
        """Every file that the result may depend on."""
        folders = {self.folder, self.model_folder} if has_adapters(self.folder) else {self.folder}
        patterns = ("*.safetensors", "*.safetensors.index.json", "*.distcp", ".metadata", FILE)
        weights = [path for folder in folders for pattern in patterns for path in folder.glob(pattern)]
        return sorted({path for path in (*weights, *companion_files(self.model_folder)) if path.is_file()})


def has_adapters(folder: Path) -> bool:
    """Whether a checkpoint is one of adapters."""
    return (folder / FILE).is_file()


ROLES = ("actor", "critic", "reward")
"""Whose weights a run's checkpoint may hold."""


def find_source(path: Path, role: str | None, model: Path | None) -> Source:
    """Recognise what is at ``path``.

    Args:
        role: which role's weights, where a run's checkpoint holds several; by default the actor's. Whose they are, of
            a single checkpoint.
        model: folder of the config and tokenizer that belong to a Megatron checkpoint, if given.

    Raises:
        ModelError: nothing that we can convert, saying what it is instead.
    """
    if path.is_file():
        raise ModelError([f"{path}: is a file: give the folder that it is in"])
    if not path.is_dir():
        others = Checkpoints(path.parent, keep=1).complete() if step_of(path.name) is not None else []
        if others:
            there = ", ".join(f"step_{step}" for step in others)
            raise ModelError([f"{path}: is not there (old ones go, see run.keep_checkpoints): there are {there}"])
        raise ModelError([f"{path}: no such folder: give a Hugging Face folder, a Megatron checkpoint or a run"])
    for folder in (path, path.parent):
        if folder.name.endswith(PARTIAL):
            raise ModelError([f"{folder}: was not finished: convert or save it again, or rename it if it is whole"])
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        fix = "merge them into their model first (PEFT's merge_and_unload), or give the run's own checkpoint"
        raise ModelError([f"{path}: holds adapters (PEFT), and not the model that they belong to: {fix}"])
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file():
        return Source("hf", path, path)
    checkpoint = _checkpoint(path, role)
    known = checkpoint.name if checkpoint.name in ROLES else None
    if role is not None and known not in (None, role):
        fix = f"leave it out, or give {checkpoint.parent}"
        raise ModelError([f"--role {role}: {checkpoint} has the weights of the {known}: {fix}"])
    return Source("megatron", checkpoint, model or _model_folder(checkpoint, role or checkpoint.name), role or known)


def _checkpoint(path: Path, role: str | None) -> Path:
    """The ``torch_dist`` folder that is meant by ``path``."""
    if (path / ".metadata").is_file():
        return path
    if held := [name for name in ROLES if (path / name / ".metadata").is_file()]:  # RUN/checkpoints/step_N
        role = role or ("reward" if held == ["reward"] else "actor")
        if not (path / role / ".metadata").is_file():
            raise ModelError([f"{path}: has no weights of --role {role}: it has those of {', '.join(held)}"])
        return path / role
    for folder in (path / "checkpoints", path):  # RUN, RUN/checkpoints
        latest = Checkpoints(folder, keep=1).latest()
        if latest is not None:
            return _checkpoint(latest, role)
    tracker = path / "latest_checkpointed_iteration.txt"  # Megatron-LM
    if tracker.is_file():
        word = tracker.read_text().strip()
        inner = path / ("release" if word == "release" else f"iter_{int(word):07d}" if word.isdigit() else word)
        if inner.is_dir() and inner != path:
            return _checkpoint(inner, role)
        raise ModelError([f"{tracker}: names {word!r}, but there is no {inner}: give the folder of an iteration"])
    raise ModelError([next(_reasons(path))])


def _reasons(path: Path) -> Iterator[str]:
    """Why there is nothing to convert in ``path``; the first is the best."""
    if any(path.glob("mp_rank_*")):
        yield f"{path}: is Megatron's old format (mp_rank_*): save it with Megatron's --ckpt-format torch_dist"
    if any(path.glob("__*.distcp")):
        yield f"{path}: has no .metadata, so it is no complete checkpoint: give another"
    if any(path.glob("*.bin")) or any(path.glob("*.pth")):
        yield f"{path}: holds its weights in pickles: save them as safetensors (save_pretrained does)"
    if any(path.glob("*.gguf")):
        yield f"{path}: holds its weights as GGUF: give the folder with safetensors that it was made from"
    if (path / "config.json").is_file():
        yield f"{path}: has neither model.safetensors nor model.safetensors.index.json: add the weights"
    if (path / "config.yaml").is_file():
        yield f"{path}: is a run without a checkpoint: wait for one, or set run.save_every"
    yield (
        f"{path}: is no model: give a Hugging Face folder (config.json, *.safetensors), "
        "a Megatron checkpoint (.metadata, *.distcp), a run, or a run's checkpoints/step_N"
    )


def _model_folder(checkpoint: Path, role: str) -> Path:
    """The config and tokenizer that belong to a checkpoint: beside the weights, or as the run's config names them."""
    if (checkpoint / COMPANIONS / "config.json").is_file():
        return checkpoint / COMPANIONS
    fix = "give the model's Hugging Face folder with --model"
    parents = checkpoint.absolute().parents
    path = parents[2] / "config.yaml" if len(parents) > 2 else None  # RUN/checkpoints/step_N/ROLE
    if path is None or not path.is_file():
        raise ModelError([f"{checkpoint}: does not say which model it is: {fix}"])
    try:
        folder = Path(_configured_folder(path, role))
    except (ConfigError, KeyError) as error:
        raise ModelError([f"{path}: does not say which model {role} is ({error}): {fix}"]) from None
    if not (folder / "config.json").is_file():
        raise ModelError([f"{path}: names the model {folder}, which is not there: {fix}"])
    return folder


def _configured_folder(config: Path, role: str) -> str:
    """The model that a run's configuration names, be it of PPO or of training on given responses."""
    try:
        return load_config(config).model_folder(role)
    except ConfigError as error:
        try:
            return load_supervised(config).model_folder
        except ConfigError:
            raise error from None
