"""Random small models and the layouts that are possible for them, for property tests."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from megappo.layout.legality import divisors, rollout_tp
from megappo.layout.mesh import Layout
from megappo.models.parameters import vllm_vocabulary
from megappo.models.spec import ModelSpec
from megappo.reshard.actor_to_rollout import TransferSpec


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """Models of a few hundred weights, of every family, with vocabularies that divide by nothing."""
    family = draw(st.sampled_from(["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"]))
    kv_heads, sharing = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4))
    return ModelSpec(
        family=family,
        num_layers=draw(st.sampled_from([1, 2, 3, 4, 6])),
        hidden_size=draw(st.integers(1, 3)),
        num_heads=kv_heads * sharing,
        num_kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 4)),
        ffn_hidden_size=draw(st.sampled_from([4, 8, 12])),
        vocab_size=draw(st.sampled_from([5, 16, 17, 33, 64, 70])),
        max_positions=8,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        tied_embeddings=draw(st.booleans()),
        num_experts=draw(st.sampled_from([2, 4])) if family in ("qwen3_moe", "mixtral") else 0,
    )


def megatron_tp(spec: ModelSpec) -> list[int]:
    """Tensor-parallel sizes that Megatron can build (and not only those that it can train without a global state)."""
    fused = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return [tp for tp in divisors(spec.num_heads) if spec.ffn_hidden_size % tp == 0 == fused % tp]


@st.composite
def trained(draw: st.DrawFn) -> tuple[ModelSpec, Layout]:
    """A model and a Megatron layout: any sizes, virtual pipelines, experts over the ranks of a stage."""
    spec = draw(specs())
    pp = draw(st.integers(1, spec.num_layers))
    rounds = [n for n in divisors(spec.num_layers) if spec.num_layers // n >= pp > 1 and (pp > 2 or n == 1)]
    even = [n for n in divisors(spec.num_layers) if pp > 1 and spec.num_layers % (n * pp) == 0]
    vpp = draw(st.sampled_from([*rounds, *even] or [1]))
    tp, dp, cp = draw(st.sampled_from(megatron_tp(spec))), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    layout = Layout(tp=tp, pp=pp, dp=dp, cp=cp, vpp=vpp)
    if spec.num_experts:
        ranks = tp * dp * cp
        etp = draw(st.sampled_from([n for n in divisors(ranks) if spec.ffn_hidden_size % n == 0]))
        ep = draw(st.sampled_from([n for n in divisors(spec.num_experts) if ranks % (etp * n) == 0]))
        layout = replace(layout, ep=ep, etp=etp)
    return spec, layout


@st.composite
def served(draw: st.DrawFn) -> tuple[ModelSpec, int, bool]:
    """A model, a tensor-parallel size of vLLM, and whether it deals out whole experts."""
    spec = draw(specs())
    return spec, draw(st.sampled_from(rollout_tp(spec, vllm_vocabulary(spec.vocab_size)))), draw(st.booleans())


@st.composite
def synced(draw: st.DrawFn) -> TransferSpec:
    """A weight sync, with places: engines on devices of their own, or on some of the actor's, or places unknown."""
    spec, layout = draw(trained())
    tp = draw(st.sampled_from(rollout_tp(spec, vllm_vocabulary(spec.vocab_size))))
    engines, per_node = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    workers = engines * tp
    first = draw(st.integers(0, layout.world))  # the device of the first worker
    devices = [*range(layout.world), *range(first, first + workers)]
    places = tuple((f"node{device // per_node}", str(device % per_node)) for device in devices)
    return TransferSpec(
        model=spec,
        actor=layout,
        engines=engines,
        engine_tp=tp,
        fused_norms=draw(st.booleans()),
        places=draw(st.sampled_from([(), places, places])),
        forward=draw(st.booleans()),
        expert_parallel=draw(st.booleans()),
    )
