"""Pools, parallel sizes and what is traded for memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megappo.check.findings import Advice, under
from megappo.check.lora import lora_findings
from megappo.check.megatron import eight_bit_findings, size_findings
from megappo.config import TRAINED, Config, MegatronRoleConfig
from megappo.layout import legality
from megappo.models.parameters import vllm_vocabulary
from megappo.models.spec import ModelSpec

VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's attention knows on CPU (0.32, ``v1/attention/backends/cpu_attn.py``)."""


def pool_findings(config: Config) -> Iterator[str]:
    """Which role names which pool."""
    named = {name: role.pool for name, role in config.roles.megatron.items()}
    rollout = config.roles.rollout.pool
    for name, pool in {**named, "rollout": rollout}.items():
        if pool not in config.pools:
            yield f"roles.{name}.pool: {pool!r} is not a pool: pools are {', '.join(config.pools) or 'none'}"
    sharing = [name for name, role in config.roles.megatron.items() if role.pool == rollout and role.offload == "none"]
    if sharing and config.run.device == "cuda" and config.roles.rollout.memory_fraction > 0.8:
        yield Advice(
            f"roles.rollout.memory_fraction: {config.roles.rollout.memory_fraction} leaves little of the devices to "
            f"{' and '.join(sharing)}, whose pool the engines share: around 0.5 is usual"
        )
    for pool in config.pools:
        if pool not in (*named.values(), rollout):
            yield Advice(f"pools.{pool}: no role uses it: leave it out, or name it as a role's pool")


def layout_findings(config: Config, specs: Mapping[str, ModelSpec]) -> Iterator[str]:
    """Parallel sizes against models and pools."""
    for name, role in config.roles.megatron.items():
        spec, pool = specs.get(config.model_folder(name)), config.pools.get(role.pool)
        yield from size_findings(f"roles.{name}", role, spec, pool)
        if pool:
            ranks = pool.devices // (role.tp * role.pp)
            rows = config.data.prompts_per_step * config.roles.rollout.samples_per_prompt
            if rows < ranks and name not in TRAINED:
                yield Advice(
                    f"data.prompts_per_step: {rows} responses leave some of the {name}'s {ranks} data-parallel ranks "
                    "without work: raise it, or tp or pp"
                )
            if config.ppo.mini_batch < ranks and name in TRAINED:
                yield Advice(
                    f"ppo.mini_batch: {config.ppo.mini_batch} responses leave some of the {name}'s {ranks} "
                    "data-parallel ranks without work: raise it, or tp or pp"
                )
            given = ("ppo.mini_batch", config.ppo.mini_batch) if name in TRAINED else ("data.prompts_per_step", rows)
            yield from _too_few_to_interleave(name, role, given, ranks)
    rollout = config.roles.rollout
    spec, pool = specs.get(config.model_folder("actor")), config.pools.get(rollout.pool)
    if spec:
        vocabulary = vllm_vocabulary(spec.vocab_size)
        yield from under("roles.rollout", legality.rollout_model_problems(spec, vocabulary, rollout.tp), ".")
        if config.run.device == "cpu" and spec.head_dim not in VLLM_CPU_HEAD_SIZES:
            yield (
                f"run.device: cpu: vLLM has no attention there for the head size {spec.head_dim} of "
                f"{config.model_folder('actor')}, only for {', '.join(map(str, VLLM_CPU_HEAD_SIZES))}: give another "
                "model, or set cuda"
            )
    if pool:
        yield from under("roles.rollout", legality.rollout_pool_problems(rollout.tp, pool.devices_per_node), ".")
        prompts, engines = config.data.prompts_per_step, pool.devices // rollout.tp
        if prompts < engines:  # all samples of a prompt are on one
            yield Advice(
                f"data.prompts_per_step: {prompts} prompts leave some of {engines} engines without work: raise it, or "
                "roles.rollout.tp"
            )


def _too_few_to_interleave(name: str, role: MegatronRoleConfig, given: tuple[str, int], ranks: int) -> Iterator[Advice]:
    key, rows = given
    if role.vpp > 1 and rows < ranks * role.pp:
        yield Advice(
            f"roles.{name}.vpp: {role.vpp} passes on {role.pp} micro-batches together, and {rows} responses ({key}) "
            f"are too few for that on {ranks} data-parallel rank{'s' * (ranks > 1)}, so that some are empty: raise it, "
            "or set vpp to 1"
        )


def memory_findings(config: Config, specs: Mapping[str, ModelSpec]) -> Iterator[str]:
    """What a role trades for memory: adapters, 8-bit products, recomputed activations, memory that leaves at times."""
    rollout = config.roles.rollout.pool
    for name, role in config.roles.megatron.items():
        spec = specs.get(config.model_folder(name))
        yield from eight_bit_findings(f"roles.{name}", role, spec, config.run)
        yield from lora_findings(f"roles.{name}", role, spec, trains=name in TRAINED)
        if role.recompute != "none" and name not in TRAINED:
            yield Advice(f"roles.{name}.recompute: {role.recompute} has no effect, as it never trains: leave it out")
        others = [other for other, its in config.roles.megatron.items() if its.pool == role.pool and other != name]
        if role.offload != "none" and not others and role.pool != rollout:
            yield Advice(
                f"roles.{name}.offload: {role.offload} costs time and makes room for nobody, as no other role uses the "
                f"pool {role.pool}: set none"
            )
