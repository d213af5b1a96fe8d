"""The check before a run: every mistake with its exact words."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from small_project import Project, make_project, write_model

from megappo.check import Report


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    return make_project(tmp_path)


def test_good_project(project: Project) -> None:
    assert project.report() == Report()
    assert not (project.folder / "run").exists(), "a check leaves nothing behind"


OVERRIDES: dict[str, tuple[tuple[str, ...], str]] = {
    "no such pool": (
        ("roles.critic.pool=values",),
        "roles.critic.pool: 'values' is not a pool: pools are train, value, serve",
    ),
    "devices": (
        ("pools.train.devices_per_node=6",),
        "roles.actor.tp: 2 times pp 2 does not divide the 6 devices of the pool: legal tp * pp are 1, 2, 3, 6",
    ),
    "heads": (
        ("roles.actor={pool: train, tp: 3}", "pools.train.devices_per_node=3"),
        "roles.actor.tp: 3 does not divide 8 attention heads and does not divide 4 key/value heads: legal are 1, 2, 4",
    ),
    "key/value heads": (
        ("roles.actor={pool: train, tp: 8}", "pools.train.devices_per_node=8"),
        "roles.actor.tp: 8 is more than 4 key/value heads (training does not replicate them): legal are 1, 2, 4",
    ),
    "layers": (
        ("roles.critic.pp=8", "pools.value.devices_per_node=8"),
        "roles.critic.pp: 8 stages cannot share 4 layers: legal are 1 to 4",
    ),
    "layers in chunks": (
        ("roles.critic.vpp=4",),
        "roles.critic.vpp: 4 chunks of each of 2 stages cannot share 4 layers in rounds of equally many even ones: "
        "legal are 1, 2",
    ),
    "chunks of one stage": (
        ("roles.reference.vpp=2",),
        "roles.reference.vpp: 2 chunks of a pipeline stage need pp > 1: set it to 1, or raise pp",
    ),
    "sequence parallel": (
        ("roles.critic.sequence_parallel=true",),
        "roles.critic.sequence_parallel: true needs tp > 1: set it to false, or raise tp",
    ),
    "no critic": (
        ("roles.critic=null",),
        "roles.critic: missing, but ppo.estimator gae needs its values: add it, or choose another estimator",
    ),
    "no rate for the critic": (
        ("ppo.critic_lr=null",),
        "ppo.critic_lr: missing, but the critic trains: give a learning rate",
    ),
    "a critic for nothing": (
        ("ppo.estimator=rloo",),
        "roles.critic: ppo.estimator rloo needs no values: leave it out (roles.critic=null), or set gae",
    ),
    "nothing to compare": (
        ("ppo.estimator=grpo", "roles.critic=null", "roles.rollout.samples_per_prompt=1", "ppo.mini_batch=8"),
        "ppo.estimator: grpo compares the responses to a prompt, and roles.rollout.samples_per_prompt is 1: give at "
        "least 2",
    ),
    "nothing to tell apart": (
        ("ppo.dynamic_sampling={}", "roles.rollout.samples_per_prompt=1", "ppo.mini_batch=8"),
        "ppo.dynamic_sampling: one response to a prompt always equals itself, and roles.rollout.samples_per_prompt is "
        "1: give at least 2, or null here",
    ),
    "a penalty longer than responses": (
        ("ppo.overlong.buffer=17",),
        "ppo.overlong.buffer: 17 is more than the 16 tokens of data.max_response: lower it",
    ),
    "a stop token that is none": (
        ("roles.rollout.stop_token_ids=[3, 100]",),
        "roles.rollout.stop_token_ids: 100: the actor's model has tokens 0 to 99 only: leave it out",
    ),
    "prompts by what others score, several batches ahead": (
        ("ppo.staleness=2", "ppo.dynamic_sampling={}"),
        "ppo.dynamic_sampling: which prompts it takes is known only when others are scored, while ppo.staleness 2 has "
        "several batches drawn at a time: set null, or staleness 1",
    ),
    "greedy responses across versions": (
        ("ppo.staleness=2", "ppo.estimator=remax", "roles.critic=null"),
        "ppo.estimator: remax takes greedy responses of one version of the weights, while ppo.staleness 2 draws across "
        "several: choose another, or staleness 1",
    ),
    "engines that take turns and are to overlap": (
        ("ppo.staleness=1", "roles.rollout.pool=value"),
        "ppo.staleness: 1 has the engines generate while others work, and critic and reference take turns with them in "
        "the pool value: give roles.rollout.pool a pool of its own, or set 0",
    ),
    "eight bits on CPU": (
        ("roles.critic.fp8=tensorwise",),
        "roles.critic.fp8: tensorwise needs CUDA and bfloat16, not run.device cpu and run.dtype bfloat16: set none, or "
        "these",
    ),
    "eight bits in odd sizes": (
        ("roles.actor.fp8=blockwise", "run.device=cuda"),
        "roles.actor.fp8: blockwise at tp 2: the model has 24 MLP columns a rank, which 16 must divide: set none, or "
        "lower tp",
    ),
    "engine over a node": (
        ("roles.rollout.tp=4", "pools.serve={nodes: 2, devices_per_node: 2}"),
        "roles.rollout.tp: an engine of 4 devices does not fit in a node of 2: legal are 1, 2",
    ),
    "engine's heads": (
        ("roles.rollout.tp=3", "pools.serve.devices_per_node=3"),
        "roles.rollout.tp: 3 does not divide 8 attention heads and neither divides nor is a multiple of "
        "4 key/value heads and does not divide 128 padded vocabulary rows: legal are 1, 2, 4, 8",
    ),
    "no reference": (
        ("roles.reference=null",),
        "roles.reference: missing, but ppo.kl.in_reward needs it: add it, or switch off in_reward and loss_coef in "
        "ppo.kl",
    ),
    "no reference for the loss": (
        ("roles.reference=null", "ppo.kl={in_reward: false, loss_coef: 0.1}"),
        "roles.reference: missing, but ppo.kl.loss_coef needs it: add it, or switch off in_reward and loss_coef in "
        "ppo.kl",
    ),
    "positions": (
        ("data.max_response=50",),
        "data.max_response: 50 plus max_prompt 16 is more than the 64 positions of FOLDER/model: lower one by 2",
    ),
    "mini-batch": (
        ("ppo.mini_batch=33",),
        "ppo.mini_batch: 33 is more than the 32 responses of a step (data.prompts_per_step * "
        "roles.rollout.samples_per_prompt): give at most 32",
    ),
    "micro-batch": (
        ("roles.critic.micro_batch_tokens=31",),
        "roles.critic.micro_batch_tokens: 31 does not hold one sequence of 32 tokens (data.max_prompt + "
        "data.max_response): give at least 32",
    ),
    "greedy training": (
        ("roles.rollout.temperature=0",),
        "roles.rollout.temperature: 0 is greedy, so that there is nothing to learn from: give a number > 0 "
        "(roles.rollout.validation_temperature may be 0)",
    ),
    "horizon shorter than a step": (
        ("ppo.kl={target: 0.1, horizon: 6}",),
        "ppo.kl.horizon: 6 is too short for the 32 responses of a step, so that the adaptive coefficient could turn "
        "negative: give at least 7",
    ),
    "head size on CPU": (
        ("model=small",),
        "run.device: cpu: vLLM has no attention there for the head size 48 of FOLDER/small, only for 32, 64, 80, 96, "
        "112, 128, 160, 192, 224, 256, 512: give another model, or set cuda",
    ),
    "no model folder": (
        ("model=models/none",),
        "model: FOLDER/models/none: no such folder: give the path of a Hugging Face model folder",
    ),
    "no model folder of its own": (
        ("roles.critic.model=models/none",),
        "roles.critic.model: FOLDER/models/none: no such folder: give the path of a Hugging Face model folder",
    ),
    "no prompts": (
        ("data.train=[]",),
        "data.train: empty: give at least one parquet file",
    ),
    "no prompt file": (
        ("data.validation=other.parquet",),
        "data.validation: other.parquet: no such file: give the path of a parquet file",
    ),
    "a folder of prompts": (
        ("data.train=model",),
        "data.train: model: is a folder: name the parquet files in it",
    ),
    "no reward": (
        ("roles.reward.function=null",),
        "roles.reward.function: missing: give package.module:name or file.py:name, fill by_source, or give pool and "
        "model for a reward model",
    ),
    "nothing to score a source": (
        ("roles.reward.weights.function=0", "data.validation=[]"),
        "roles.reward.weights: leaves nothing to score data_source 'arithmetic' of train.parquet: give what it has, a "
        "function or a model, a weight that is not 0",
    ),
    "reward model without a pool": (
        ("roles.reward.model=scorer",),
        "roles.reward.pool: missing, but roles.reward.model is scorer: give the pool that it runs in",
    ),
    "reward model without a model": (
        ("roles.reward.pool=value",),
        "roles.reward.model: missing: give the folder of a sequence classification model with one label",
    ),
    "reward model without its head": (
        ("roles.reward={pool: value, model: small}",),
        "roles.reward.model: FOLDER/small: is a language model, not a reward model: give one with a scalar head "
        "(AutoModelForSequenceClassification), or train one: megappo reward-train",
    ),
    "no reward file": (
        ("roles.reward.function=scores.py",),
        "roles.reward.function: scores.py: there is no file scores.py: give file.py:name or package.module:name",
    ),
    "no reward in the file": (
        ("roles.reward.function=score.py:reward",),
        "roles.reward.function: score.py:reward: score.py does not define reward: it defines compute_score",
    ),
    "adapters of unknown layers": (
        ("roles.actor.lora={rank: 4, targets: [q_proj, query]}",),
        "roles.actor.lora.targets: 'query' is no linear layer to adapt: known for qwen2 are q_proj, k_proj, v_proj, "
        "o_proj, gate_proj, up_proj, down_proj, or all-linear alone",
    ),
    "adapters of full rank": (
        ("roles.critic.lora.rank=32",),
        "roles.critic.lora.rank: 32 is not low for q_proj, whose full rank is 32: give less (8 to 64 are usual), or "
        "leave q_proj out of targets",
    ),
    "adapters of no rank": (
        ("roles.actor.lora.rank=0",),
        "roles.actor.lora.rank: 0 is out of range: give an integer >= 1 (rank of the adapters)",
    ),
    "adapters of no size": (
        ("roles.actor.lora.alpha=0",),
        "roles.actor.lora.alpha: 0 is out of range: give a number > 0 (adapters are scaled by alpha / rank)",
    ),
    "adapters that never train": (
        ("roles.reference.lora.rank=4",),
        "roles.reference.lora: nothing trains here: leave it out",
    ),
    "no reward package": (
        ("roles.reward.function=no_such_package.module",),
        "roles.reward.function: no_such_package.module: there is no module 'no_such_package' on the Python path: "
        "give package.module:name or file.py:name",
    ),
    "no reward module": (
        ("roles.reward.by_source={arithmetic: megappo.no_such_module}",),
        "roles.reward.by_source.arithmetic: megappo.no_such_module: package megappo has no module 'no_such_module': "
        "give package.module:name or file.py:name",
    ),
    "a source without a reward": (
        ("roles.reward={by_source: {gsm8k: score.py}}", "data.validation=[]"),
        "roles.reward.by_source: has no function for data_source 'arithmetic' of train.parquet, only for gsm8k: "
        "add one, or give roles.reward.function for all others",
    ),
    "a file in the run folder's place": (
        ("run.dir=score.py/run",),
        "run.dir: score.py/run: FOLDER/score.py is a file: choose another folder",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), OVERRIDES.values(), ids=OVERRIDES)
def test_error(project: Project, overrides: tuple[str, ...], message: str) -> None:
    write_model(project.folder / "small", head_dim=48)
    assert project.report(*overrides).errors == (message.replace("FOLDER", str(project.folder)),)


WARNINGS: dict[str, tuple[tuple[str, ...], str]] = {
    "unused pool": (
        ("pools.extra.devices_per_node=3",),
        "pools.extra: no role uses it: leave it out, or name it as a role's pool",
    ),
    "unused reference": (
        ("ppo.kl.in_reward=false",),
        "roles.reference: no KL term uses it: leave it out, or set ppo.kl.in_reward or loss_coef",
    ),
    "tensor parallel across nodes": (
        ("roles.actor={pool: train, tp: 4}", "pools.train={nodes: 2, devices_per_node: 2}"),
        "roles.actor.tp: 4 does not divide the 2 devices of a node, so tensor parallel groups cross nodes, which is "
        "slow: sizes within a node are 1, 2",
    ),
    "idle ranks": (
        ("roles.actor={pool: train}", "ppo.mini_batch=3"),
        "ppo.mini_batch: 3 responses leave some of the actor's 4 data-parallel ranks without work: raise it, or tp or "
        "pp",
    ),
    "idle engines": (
        ("data.prompts_per_step=3", "pools.serve.devices_per_node=4", "ppo.mini_batch=12"),
        "data.prompts_per_step: 3 prompts leave some of 4 engines without work: raise it, or roles.rollout.tp",
    ),
    "idle reference": (
        ("roles.reference={pool: big}", "pools.big.devices_per_node=33"),
        "data.prompts_per_step: 32 responses leave some of the reference's 33 data-parallel ranks without work: raise "
        "it, or tp or pp",
    ),
    "few prompts": (
        ("data.prompts_per_step=21",),
        "data.prompts_per_step: 21 is more than the 20 prompts of data.train: every step repeats prompts",
    ),
    "few validation prompts": (
        ("data.validation_prompts=6",),
        "data.validation_prompts: 6 is more than the 5 prompts of data.validation: all are used",
    ),
    "truncated sampling by mass": (
        ("roles.rollout.top_p=0.9",),
        "roles.rollout.top_p: 0.9 samples from a truncated distribution, while log-probabilities, ratios and KL are of "
        "the full one, so that training is biased: set 1",
    ),
    "truncated sampling by rank": (
        ("roles.rollout.top_k=50",),
        "roles.rollout.top_k: 50 samples from a truncated distribution, while log-probabilities, ratios and KL are of "
        "the full one, so that training is biased: set -1",
    ),
    "slow rewards": (  # 8 prompts of 4 samples in 2 processes
        ("run.timeout_s=159",),
        "roles.reward.timeout_s: 10 s for each of 32 responses in 2 processes is up to 160 s, longer than the 159 s of "
        "run.timeout_s, which would end the run: lower it, raise processes or run.timeout_s",
    ),
    "slow rewards in validation": (  # 3 of the 5 prompts of 20 samples
        ("roles.rollout.validation_samples=20", "data.validation_prompts=3", "run.timeout_s=299"),
        "roles.reward.timeout_s: 10 s for each of 60 responses in 2 processes is up to 300 s, longer than the 299 s of "
        "run.timeout_s, which would end the run: lower it, raise processes or run.timeout_s",
    ),
    "memory of a shared pool": (
        (
            "run.device=cuda",
            "roles.rollout.pool=train",
            "pools={train: {devices_per_node: 4}, value: {devices_per_node: 2}}",
        ),
        "roles.rollout.memory_fraction: 0.9 leaves little of the devices to actor, whose pool the engines share: "
        "around 0.5 is usual",
    ),
    "recomputing without training": (
        ("roles.reference.recompute=full",),
        "roles.reference.recompute: full has no effect, as it never trains: leave it out",
    ),
    "making room for nobody": (
        ("roles.actor.offload=all",),
        "roles.actor.offload: all costs time and makes room for nobody, as no other role uses the pool train: set none",
    ),
    "a source spelt otherwise": (
        ("roles.reward={function: score.py, by_source: {arithmetics: score.py}}",),
        "roles.reward.by_source.arithmetics: no row of the data files has this data_source: did you mean arithmetic?",
    ),
    "weights of a source that is not there": (
        ("roles.reward={function: score.py, weights_by_source: {gsm8k: {function: 2}}}",),
        "roles.reward.weights_by_source.gsm8k: no row of the data files has this data_source: there are arithmetic",
    ),
    "a KL loss that holds nothing": (
        ("ppo.kl={in_reward: false, loss_coef: 0.1, loss_estimator: k1}",),
        "ppo.kl.loss_estimator: k1 as a loss has a gradient that is 0 on average, so that nothing holds the policy "
        "near the reference: set k2, whose gradient is that of KL(policy || reference), or k3",
    ),
    "gspo's average": (
        ("ppo.loss=gspo", "ppo.clip=3e-4"),
        "ppo.aggregation: token_mean weighs a response's ratio by its length; the paper's gspo is "
        "seq_mean_token_mean: set that",
    ),
    "gspo's clip": (
        ("ppo.loss=gspo", "ppo.aggregation=seq_mean_token_mean"),
        "ppo.clip: 0.2 is wide for the ratio of a whole response, so that gspo clips nothing: the paper has clip 3e-4 "
        "and clip_high 4e-4",
    ),
    "old responses as if they were new": (
        ("ppo.staleness=1", "ppo.correction.level='off'"),
        "ppo.correction.level: off, with ppo.staleness 1, takes responses of older weights for those of the newest, so "
        "that training is biased: leave it out, or set token",
    ),
    "actor never trains": (
        ("ppo.critic_warmup=10",),
        "ppo.critic_warmup: 10 steps are all of run.steps, so that the actor never trains: lower it",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), WARNINGS.values(), ids=WARNINGS)
def test_warning(project: Project, overrides: tuple[str, ...], message: str) -> None:
    assert project.report(*overrides) == Report(warnings=(message,))


def test_what_does_not_fit_is_said(project: Project) -> None:
    rates = dict.fromkeys(("matrix_tflops", "memory_gb_s", "host_gb_s", "node_gb_s", "network_gb_s"), 1)
    for gib in (6, 24):
        (project.folder / f"of{gib}.yaml").write_text(yaml.safe_dump({"memory_gib": gib, **rates}))
    assert project.report("run.device=cuda", "run.device_profile=of24.yaml") == Report()
    (line,) = project.report("run.device=cuda", "run.device_profile=of6.yaml").warnings
    assert line.startswith("pools.serve: generating needs 7.4 GiB on device 0 (of6), which has 6.0 of its 6.0 GiB")
    assert line.endswith("memory_fraction below 0.9 (planned for run.device_profile: of6.yaml)")
    report = project.report("run.device=cuda", "run.device_profile=of6.yaml", "roles.actor.tp=3")
    assert len(report.errors) == 2 and report.warnings == ()  # with mistakes there is nothing to add up


def test_a_device_without_products_in_eight_bits_is_named(project: Project) -> None:
    choice = ("run.device=cuda", "roles.critic.fp8=tensorwise", "roles.critic.tp=1")
    assert project.report(*choice, "run.device_profile=H100") == Report()
    (line,) = project.report(*choice, "run.device_profile=A100").warnings
    assert line == (
        "roles.critic.fp8: tensorwise needs a device of compute capability 8.9, A100 has 8: set none (planned for "
        "run.device_profile: A100)"
    )


def test_a_profile_that_is_not_there_is_named(project: Project) -> None:
    (line,) = project.report("run.device=cuda", "run.device_profile=H900").errors
    assert line.startswith("run.device_profile: H900: not a device we know: known are H200, H100, A100")
