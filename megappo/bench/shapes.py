"""Models of known shapes with random weights, made on the spot."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from megappo.models.spec import ModelSpec, read_model_spec

QWEN = {
    "0.4b": (24, 896, 14, 2, 4864, True, 49152),
    "0.5b": (24, 896, 14, 2, 4864, True, 151936),
    "1.5b": (28, 1536, 12, 2, 8960, True, 151936),
    "2b": (36, 1536, 12, 2, 8960, True, 151936),
    "7b": (28, 3584, 28, 4, 18944, False, 152064),
    "32b": (64, 5120, 40, 8, 27648, False, 152064),
    "tiny": (4, 128, 4, 2, 256, True, 1024),
}
"""Qwen2.5: layers, hidden size, heads, key/value heads, MLP size, tied embeddings, vocabulary.

0.4b is the smallest with a smaller vocabulary; 2b has files of 4 GB; tiny is for trying things out.
"""


def make_qwen(folder: str | Path, size: str, *, device: str = "cpu") -> Path:
    """Write a Hugging Face folder (bfloat16, in shards of a few layers) unless it is there; return it.

    Raises:
        KeyError: an unknown size.
    """
    folder = Path(folder)
    if (folder / "model.safetensors.index.json").is_file():
        return folder
    _write_config(folder, size)
    generator = torch.Generator(device).manual_seed(0)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    weight_map = {}
    for name, shape in read_model_spec(folder).hf_shapes().items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        file = f"model-{layer}.safetensors"
        tensor = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) * 0.02
        shards.setdefault(file, {})[name] = (torch.ones_like(tensor) if "norm" in name else tensor).cpu()
        weight_map[name] = file
    for file, tensors in shards.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def qwen_spec(size: str) -> ModelSpec:
    """The shape alone."""
    with tempfile.TemporaryDirectory() as folder:
        _write_config(Path(folder), size)
        return read_model_spec(folder)


def _write_config(folder: Path, size: str) -> None:
    layers, hidden, heads, kv_heads, mlp, tied, vocab_size = QWEN[size]
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def add_tokenizer(folder: str | Path) -> None:
    """Give a model folder a tokenizer for which each of :data:`LETTERS` is a token."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(("<unk>", "<eos>", *LETTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>").save_pretrained(folder)
