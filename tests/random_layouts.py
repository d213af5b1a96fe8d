"""Random small models and the layouts that are legal for them, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from megappo.layout.legality import megatron_tp, rollout_tp
from megappo.layout.mesh import Layout
from megappo.models.parameters import vllm_vocabulary
from megappo.models.spec import ModelSpec


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """Models of a few hundred weights, of every family, with vocabularies that divide by nothing."""
    kv_heads, sharing = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    return ModelSpec(
        family=draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
        num_layers=draw(st.integers(1, 4)),
        hidden_size=draw(st.integers(1, 3)),
        num_heads=kv_heads * sharing,
        num_kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 3)),
        ffn_hidden_size=draw(st.sampled_from([4, 8, 12])),
        vocab_size=draw(st.sampled_from([5, 16, 17, 33, 64, 70])),
        max_positions=8,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        tied_embeddings=draw(st.booleans()),
    )


@st.composite
def trained(draw: st.DrawFn) -> tuple[ModelSpec, Layout]:
    """A model and a Megatron layout."""
    spec = draw(specs())
    tp = draw(st.sampled_from(megatron_tp(spec)))
    return spec, Layout(tp=tp, pp=draw(st.integers(1, spec.num_layers)), dp=draw(st.integers(1, 3)))


@st.composite
def served(draw: st.DrawFn) -> tuple[ModelSpec, int]:
    """A model and a tensor-parallel size of vLLM."""
    spec = draw(specs())
    return spec, draw(st.sampled_from(rollout_tp(spec, vllm_vocabulary(spec.vocab_size))))


@st.composite
def synced(draw: st.DrawFn) -> tuple[ModelSpec, Layout, int, int]:
    """A model, the actor's layout, a number of engines and their tensor-parallel size."""
    spec, layout = draw(trained())
    tp = draw(st.sampled_from(rollout_tp(spec, vllm_vocabulary(spec.vocab_size))))
    return spec, layout, draw(st.integers(1, 2)), tp
