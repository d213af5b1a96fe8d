"""Operation counts against torch's own counter, on a real transformers model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import make_model
from torch.utils.flop_counter import FlopCounterMode

from megappo.layout.flops import forward_flops, peak_tflops
from megappo.models.spec import read_model_spec


def test_matches_torchs_counter(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_model(tmp_path, "qwen3")
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    spec = read_model_spec(folder)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 24, dtype=torch.int64))
    # Eager attention computes the whole square, of which causal attention needs half; rotary positions are no weights.
    attention = spec.num_layers * 2 * spec.num_heads * spec.head_dim * 24 * 24
    rotary = 2 * 24 * spec.head_dim // 2
    assert counter.get_total_flops() - attention - rotary == pytest.approx(forward_flops(spec, [24], 24), rel=1e-3)


def test_known_devices() -> None:
    assert peak_tflops("NVIDIA H200") == 989
    assert peak_tflops("NVIDIA A100-SXM4-80GB") == 312
    assert peak_tflops("cpu") is None
