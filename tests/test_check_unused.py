"""Keys that nothing reads in a run of this configuration: each is named, and only there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from small_project import Project, make_project, write_model
from small_run import ROOT
from test_credit import FIXED, PPO, by_hand

from megappo.check import check_file
from megappo.check.unused import TRAINING, unused_findings
from megappo.config import KLConfig, load_config
from megappo.credit import assign_credit


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "scorer", architectures=["Qwen2ForSequenceClassification"], num_labels=1)
    return make_project(tmp_path)


GPU = ("run.device=cuda",)
NO_DATA = ("data.validation=[]",)
NO_CRITIC = ("ppo.estimator=grpo", "roles.critic=null", "ppo.critic_lr=null")
REPLAY = ("data.replay=r.parquet",)
BY_MODEL = ("roles.reward.function=null", "roles.reward.pool=value", "roles.reward.model=scorer")
MODEL = BY_MODEL[1:]
IN_LOSS = ("ppo.kl.in_reward=false", "ppo.kl.loss_coef=0.1")
SANDBOX = ("roles.reward.function=megappo.rewards.code", "roles.reward.timeout_s=60")
NO_VALIDATION = "without data.validation or canary: leave it out"
GREEDY = ", as roles.rollout.validation_temperature 0 is greedy: give a number > 0 there, or leave it out"
LEVEL = "while ppo.correction.level is off, as it is by default without ppo.staleness: leave it out"
WARM = "roles.rollout.validation_temperature=1"

CASES: dict[
    str, tuple[str, tuple[str, ...], str, tuple[str, ...]]
] = {  # value, where it is unused, how, where it is used
    "run.upload_timeout_s": (
        "5.0",
        (),
        "while run.dir is a folder here: leave it out",
        ("run.dir=file:///tmp/none/run",),
    ),
    "run.validate_every": ("5", NO_DATA, "without data.validation: name files there", ()),
    "run.validate_before": ("false", NO_DATA, NO_VALIDATION, ()),
    "data.validation_prompts": ("2", NO_DATA, "without data.validation: leave it out", ()),
    "data.shuffle": ("false", REPLAY, "with data.replay: leave it out", ()),
    "roles.rollout.memory_fraction": ("0.5", (), "on CPU: leave it out", GPU),
    "roles.rollout.kv_cache_gib": ("0.5", GPU, "on GPUs: set memory_fraction instead", ()),
    "roles.rollout.sleep": (
        "offload",
        GPU,
        ", as the engines share no GPU with other roles: leave it out",
        (*GPU, "roles.rollout.pool=value"),
    ),
    "roles.rollout.validation_temperature": ("1.0", NO_DATA, NO_VALIDATION, ()),
    "roles.rollout.validation_top_p": ("0.5", (), GREEDY, (WARM,)),
    "roles.rollout.validation_top_k": ("20", (), GREEDY, (WARM,)),
    "roles.rollout.validation_samples": ("4", NO_DATA, NO_VALIDATION, ()),
    "roles.reward.timeout_s": ("20.0", BY_MODEL, "without a reward function: leave it out", MODEL),
    "roles.reward.processes": ("3", BY_MODEL, "without a reward function: leave it out", MODEL),
    "roles.reward.sandbox": (
        "{timeout_s: 6.0}",
        (),
        ", as no reward function takes the sandbox: leave it out",
        SANDBOX,
    ),
    "roles.reward.sandbox.processes": (
        "8",
        (*SANDBOX, "roles.reward.sandbox.kind=http", "roles.reward.sandbox.url=http://none/run_code"),
        "but with kind local: leave it out",
        SANDBOX,
    ),
    "roles.reward.weights.function": ("2.0", BY_MODEL, "without a reward function: leave it out", MODEL),
    "roles.reward.weights.model": ("2.0", (), "without a reward model: leave it out", MODEL),
    "roles.reward.weights_by_source.NAME.function": ("2.0", BY_MODEL, "without a reward function: leave it out", MODEL),
    "roles.reward.weights_by_source.NAME.model": ("2.0", (), "without a reward model: leave it out", MODEL),
    "roles.reward.length_penalty.after": (
        "9",
        (),
        "without per_token: leave it out",
        ("roles.reward.length_penalty.per_token=0.1",),
    ),
    "ppo.gamma": (
        "0.5",
        NO_CRITIC,
        "but with ppo.estimator gae or reinforce_plus_plus: leave it out",
        (*NO_CRITIC[1:], "ppo.estimator=reinforce_plus_plus"),
    ),
    "ppo.lam": ("0.5", NO_CRITIC, "without a critic: leave it out", ()),
    "ppo.dual_clip": ("null", ("ppo.loss=cispo",), "but with ppo.loss ppo: leave it out", ()),
    "ppo.value_clip": ("0.5", NO_CRITIC, "without a critic: leave it out", ()),
    "ppo.critic_lr": ("1e-05", NO_CRITIC[:2], "without a critic: leave it out", ()),
    "ppo.critic_updates": ("2", NO_CRITIC, "without a critic: leave it out", ()),
    "ppo.critic_optimizer": ("{}", NO_CRITIC, "without a critic: leave it out", ()),
    "ppo.dynamic_sampling": ("{}", REPLAY, "with data.replay: leave it out", ()),
    "ppo.kl.coef": ("0.5", IN_LOSS, "without ppo.kl.in_reward: leave it out", ()),
    "ppo.kl.estimator": (
        "k3",
        ("ppo.kl.in_reward=false", "roles.reference=null"),
        "without a reference: leave it out",
        IN_LOSS,  # in the log
    ),
    "ppo.kl.target": ("0.1", IN_LOSS, "without ppo.kl.in_reward: leave it out", ()),
    "ppo.kl.horizon": (
        "9000",
        (),
        "without ppo.kl.in_reward and target: leave it out",
        ("ppo.kl.target=0.1",),
    ),
    "ppo.kl.loss_estimator": ("k2", (), "without ppo.kl.loss_coef: leave it out", IN_LOSS),
    "ppo.correction.threshold": ("3.0", (), LEVEL, ("ppo.staleness=1",)),
    "ppo.optimizer.min_lr_ratio": (
        "0.5",
        (),
        "with the constant schedule: leave it out",
        ("ppo.optimizer.schedule=cosine",),
    ),
    "ppo.critic_optimizer.min_lr_ratio": (
        "0.5",
        (),
        "with the constant schedule: leave it out",
        ("ppo.critic_optimizer.schedule=cosine",),
    ),
    "ppo.guards.NAME.factor": (
        "0.25",
        ("ppo.guards.own={metric: actor/ppo_kl, above: 1}",),
        "but with action lower_lr or raise_kl: leave it out",
        ("ppo.guards.own={metric: actor/ppo_kl, above: 1, action: lower_lr}",),
    ),
}


def test_every_key_of_the_table_is_here() -> None:
    assert CASES.keys() == TRAINING.keys()


@pytest.mark.parametrize("kind", CASES)
def test_it_is_named_where_nothing_reads_it(project: Project, kind: str) -> None:
    value, unused, how, used = CASES[kind]
    key = kind.replace("weights_by_source.NAME", "weights_by_source.arithmetic").replace("NAME", "own")
    given = "" if value.startswith("{") else f" {value}"
    message = f"{key}:{given} has no effect{how if how.startswith(',') else f' {how}'}"
    assert [line for line in about(key, *unused, f"{key}={value}")] == [message]
    assert list(about(key, *used, f"{key}={value}")) == []


def about(key: str, *overrides: str) -> Iterator[str]:
    """What check warns of as without effect, of one key."""
    _, report = check_file("config.yaml", overrides)
    return (line for line in report.warnings if line.startswith(f"{key}:") and "has no effect" in line)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_what_ships_sets_nothing_in_vain(path: Path) -> None:
    assert list(unused_findings(load_config(path))) == []


@pytest.mark.parametrize("estimator", ["gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_credit_depends_on_what_is_read(project: Project, estimator: str) -> None:
    """gamma, lambda and the coefficient of KL in the reward, by the table and by what comes out."""
    critic = ("ppo.critic_lr=1e-6",) if estimator == "gae" else ("roles.critic=null",)
    config = load_config("config.yaml", (f"ppo.estimator={estimator}", *critic))
    rows = by_hand().append_column("prompt_index", [[0, 0]])
    for in_reward in (True, False):
        kl = KLConfig(in_reward=in_reward, loss_coef=0.1)
        plain = replace(PPO, estimator=estimator, gamma=1.0, lam=0.95, whiten_advantages=False, kl=kl)
        first = assign_credit(rows, plain, FIXED, max_response=4).table
        found = {
            "ppo.gamma": assign_credit(rows, replace(plain, gamma=0.5), FIXED, max_response=4).table,
            "ppo.lam": assign_credit(rows, replace(plain, lam=0.5), FIXED, max_response=4).table,
            "ppo.kl.coef": assign_credit(rows, plain, replace(FIXED, coef=0.7), max_response=4).table,
        }
        for key, table in found.items():
            section = plain.kl if key == "ppo.kl.coef" else plain
            assert TRAINING[key].is_read(replace(config, ppo=plain), section) == (not table.equals(first)), key
