"""How to convert, and which of it means nothing for what is to be made."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megappo.formats.archives import LIMIT
from megappo.layout.mesh import Layout

SIZES = ("tp", "pp", "vpp", "ep", "etp")
"""Options that say whose ranks' parts a checkpoint's files will be."""

Made = Literal["megatron", "hf", "merged", "peft"]
"""What a conversion makes: "hf" of weights as they are, "merged" of those of a model and adapters."""

FOLDERS = ("hf", "merged")
MEANT = {
    **dict.fromkeys(SIZES, ("the layout of a checkpoint's files", ("megatron",))),
    "shard_gb": ("the limit of a Hugging Face folder's files", FOLDERS),
    "bucket_mb": ("the limit of a checkpoint's chunks, and of what is merged at a time", ("megatron", "merged")),
    "verify": ("for weights that are the same on both sides", ("megatron", "hf")),
}
"""What some options say, and of which results it says anything."""
WORDS: dict[Made, str] = {
    "megatron": "a Megatron checkpoint",
    "hf": "a Hugging Face folder of the weights as they are",
    "merged": "a Hugging Face folder with adapters merged into its weights",
    "peft": "one file of adapters",
}


@dataclass(frozen=True)
class Options:
    """How to convert; what is None was not asked for.

    Attributes:
        to: "hf" or "megatron"; by default the one that the source is not. Of adapters: "hf" (merged) or "peft".
        tp, pp, vpp: to Megatron: whose ranks' parts the files will be; vpp chunks of each of pp stages; 1 by default.
        ep, etp: of a mixture: over how many ranks of a stage its experts are dealt out (1 by default), and for how many
            each of them is cut (as many as ``tp``).
        role: whose weights, of a run's checkpoint: by default the actor's, or the reward model's of reward-train. Of a
            single checkpoint: what it is.
        model: folder of the config and tokenizer of a Megatron checkpoint that does not say.
        dtype: "bfloat16", "float16" or "float32"; by default the weights' own.
        shard_gb: to Hugging Face: limit of a shard, in 10^9 bytes; 4 by default.
        bucket_mb: limit of a chunk of a checkpoint, and of a piece of a merged weight, in 2^20 bytes; 32 by default.
        processes: that share the work; None: one for each core, 8 at most.
        overwrite: replace what is at the destination.
        verify: compare both sides in the end.
    """

    to: str | None = None
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    ep: int | None = None
    etp: int | None = None
    role: str | None = None
    model: str | None = None
    dtype: str | None = None
    shard_gb: float | None = None
    bucket_mb: int | None = None
    processes: int | None = None
    overwrite: bool = False
    verify: bool = False

    @property
    def layout(self) -> Layout:
        """The smallest with these sizes: a stage has room for both the dense weights' ranks and the experts'."""
        tp, ep = self.tp or 1, self.ep or 1
        dp = math.lcm(tp, (self.etp or tp) * ep) // tp
        return Layout(tp=tp, ep=ep, dp=dp, pp=self.pp or 1, vpp=self.vpp or 1, etp=self.etp or 0)

    @property
    def shard_bytes(self) -> int:
        """Limit of a shard."""
        return int((self.shard_gb or 4.0) * 1e9)

    @property
    def bucket_bytes(self) -> int:
        """Limit of a bucket."""
        return (self.bucket_mb or 32) * 2**20

    @property
    def most_processes(self) -> int:
        """How many may share the work."""
        return self.processes or min(len(os.sched_getaffinity(0)), 8)

    def form(self) -> dict[str, Any]:
        """What decides the form of the result, as options by name, defaults for those that were not given."""
        layout = self.layout
        chosen: dict[str, Any] = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "dtype": self.dtype}
        chosen |= {"shard_gb": self.shard_gb or 4.0, "bucket_mb": self.bucket_mb or 32}
        if layout.ep > 1:
            chosen["ep"] = layout.ep
        if layout.etp:
            chosen["etp"] = layout.etp
        return chosen if self.to != "peft" else {"to": "peft", **chosen}

    def problems(self, made: Made) -> Iterator[str]:
        """What is impossible, or would have no effect, one line each with its fix.

        Args:
            made: what is to be made.
        """
        for name, (meaning, results) in MEANT.items():
            if (value := getattr(self, name)) not in (None, False) and made not in results:
                given = "" if value is True else f" {value}"
                yield f"--{dashed(name)}{given}: is {meaning}, and DST will be {WORDS[made]}: leave it out"
        for name in (*SIZES, "shard_gb", "bucket_mb", "processes"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                yield f"--{dashed(name)} {value}: must be positive"
        if made == "megatron" and self.bucket_bytes > LIMIT:
            yield f"--bucket-mb {self.bucket_mb}: a chunk of a checkpoint has at most {LIMIT >> 20}: lower it"


def dashed(name: str) -> str:
    """An option as the command line has it."""
    return name.replace("_", "-")
