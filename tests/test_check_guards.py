"""Guards and the best checkpoint before a run: what they watch must be logged, and say something."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_project import Project, make_project

from megappo.check import Report
from megappo.layout.timeline import STEP
from megappo.metric_names import FIXED
from megappo.report.speed import PASSES
from megappo.report.step_metrics import PHASES


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    return make_project(tmp_path)


ERRORS: dict[str, tuple[tuple[str, ...], str]] = {
    "without a limit": (
        ("ppo.guards={kl: {metric: actor/ppo_kl}}",),
        "ppo.guards.kl: has no limit: give above, below or both",
    ),
    "with nothing between": (
        ("ppo.guards={kl: {metric: actor/ppo_kl, above: 1, below: 2}}",),
        "ppo.guards.kl.above: 1.0 is less than below 2.0, which leaves nothing: swap them",
    ),
    "of no metric": (
        ("ppo.guards={kl: {metric: actor/ppo_kll, above: 1}}",),
        "ppo.guards.kl.metric: actor/ppo_kll is no metric that a run logs: did you mean actor/ppo_kl or "
        "actor/ppo_kl_first or actor/pg_loss?",
    ),
    "of no family": (
        ("ppo.guards={kl: {metric: loss, above: 1}}",),
        "ppo.guards.kl.metric: loss is no metric that a run logs: names begin with actor/, canary/, critic/, guard/, "
        "perf/, prompt_length/, response_length/, reward/, staleness/, timing_s/, train/, training/, val-aux/, "
        "val-core/",
    ),
    "of another number of samples": (
        (
            "run.validate_every=1",
            "roles.rollout.validation_samples=4",
            "ppo.guards={a: {metric: val-core/a/acc/mean@1, below: 1}}",
        ),
        "ppo.guards.a.metric: val-core/a/acc/mean@1 is never logged, as roles.rollout.validation_samples is 4: "
        "write mean@4",
    ),
    "the best of too many samples": (
        ("run.validate_every=1", "run.keep_best={metric: val-core/a/acc/pass@2}"),
        "run.keep_best.metric: val-core/a/acc/pass@2 is never logged, as roles.rollout.validation_samples is 1: "
        "write mean@1",
    ),
    "of the canary": (
        ("ppo.guards={kl: {metric: canary/a/acc/mean@1, above: 1}}",),
        "ppo.guards.kl.metric: canary/a/acc/mean@1 is never logged without data.canary: name files there",
    ),
    "of no critic": (
        ("ppo.guards={v: {metric: critic/vf_loss, above: 1}}", "ppo.estimator=rloo", "roles.critic=null"),
        "ppo.guards.v.metric: critic/vf_loss is never logged without a critic: choose another",
    ),
    "of no KL": (
        (
            "ppo.guards={kl: {metric: actor/ppo_kl, above: 1, action: raise_kl}}",
            "ppo.kl.in_reward=false",
            "roles.reference=null",
        ),
        "ppo.guards.kl.action: raise_kl has no KL term to strengthen: set ppo.kl.in_reward or loss_coef",
    ),
    "the best by training": (
        ("run.keep_best={metric: critic/score/mean}",),
        "run.keep_best.metric: critic/score/mean is no metric of a validation: give one such as "
        "val-core/SOURCE/acc/mean@1, as the log has it",
    ),
    "the best of no validation": (
        ("run.keep_best={metric: val-core/a/acc/mean@1}", "data.validation=[]"),
        "run.keep_best.metric: val-core/a/acc/mean@1 is never logged without data.validation: name files there",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), ERRORS.values(), ids=ERRORS)
def test_error(project: Project, overrides: tuple[str, ...], message: str) -> None:
    assert project.report(*overrides).errors == (message,)


WARNINGS: dict[str, tuple[tuple[str, ...], str]] = {
    "a guard at the end": (
        ("ppo.guards={a: {metric: val-core/a/acc/mean@1, below: 1}}",),
        "ppo.guards.a.metric: val-core/a/acc/mean@1 is logged at the end only: set run.validate_every",
    ),
    "the best of one": (
        ("run.keep_best={metric: val-core/a/acc/mean@1}",),
        "run.keep_best.metric: val-core/a/acc/mean@1 is logged at the end only: set run.validate_every",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), WARNINGS.values(), ids=WARNINGS)
def test_warning(project: Project, overrides: tuple[str, ...], message: str) -> None:
    assert project.report(*overrides) == Report(warnings=(message,))


WITHOUT_CRITIC = ("ppo.estimator=rloo", "roles.critic=null")
WITHOUT_REFERENCE = ("ppo.kl.in_reward=false", "roles.reference=null")
REPLAY = ("data.replay=r.parquet", "ppo.staleness=2", "ppo.dynamic_sampling={}")
SLEEPS = ("roles.rollout.pool=value", "run.device=cuda")
SILENT: list[tuple[str, tuple[str, ...], str, tuple[str, ...]]] = [
    ("guard/rate_factor", (), "is known only when guards have seen the step", ("never",)),
    ("timing_s/save_checkpoint", (), "is known only when guards have seen the step", ("never",)),
    ("critic/values/mean", WITHOUT_CRITIC, "is never logged without a critic", ()),
    ("critic/vpred_mean", WITHOUT_CRITIC, "is never logged without a critic", ()),
    ("critic/returns/max", WITHOUT_CRITIC, "is never logged without a critic", ()),
    ("perf/tflops/values", WITHOUT_CRITIC, "is never logged without a critic", ()),
    ("perf/max_memory_allocated_gb/critic", WITHOUT_CRITIC, "is never logged without a critic", ("run.device=cuda",)),
    ("critic/vf_clipfrac", ("ppo.value_clip=null",), "is always 0 without ppo.value_clip", ()),
    ("actor/ppo_kl", ("ppo.critic_warmup=10",), "is never logged, as only the critic trains", ()),
    ("actor/pg_clipfrac_lower", ("ppo.loss=cispo",), "is always 0 without ppo.loss ppo and its dual_clip", ()),
    ("actor/pg_clipfrac_lower", ("ppo.dual_clip=null",), "is always 0 without ppo.loss ppo and its dual_clip", ()),
    ("actor/kl_loss", (), "is never logged without ppo.kl.loss_coef", ("ppo.kl.loss_coef=0.1",)),
    ("actor/reward_kl_penalty", WITHOUT_REFERENCE, "is always 0 without a reference", ()),
    ("actor/reward_kl_penalty", WITHOUT_REFERENCE, "is always 0 without a reference", ("ppo.kl.in_reward=false",)),
    (
        "actor/reward_kl_penalty_coeff",
        ("ppo.kl.in_reward=false",),
        "is the coefficient of nothing without ppo.kl.in_reward",
        (),
    ),
    ("timing_s/ref", WITHOUT_REFERENCE, "is never logged without a reference", ()),
    (
        "timing_s/reward_model",
        (),
        "is never logged without a reward model",
        ("roles.reward.pool=value", "roles.reward.model=model"),
    ),
    (
        "training/correction_mean",
        (),
        "is never logged while ppo.correction.level is off, as it is by default without ppo.staleness",
        ("ppo.staleness=1",),
    ),
    ("staleness/mean", (), "is never logged without ppo.staleness", ("ppo.staleness=1",)),
    (
        "staleness/partial_share",
        ("ppo.staleness=1",),
        "is never logged with ppo.staleness below 2",
        ("ppo.staleness=2",),
    ),
    (
        "train/informative_prompts",
        (),
        "is never logged without ppo.dynamic_sampling",
        ("ppo.dynamic_sampling={}",),
    ),
    ("train/sampled_prompts", REPLAY, "is never logged with data.replay", ("ppo.dynamic_sampling={}",)),
    ("staleness/max", REPLAY, "is never logged with data.replay", ("ppo.staleness=2",)),
    ("timing_s/gen", REPLAY, "is never logged with data.replay", ()),
    ("response_length/produced_ratio", (), "is never logged without data.replay", ("data.replay=r.parquet",)),
    ("timing_s/testing", ("data.validation=[]",), "is never logged without data.validation or canary", ()),
    ("timing_s/sleep", SLEEPS[:1], "is never logged, as the engines never sleep", SLEEPS),
    ("timing_s/wake", SLEEPS[1:], "is never logged, as the engines never sleep", SLEEPS),
    (
        "timing_s/offload",
        (*SLEEPS, "roles.critic.offload=all"),
        "is never logged, as nothing waits for an offload",
        (*SLEEPS, "roles.actor={pool: value, offload: optimizer}"),
    ),
    ("perf/device_memory_gb/gen", (), "is never logged on CPU", ("run.device=cuda",)),
    ("perf/mfu/gen", (), "is never logged on CPU without run.peak_tflops", ("run.peak_tflops=1",)),
    (
        "perf/busy_share/trains",
        (),
        "is of no pool: pools are train, value, serve, driver",
        ("pools.trains.devices_per_node=1",),
    ),
]


def test_a_pool_may_be_called_as_a_phase(project: Project) -> None:
    guard = "ppo.guards={a: {metric: perf/idle_share/gen, above: 1}}"
    report = project.report(guard, "pools.gen.devices_per_node=1", "roles.rollout.pool=gen", "data.replay=r.parquet")
    assert not [line for line in report.errors if line.startswith("ppo.guards")]


@pytest.mark.parametrize(("metric", "overrides", "why", "alive"), SILENT)
def test_a_guard_of_what_says_nothing(
    project: Project, metric: str, overrides: tuple[str, ...], why: str, alive: tuple[str, ...]
) -> None:
    said = f"ppo.guards.a.metric: {metric} {why}: choose another"
    guard = f"ppo.guards={{a: {{metric: {metric}, above: 1}}}}"
    assert said in project.report(guard, *overrides).errors
    if alive != ("never",):
        assert said not in project.report(guard, *alive).errors


KINDS = {
    "timing_s/": {*PHASES.values(), "adv", "step", "testing", "save_checkpoint"},
    "perf/tflops/": {*PASSES},
    "perf/mfu/": {*PASSES},
    "perf/device_memory_gb/": {*PHASES.values()} - {"reward"},  # functions compute on no device
    "perf/predicted_s/": {phase for line in STEP for phase in line} | {"step"},
}


def test_names_of_phases_are_those_of_a_run() -> None:
    named = {kind: {name.split("/")[-1] for name in FIXED if name.startswith(kind)} for kind in KINDS}
    assert named == KINDS
