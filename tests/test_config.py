"""Strict reading of configurations: every mistake named, with its fix, all at once."""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path
from typing import get_args

import pytest

from megappo.config import (
    Config,
    ConfigError,
    PoolConfig,
    PPOConfig,
    RunConfig,
    describe_config,
    dump_config,
    load_config,
)
from megappo.config.ppo import Estimator
from megappo.strict_yaml import dump, parse

GOOD = """\
run: {dir: runs/demo, steps: 100, seed: 1}
model: models/tiny
data: {train: data/train.parquet, prompts_per_step: 64, max_prompt: 128, max_response: 128}
pools:
  train: {nodes: 2, devices_per_node: 4}
  serve: {devices_per_node: 1}
roles:
  actor: {pool: train, tp: 2, pp: 2}
  critic: {pool: train}
  reference: {pool: train, tp: 2}
  rollout: {pool: serve, samples_per_prompt: 4}
  reward: {function: megappo.rewards.gsm8k}
ppo: {mini_batch: 32, actor_lr: 1e-6, critic_lr: 1.0e-5, kl: {coef: 0.001}}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def problems(folder: Path, text: str, overrides: tuple[str, ...] = ()) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, text), overrides)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def edited(old: str, new: str) -> str:
    assert GOOD.count(old) == 1, f"{old!r} must be in the good file once"
    return GOOD.replace(old, new)


def test_good_file(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD))
    assert config.model == "models/tiny"
    assert config.data.train == ("data/train.parquet",)
    assert config.data.validation == ()
    assert config.pools == {
        "train": PoolConfig(nodes=2, devices_per_node=4),
        "serve": PoolConfig(nodes=1, devices_per_node=1),
    }
    assert config.pools["train"].devices == 8
    assert (config.roles.actor.tp, config.roles.actor.pp, config.roles.critic.tp) == (2, 2, 1)
    assert config.ppo.actor_lr == 1e-6, "a string in YAML 1.1"
    assert config.ppo.clip_high is None
    assert config.ppo.kl.in_use
    assert isinstance(config.run.timeout_s, float)


WRONG = {
    "unknown key": (
        ("steps: 100", "steps: 100, save_evry: 20"),
        "run.save_evry: unknown key: did you mean run.save_every?",
    ),
    "unknown key, nothing near": (
        ("nodes: 2", "nodes: 2, gpu_type: h200"),
        "pools.train.gpu_type: unknown key: known here are nodes, devices_per_node",
    ),
    "unknown section": (
        ("model: models/tiny", "model: models/tiny\nmodle: {a: 1}"),
        "modle: unknown key: did you mean model?",
    ),
    "unknown key, deep": (
        ("coef: 0.001", "coef: 0.001, estimater: k1"),
        "ppo.kl.estimater: unknown key: did you mean ppo.kl.estimator?",
    ),
    "a key that is no string": (
        ("steps: 100", "steps: 100, 7: 8"),
        "run.7: unknown key: known here are dir, steps, seed, save_every, keep_checkpoints, keep_best, "
        "validate_every, validate_before, trackers, device, dtype, peak_tflops, device_profile, timeout_s, "
        "heartbeat_s, restarts, dump_rollouts, work_dir, upload_timeout_s",
    ),
    "missing key": (
        ("steps: 100, ", ""),
        "run.steps: missing: give an integer >= 1 (training steps in all)",
    ),
    "missing string": (
        ("model: models/tiny\n", ""),
        "model: missing: give a string (Hugging Face model folder)",
    ),
    "missing section": (
        ("  rollout: {pool: serve, samples_per_prompt: 4}\n", ""),
        "roles.rollout: missing: give a section with at least pool (the engines that generate)",
    ),
    "empty section": (
        ("{pool: serve, samples_per_prompt: 4}", ""),
        "roles.rollout.pool: missing: give a string (name of the pool it runs in)",
    ),
    "string for an integer": (
        ("steps: 100", "steps: many"),
        "run.steps: 'many' is a string: give an integer >= 1 (training steps in all)",
    ),
    "quoted integer": (
        ("steps: 100", "steps: '100'"),
        "run.steps: '100' is a string: give an integer >= 1 (training steps in all)",
    ),
    "number for an integer": (
        ("tp: 2, pp: 2", "tp: 2.0, pp: 2"),
        "roles.actor.tp: 2.0 is a number: give an integer >= 1 (tensor parallel size)",
    ),
    "boolean for an integer": (
        ("tp: 2, pp: 2", "tp: true, pp: 2"),
        "roles.actor.tp: True is a boolean: give an integer >= 1 (tensor parallel size)",
    ),
    "boolean for a number": (
        ("coef: 0.001", "coef: false"),
        "ppo.kl.coef: False is a boolean: give a number >= 0 ((first) coefficient of the penalty in the reward)",
    ),
    "YAML 1.1's yes": (
        ("coef: 0.001", "in_reward: yes"),
        "ppo.kl.in_reward: 'yes' is a string: give true or false (take the KL penalty off the token rewards)",
    ),
    "integer for a string": (
        ("dir: runs/demo", "dir: 5"),
        "run.dir: 5 is an integer: give a string (folder or URL of everything the run leaves; a run resumes from it)",
    ),
    "empty string": (
        ("dir: runs/demo", "dir: ''"),
        "run.dir: '' is empty: give a string (folder or URL of everything the run leaves; a run resumes from it)",
    ),
    "null": (
        ("mini_batch: 32", "mini_batch: "),
        "ppo.mini_batch: empty: give an integer >= 1 (responses of one optimizer step, over all ranks)",
    ),
    "a list for a section": (
        ("{pool: train}", "[train]"),
        "roles.critic: ['train'] is a list: give a section with at least pool",
    ),
    "a scalar for named sections": (
        ("pools:\n  train: {nodes: 2, devices_per_node: 4}\n  serve: {devices_per_node: 1}", "pools: 8"),
        "pools: 8 is an integer: give names, each with a section with at least devices_per_node "
        "(named sets of devices)",
    ),
    "an integer for files": (
        ("train: data/train.parquet", "train: 5"),
        "data.train: 5 is an integer: give a list, each a string (parquet files to train on)",
    ),
    "an integer among files": (
        ("train: data/train.parquet", "train: [a, 5]"),
        "data.train[1]: 5 is an integer: give a string (parquet files to train on)",
    ),
    "a mapping for a string": (
        ("model: models/tiny", "model: {path: models/tiny}"),
        "model: {'path': 'models/tiny'} is a mapping: give a string (Hugging Face model folder)",
    ),
    "a name that is no string": (
        ("  serve: {devices_per_node: 1}", "  serve: {devices_per_node: 1}\n  1: {devices_per_node: 1}"),
        "pools: the name 1 is an integer: put it in quotes",
    ),
    "zero": (
        ("steps: 100", "steps: 0"),
        "run.steps: 0 is out of range: give an integer >= 1 (training steps in all)",
    ),
    "negative": (
        ("seed: 1", "seed: -1"),
        "run.seed: -1 is out of range: give an integer >= 0 (seed of data order, mini-batches and sampling)",
    ),
    "lambda over 1": (
        ("mini_batch: 32", "mini_batch: 32, lam: 1.5"),
        "ppo.lam: 1.5 is out of range: give a number >= 0 and <= 1 (lambda of generalised advantage estimation)",
    ),
    "clip of 0": (
        ("mini_batch: 32", "mini_batch: 32, clip: 0"),
        "ppo.clip: 0 is out of range: give a number > 0 and <= 1 (ratio clipping below: 1 - clip)",
    ),
    "negative optional": (
        ("mini_batch: 32", "mini_batch: 32, value_clip: -0.2"),
        "ppo.value_clip: -0.2 is out of range: give a number > 0 (clipping of value changes; null: none)",
    ),
    "negative temperature": (
        ("samples_per_prompt: 4", "temperature: -1"),
        "roles.rollout.temperature: -1 is out of range: give a number >= 0 (sampling temperature; 0: greedy)",
    ),
    "top_p of 0": (
        ("samples_per_prompt: 4", "top_p: 0.0"),
        "roles.rollout.top_p: 0.0 is out of range: give a number > 0 and <= 1 (probability mass that is sampled from)",
    ),
    "not a number": (
        ("actor_lr: 1e-6", "actor_lr: .nan"),
        "ppo.actor_lr: nan is out of range: give a number >= 0 (peak learning rate of the actor)",
    ),
    "beta of 1": (
        ("kl: {coef: 0.001}", "optimizer: {beta2: 1}"),
        "ppo.optimizer.beta2: 1 is out of range: give a number >= 0 and < 1 (AdamW's second decay rate)",
    ),
    "unknown choice": (
        ("steps: 100", "steps: 100, dtype: fp16"),
        "run.dtype: 'fp16' is not known: give bfloat16 or float32 (type of weights and activations)",
    ),
    "unknown tracker": (
        ("steps: 100", "steps: 100, trackers: [comet]"),
        "run.trackers[0]: 'comet' is not known: give tensorboard or wandb or mlflow "
        "(where metrics go besides log.jsonl)",
    ),
    "given twice": (
        ("model: models/tiny", "model: models/tiny\nmodel: models/other"),
        "model: given twice, on lines 2 and 3: keep one",
    ),
    "given twice, deep": (
        ("  critic: {pool: train}", "  critic:\n    pool: train\n    tp: 1\n    tp: 2"),
        "roles.critic.tp: given twice, on lines 11 and 12: keep one",
    ),
    "long value": (
        ("steps: 100", f"steps: {'x' * 100}"),
        f"run.steps: '{'x' * 56}... is a string: give an integer >= 1 (training steps in all)",
    ),
}


@pytest.mark.parametrize(("edit", "message"), WRONG.values(), ids=WRONG)
def test_wrong_file(tmp_path: Path, edit: tuple[str, str], message: str) -> None:
    assert problems(tmp_path, edited(*edit)) == (message,)


def test_wrong_files_are_many() -> None:
    assert len(WRONG) >= 25


def test_all_problems_come_out_together(tmp_path: Path) -> None:
    text = edited("steps: 100", "steps: many, save_evry: 20").replace("model: models/tiny\n", "")
    text = text.replace("mini_batch: 32", "lam: 2, mini_batch: 0, mini_batch: 0")
    assert problems(tmp_path, text, ("roles.actor.tpp=2", "nonsense")) == (
        "ppo.mini_batch: given twice, on lines 12 and 12: keep one",
        "nonsense: not an override: write key=value, for instance roles.rollout.tp=2",
        "run.save_evry: unknown key: did you mean run.save_every?",
        "run.steps: 'many' is a string: give an integer >= 1 (training steps in all)",
        "model: missing: give a string (Hugging Face model folder)",
        "roles.actor.tpp: unknown key: did you mean roles.actor.tp?",
        "ppo.lam: 2 is out of range: give a number >= 0 and <= 1 (lambda of generalised advantage estimation)",
        "ppo.mini_batch: 0 is out of range: give an integer >= 1 (responses of one optimizer step, over all ranks)",
    )


NO_MAPPING = "holds no mapping: give sections run, model, data, pools, roles, ppo"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", NO_MAPPING),
        ("# nothing\n", NO_MAPPING),
        ("- a\n- b\n", NO_MAPPING),
        ("a: {}\nb: c: d\n", "line 2, column 5: mapping values are not allowed here: fix the YAML there"),
        ("run: [1, 2\n", "line 2, column 1: expected ',' or ']', but got '<stream end>': fix the YAML there"),
        ("a:\n\tb: c\n", "line 2, column 1: found character '\\t' that cannot start any token: fix the YAML there"),
        (
            "run: !!python/object:os.system {}\n",
            "line 1, column 6: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/object:os.system': fix the YAML there",
        ),
    ],
    ids=["empty", "comments", "list", "colon", "bracket", "tab", "tag"],
)
def test_not_a_configuration(tmp_path: Path, text: str, message: str) -> None:
    assert problems(tmp_path, text) == (f"{tmp_path / 'config.yaml'}: {message}",)


def test_unreadable_files(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (tmp_path / "none.yaml", "no such file: give the path of a YAML file"),
        (tmp_path, "cannot be read (Is a directory): give the path of a YAML file"),
        (binary, "not UTF-8 text: give the path of a YAML file"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert caught.value.problems == (f"{path}: {message}",)


def test_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    config = load_config(
        path,
        [
            "roles.rollout.tp=2",
            "ppo.optimizer.eps=1e-4",  # a section that the file does not have
            "ppo.kl.target=0.1",
            "roles.reference=null",
            "data.train=[a.parquet, b=c.parquet]",
            "pools.extra={devices_per_node: 3}",
            "run.dir=runs/other",
            "ppo.clip_high=",
        ],
    )
    assert config.roles.rollout.tp == 2
    assert config.roles.rollout.samples_per_prompt == 4, "the rest of the section stays"
    assert config.ppo.optimizer.eps == 1e-4
    assert config.ppo.kl.target == 0.1
    assert config.roles.reference is None
    assert config.data.train == ("a.parquet", "b=c.parquet")
    assert config.pools["extra"].devices == 3
    assert config.run.dir == "runs/other"
    assert config.ppo.clip_high is None
    assert load_config(path).roles.rollout.tp == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("roles.rolout.tp=2", "roles.rolout: unknown key: did you mean roles.rollout?"),
        ("roles.rollout.tp=two", "roles.rollout.tp: 'two' is a string: give an integer >= 1 "
                                 "(tensor parallel size of one engine)"),
        ("roles.rollout.tp", "roles.rollout.tp: not an override: write key=value, for instance roles.rollout.tp=2"),
        ("roles.actor.lora={rank:", "roles.actor.lora={rank:: a bracket is not closed: close it, and quote the "
                                    "override in the shell, as in 'roles.actor.lora={rank: 4}'"),
        ("roles..tp=1", "roles..tp=1: not an override: write key=value, for instance roles.rollout.tp=2"),
        ("=1", "=1: not an override: write key=value, for instance roles.rollout.tp=2"),
        ("model.path=x", "model.path=x: model is no section: it has no keys to override"),
        ("run.steps=[1", "run.steps=[1: a bracket is not closed: close it, and quote the override in the shell, as in "
                         "'roles.actor.lora={rank: 4}'"),
        ("run.steps=[1}]", "run.steps=[1}]: line 1, column 3: expected ',' or ']', but got '}': fix the YAML there"),
    ],
)  # fmt: skip
def test_wrong_override(tmp_path: Path, override: str, message: str) -> None:
    assert problems(tmp_path, GOOD, (override,)) == (message,)


def test_override_of_a_shared_section_changes_one_role(tmp_path: Path) -> None:
    text = edited("actor: {pool", "actor: &same {pool").replace("critic: {pool: train}", "critic: *same")
    config = load_config(write(tmp_path, text), ["roles.critic.tp=4"])
    assert (config.roles.actor.tp, config.roles.critic.tp) == (2, 4)


def test_merge_keys_and_strings_that_look_like_values(tmp_path: Path) -> None:
    text = edited("actor: {pool", "actor: &same {pool").replace("critic: {pool: train}", "critic: {<<: *same, tp: 1}")
    text = text.replace("train.parquet", "010").replace("dir: runs/demo", "dir: off")
    config = load_config(write(tmp_path, text))
    assert (config.roles.critic.tp, config.roles.critic.pp) == (1, 2)
    assert config.run.dir == "off", "not a boolean"
    assert config.data.train == ("data/010",)


def test_round_trip(tmp_path: Path) -> None:
    overrides = ["ppo.clip_high=0.28", "run.dir='1e5'", "roles.reward.by_source={'no': a.b, '12': 'c.py:f'}"]
    config = load_config(write(tmp_path, GOOD), overrides)
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert load_config(again) == config
    assert load_config(again).run.dir == "1e5"
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("value", [1e-6, 1e22, 0.1, -0.0, 5, "5", "1e-6", "true", "no", "null", "", "~", "a: b", "é", None, True])  # fmt: skip # noqa: E501
def test_scalars_round_trip(value: object) -> None:
    found: list[str] = []
    again = parse(dump({"key": value}), found)
    assert (again, found) == ({"key": value}, [])
    assert type(again["key"]) is type(value)


def test_partial_configuration_keeps_defaults(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, edited("seed: 1", "seed: x, stps: 3")))
    assert caught.value.partial is not None
    assert caught.value.partial.run.seed == 1
    assert caught.value.doubtful == {"run.seed", "run.stps", "run.steps"}


def test_checkpoints_come_ten_times_in_a_long_run_unless_configured() -> None:
    runs = [(10, None), (50, None), (250, None), (5000, None), (5000, 0), (5000, 7)]
    found = [RunConfig(dir="run", steps=steps, save_every=every).checkpoint_every for steps, every in runs]
    assert found == [10, 10, 25, 500, 0, 7]


def test_frozen(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model = "other"  # type: ignore[misc]


def test_the_help_names_the_estimators_that_whiten() -> None:
    (told,) = (text for name, _, _, text in describe_config() if name == "ppo.whiten_advantages")
    whitening = {each for each in get_args(Estimator) if PPOConfig(mini_batch=1, actor_lr=1, estimator=each).whitens}
    assert set(re.findall(r"[a-z_]+", told)) & set(get_args(Estimator)) == whitening


def test_every_key_has_a_help_text() -> None:
    keys = list(describe_config())
    assert ("ppo.lam", "a number >= 0 and <= 1", "0.95", "lambda of generalised advantage estimation") in keys
    assert ("pools.NAME.nodes", "an integer >= 1", "1", "machines") in keys
    assert ("run.steps", "an integer >= 1", "required", "training steps in all") in keys
    assert all(help_text for *_, help_text in keys)
    assert {dotted.split(".")[0] for dotted, *_ in keys} == {field.name for field in dataclasses.fields(Config)}


def test_what_workers_get_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker on another machine has another working directory."""
    overrides = [
        "roles.critic.model=../value",
        "roles.reward={function: my.py:score, by_source: {a: pack.age, b: /c.py}}",
    ]
    config = load_config(write(tmp_path, GOOD), overrides)
    monkeypatch.chdir(tmp_path)
    assert config.model_folder("actor") == config.model_folder("reference") == f"{tmp_path}/models/tiny"
    assert config.model_folder("critic") == f"{tmp_path.parent}/value"
    reward = config.roles.reward.absolute()
    assert reward.function == f"{tmp_path}/my.py:score"
    assert reward.by_source == {"a": "pack.age", "b": "/c.py:compute_score"}
    assert reward.absolute() == reward
    assert dataclasses.replace(reward, function=None).absolute().function is None
