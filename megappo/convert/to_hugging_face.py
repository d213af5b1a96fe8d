"""From a Megatron checkpoint of any layout to a Hugging Face folder: shards are laid out, then filled from chunks."""

from __future__ import annotations

from pathlib import Path

from megappo.convert.companions import copy_companions, fit_config
from megappo.convert.from_checkpoint import FromCheckpoint
from megappo.formats.safetensors_files import make_room


class ToHuggingFace(FromCheckpoint):
    """A conversion to a Hugging Face folder."""

    def write(self, destination: Path, processes: int) -> None:
        """Write the folder into an empty one."""
        self.fill(make_room(destination, self.forms, self.shard_bytes), processes)
        copy_companions(self.model_folder, destination)
        widest = max((dtype for dtype, _ in self.forms.values()), key=lambda dtype: dtype.itemsize)
        fit_config(destination, widest, head=self.head)
