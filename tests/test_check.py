"""The check before a run, as a function and through the real command line; every mistake with its exact words."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megappo.check import Report, check_file
from megappo.cli import main
from megappo.config import Config, dump_config, load_config
from megappo.models.spec import ModelError, read_model_spec

HEAVY = ("torch", "ray", "vllm", "transformers", "megatron", "tensorboard")

CONFIG = """\
run: {dir: run, steps: 10, device: cpu}
model: model
data: {train: train.parquet, validation: [validation.parquet], prompts_per_step: 8, max_prompt: 16, max_response: 16}
pools:
  train: {devices_per_node: 4}
  value: {devices_per_node: 2}
  serve: {devices_per_node: 2}
roles:
  actor: {pool: train, tp: 2, pp: 2}
  critic: {pool: value, pp: 2}
  reference: {pool: value, tp: 2}
  rollout: {pool: serve, samples_per_prompt: 4}
  reward: {function: score.py:compute_score}
ppo: {mini_batch: 16, actor_lr: 1e-6, critic_lr: 1e-5}
"""

MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def write_safetensors(path: Path, shapes: dict[str, Sequence[int]]) -> None:
    """Zeros in float32, written by hand: a length, a JSON header, the bytes."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4
        for extent in shape:
            size *= extent
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def write_model(folder: Path, **changes: Any) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**MODEL, **changes}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    write_safetensors(folder / "model.safetensors", dict(read_model_spec(folder).hf_shapes()))


def write_prompts(path: Path, rows: int = 20, drop: str = "", **changes: Any) -> None:
    row = {
        "data_source": "arithmetic",
        "prompt": "1+1=",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0},
        **changes,
    }
    row.pop(drop, None)
    table = pa.Table.from_pylist([row] * max(rows, 1))
    pq.write_table(table.slice(0, rows), path)


@dataclass
class Project:
    """A folder with everything that a good configuration names; the working folder while a test runs."""

    folder: Path

    def edit(self, old: str, new: str) -> None:
        path = self.folder / "config.yaml"
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} must be in the file once"
        path.write_text(text.replace(old, new))

    def report(self, *overrides: str) -> Report:
        return check_file("config.yaml", overrides)[1]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    write_model(tmp_path / "model")
    write_prompts(tmp_path / "train.parquet")
    write_prompts(tmp_path / "validation.parquet", rows=5)
    (tmp_path / "score.py").write_text("def compute_score(**arguments): return 0.0\n")
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return Project(tmp_path)


def test_good_project(project: Project) -> None:
    assert project.report() == Report()
    assert not (project.folder / "run").exists(), "a check leaves nothing behind"


OVERRIDES: dict[str, tuple[tuple[str, ...], str]] = {
    "no such pool": (
        ("roles.critic.pool=values",),
        "roles.critic.pool: 'values' is not a pool: pools are train, value, serve",
    ),
    "rollout shares a pool": (
        ("roles.rollout.pool=train", "pools={train: {devices_per_node: 4}, value: {devices_per_node: 2}}"),
        "roles.rollout.pool: 'train' is also the pool of actor, which is not supported: give rollout a pool of its own",
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
    "sequence parallel": (
        ("roles.critic.sequence_parallel=true",),
        "roles.critic.sequence_parallel: true needs tp > 1: set it to false, or raise tp",
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
        "data.max_response: 50 plus max_prompt 16 is more than the 64 positions of model: lower one by 2",
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
    "no model folder": (
        ("model=models/none",),
        "model: models/none: no such folder: give the path of a Hugging Face model folder",
    ),
    "no model folder of its own": (
        ("roles.critic.model=models/none",),
        "roles.critic.model: models/none: no such folder: give the path of a Hugging Face model folder",
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
        "roles.reward.function: missing: give package.module:name or file.py:name, or fill by_source",
    ),
    "no reward file": (
        ("roles.reward.function=scores.py",),
        "roles.reward.function: scores.py: there is no file scores.py: give file.py:name or package.module:name",
    ),
    "no reward in the file": (
        ("roles.reward.function=score.py:reward",),
        "roles.reward.function: score.py:reward: score.py does not define reward: it defines compute_score",
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
    "few prompts": (
        ("data.prompts_per_step=21",),
        "data.prompts_per_step: 21 is more than the 20 prompts of data.train: every step repeats prompts",
    ),
    "few validation prompts": (
        ("data.validation_prompts=6",),
        "data.validation_prompts: 6 is more than the 5 prompts of data.validation: all are used",
    ),
    "nothing to validate": (
        ("data.validation=[]", "run.validate_every=5"),
        "run.validate_every: 5 has no effect without data.validation: name files there",
    ),
    "target without a penalty": (
        ("ppo.kl={in_reward: false, loss_coef: 0.1, target: 0.1}",),
        "ppo.kl.target: has no effect without ppo.kl.in_reward: leave it out, or set in_reward",
    ),
    "actor never trains": (
        ("ppo.critic_warmup=10",),
        "ppo.critic_warmup: 10 steps are all of run.steps, so that the actor never trains: lower it",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), WARNINGS.values(), ids=WARNINGS)
def test_warning(project: Project, overrides: tuple[str, ...], message: str) -> None:
    assert project.report(*overrides) == Report(warnings=(message,))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _index(folder: Path, shards: Sequence[str]) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {s: s for s in shards}}))


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "unknown family": (
        lambda at: (at / "model/config.json").write_text('{"model_type": "gpt2"}'),
        "model: model/config.json: model_type 'gpt2' is not a family we know: known are llama, qwen2, qwen3",
    ),
    "no tokenizer": (
        lambda at: [path.unlink() for path in (at / "model").glob("tokenizer*")],
        "model: model: has no tokenizer: add tokenizer.json, or tokenizer_config.json and its vocabulary",
    ),
    "no vocabulary": (
        lambda at: (at / "model/tokenizer.json").unlink(),
        "model: model: its tokenizer has no vocabulary: add tokenizer.json or one of vocab.json, vocab.txt, "
        "tokenizer.model, spiece.model",
    ),
    "no weights": (
        lambda at: (at / "model/model.safetensors").unlink(),
        "model: model: has no weights: add model.safetensors, or model.safetensors.index.json and its shards",
    ),
    "truncated weights": (
        lambda at: _truncate(at / "model/model.safetensors"),
        "model: model/model.safetensors: is truncated or no safetensors file: write or download it again",
    ),
    "weights that are a text": (
        lambda at: (at / "model/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1"),
        "model: model/model.safetensors: is truncated or no safetensors file: write or download it again",
    ),
    "missing shards": (
        lambda at: _index(at / "model", ["a.safetensors", "b.safetensors", "c.safetensors"]),
        "model: model: lacks 2 of 3 weight shards, b.safetensors and 1 more: add them",
    ),
    "weights of another depth": (
        lambda at: (at / "model/config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": 5})),
        "model: model: its weights lack model.layers.4.input_layernorm.weight and 11 more: "
        "give the config.json that the weights belong to",
    ),
    "weights of another size": (
        lambda at: (at / "model/config.json").write_text(json.dumps({**MODEL, "vocab_size": 120})),
        "model: model: model.embed_tokens.weight has shape [100, 32] where config.json asks for [120, 32]: "
        "give the config.json that the weights belong to",
    ),
    "missing column": (
        lambda at: write_prompts(at / "train.parquet", drop="reward_model"),
        "data.train: train.parquet: has no column reward_model: it has data_source, prompt, ability, extra_info, "
        "and needs data_source, prompt, reward_model",
    ),
    "no ground truth": (
        lambda at: write_prompts(at / "train.parquet", reward_model="2"),
        "data.train: train.parquet: reward_model is string: it must be a struct with ground_truth",
    ),
    "no rows": (
        lambda at: write_prompts(at / "train.parquet", rows=0),
        "data.train: train.parquet: has no rows: give a file with at least one prompt",
    ),
    "truncated prompts": (
        lambda at: _truncate(at / "validation.parquet"),
        "data.validation: validation.parquet: is truncated or no parquet file: write it again",
    ),
    "no chat template": (
        lambda at: write_prompts(at / "train.parquet", prompt=[{"role": "user", "content": "1+1?"}]),
        "data.train: train.parquet: its prompts are chat messages, and model has no chat template: "
        "add chat_template.jinja there, or write prompts as strings",
    ),
    "reward with a typing mistake": (
        lambda at: (at / "score.py").write_text("x = 1\ndef compute_score(:\n"),
        "roles.reward.function: score.py:compute_score: score.py, line 2 is not valid Python: fix it",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), FILES.values(), ids=FILES)
def test_bad_file(project: Project, spoil: Callable[[Path], object], message: str) -> None:
    spoil(project.folder)
    assert project.report().errors == (message,)


def test_good_variants(project: Project) -> None:
    """What must not be refused: shards, a vocabulary file, a chat template, optional columns, roles sharing a pool."""
    _index(project.folder / "model", ["a.safetensors"])
    (project.folder / "model/tokenizer.json").rename(project.folder / "model/vocab.json")
    (project.folder / "model/chat_template.jinja").write_text("{{ messages }}")
    write_prompts(project.folder / "train.parquet", drop="extra_info", prompt=[{"role": "user", "content": "1+1?"}])
    # In three stages the 4 layers are uneven; 5 responses divide nothing.
    project.edit("{pool: value, pp: 2}", "{pool: train, tp: 4}")
    assert project.report("pools.value.devices_per_node=6", "roles.reference.pp=3", "ppo.mini_batch=5") == Report()


def test_reward_functions_are_found_without_importing(project: Project) -> None:
    (project.folder / "rewards").mkdir()
    (project.folder / "rewards/__init__.py").write_text("raise RuntimeError('imported')\n")
    (project.folder / "rewards/sums.py").write_text(
        "raise RuntimeError('imported')\n"
        "try:\n    from math import floor as compute_score\nexcept ImportError:\n    compute_score = None\n"
    )
    sys.path.insert(0, str(project.folder))
    try:
        assert project.report("roles.reward.function=rewards.sums") == Report()
        assert project.report("roles.reward.function=rewards.sums:other").errors == (
            f"roles.reward.function: rewards.sums:other: {project.folder}/rewards/sums.py does not define other: "
            "it defines compute_score",
        )
    finally:
        sys.path.remove(str(project.folder))


def test_models_of_their_own(project: Project) -> None:
    write_model(project.folder / "other", vocab_size=90, max_position_embeddings=20, num_key_value_heads=1)
    assert project.report("roles.reference.model=other", "roles.critic.model=other").errors == (
        "roles.critic.model: other has a vocabulary of 90 tokens, the actor's has 100: "
        "give a model with the actor's tokenizer",
        "roles.reference.model: other has a vocabulary of 90 tokens, the actor's has 100: "
        "give a model with the actor's tokenizer",
        "roles.reference.tp: 2 is more than 1 key/value head (training does not replicate them): legal are 1",
        "data.max_response: 16 plus max_prompt 16 is more than the 20 positions of other: lower one by 12",
    )


def test_critic_needs_no_language_model_head(project: Project) -> None:
    write_model(project.folder / "value", tie_word_embeddings=False)
    shapes = dict(read_model_spec(project.folder / "value").hf_shapes())
    del shapes["lm_head.weight"]
    write_safetensors(project.folder / "value/model.safetensors", {**shapes, "score.weight": (1, 32)})
    assert project.report("roles.critic.model=value") == Report()
    assert project.report("roles.reference.model=value").errors == (
        "roles.reference.model: value: its weights lack lm_head.weight: "
        "give the config.json that the weights belong to",
    )


def _begin_run(project: Project, step: int) -> None:
    (project.folder / f"run/checkpoints/step_{step}").mkdir(parents=True)
    (project.folder / "run/config.yaml").write_text(dump_config(load_config("config.yaml")))


def test_resuming(project: Project) -> None:
    _begin_run(project, step=5)
    assert project.report() == Report()
    assert project.report("roles.actor={pool: train, tp: 4}", "ppo.actor_lr=1e-5", "run.steps=20") == Report()
    assert project.report(f"model={project.folder}/model") == Report(), "the same folder by another path"
    assert project.report("run.seed=2", "ppo.mini_batch=8", "data.train=[validation.parquet]").errors == (
        "run.seed: 2 differs from 1, with which the run in run began: set it back, or choose another run.dir",
        "data.train: validation.parquet differs from train.parquet, with which the run in run began: "
        "set it back, or choose another run.dir",
        "ppo.mini_batch: 8 differs from 16, with which the run in run began: set it back, or choose another run.dir",
    )
    assert project.report("run.steps=5").warnings == (
        "run.steps: 5 steps are done, as run has a checkpoint of step 5: raise run.steps, or choose another run.dir",
    )


def test_run_without_a_checkpoint_may_change(project: Project) -> None:
    _begin_run(project, step=5)
    (project.folder / "run/checkpoints/step_5").rename(project.folder / "run/checkpoints/step_5.partial")
    assert project.report("run.seed=2") == Report()


def test_unreadable_stored_configuration(project: Project) -> None:
    _begin_run(project, step=5)
    (project.folder / "run/config.yaml").unlink()
    assert project.report().errors == (
        "run.dir: run holds checkpoints of a run that cannot be read "
        "(run/config.yaml: no such file: give the path of a YAML file): choose another",
    )


def test_unwritable_run_folder(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root, as which tests may run, may write everywhere
    assert project.report("run.dir=runs/a").errors == (
        f"run.dir: runs/a: {project.folder} is not writable: choose another folder, or change its permissions",
    )


def test_everything_comes_out_together(project: Project) -> None:
    """Mistakes in the file and in what it names, in one go; what a refused value drags along is not repeated."""
    (project.folder / "train.parquet").unlink()
    project.edit("reference:", "refrence:")
    project.edit("tp: 2, pp: 2", "tp: 3, pp: 2")
    config, report = check_file("config.yaml", ["ppo.lam=2", "ppo.mini_batch=64"])
    assert config is None
    assert report.errors == (
        "roles.refrence: unknown key: did you mean roles.reference?",
        "ppo.lam: 2 is out of range: give a number >= 0 and <= 1 (lambda of generalised advantage estimation)",
        "data.train: train.parquet: no such file: give the path of a parquet file",
        "roles.actor.tp: 3 does not divide 8 attention heads and does not divide 4 key/value heads: legal are 1, 2, 4",
        "roles.actor.tp: 3 times pp 2 does not divide the 4 devices of the pool: legal tp * pp are 1, 2, 4",
        "ppo.mini_batch: 64 is more than the 32 responses of a step (data.prompts_per_step * "
        "roles.rollout.samples_per_prompt): give at most 32",
    )


# ---- The command line ----------------------------------------------------------------------------------------------


def command(folder: Path, *arguments: str, flags: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    package = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": str(package)}
    line = [sys.executable, *flags, "-m", "megappo", *arguments]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


TABLE = """\
role       pool   devices  tp  pp  dp  model
actor      train  4        2   2   1   model
critic     value  2        1   2   1   model
reference  value  2        2   1   1   model
rollout    serve  2        1   1   2   model
"""


def test_command_check(project: Project) -> None:
    done = command(project.folder, "check", "config.yaml")
    assert (done.returncode, done.stdout, done.stderr) == (0, TABLE, "")


def test_command_check_is_quick_and_imports_nothing_heavy(project: Project) -> None:
    command(project.folder, "check", "config.yaml")  # the first call may compile
    start = time.perf_counter()
    assert command(project.folder, "check", "config.yaml").returncode == 0
    assert time.perf_counter() - start < 2
    done = command(project.folder, "check", "config.yaml", flags=["-X", "importtime"])
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert {"megappo", "yaml", "pyarrow"} <= imported, "the list of imports is what it should be"
    assert imported.isdisjoint(HEAVY)


def test_check_imports_nothing_heavy_with_a_tracker(project: Project) -> None:
    code = (
        "import sys; from megappo.cli import main; status = main(['check', 'config.yaml', "
        f"'run.trackers=[tensorboard]']); print(status, sorted(set(sys.modules) & set({HEAVY!r})))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize("word", ["check", "train"])
def test_command_refuses(project: Project, word: str) -> None:
    arguments = (word, "config.yaml", "roles.rollout.tp=3", "pools.extra.devices_per_node=1", "ppo.mini_batch=99")
    done = command(project.folder, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "warning: pools.extra: no role uses it: leave it out, or name it as a role's pool",
        "error: roles.rollout.tp: 3 does not divide 8 attention heads and neither divides nor is a multiple of "
        "4 key/value heads and does not divide 128 padded vocabulary rows: legal are 1, 2, 4, 8",
        "error: roles.rollout.tp: an engine of 3 devices does not fit in a node of 2: legal are 1, 2",
        "error: ppo.mini_batch: 99 is more than the 32 responses of a step (data.prompts_per_step * "
        "roles.rollout.samples_per_prompt): give at most 32",
    ]


def test_command_train_passes_the_configuration_on(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    monkeypatch.setitem(sys.modules, "megappo.trainer", SimpleNamespace(train=trained.append))
    assert main(["train", "config.yaml", "run.steps=7"]) == 0
    assert trained == [load_config("config.yaml", ["run.steps=7"])]


def test_command_shows_our_own_errors_without_a_traceback(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raising(error: Exception) -> None:
        def train(config: Config) -> None:
            raise error

        monkeypatch.setitem(sys.modules, "megappo.trainer", SimpleNamespace(train=train))

    raising(ModelError(["one", "two"]))
    assert main(["train", "config.yaml"]) == 2
    assert capsys.readouterr().err == "error: one\nerror: two\n"
    raising(KeyError("a fault of the program"))
    with pytest.raises(KeyError):
        main(["train", "config.yaml"])


def test_command_config_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    assert "run.steps: required\n    training steps in all (an integer >= 1)\n" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert re.fullmatch(r"megappo \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_command_data_arithmetic(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "arithmetic", "out", "--train", "30", "--validation", "7", "--seed", "3"]) == 0
    assert capsys.readouterr().out == "out/train.parquet\nout/validation.parquet\n"
    assert pq.read_metadata("out/train.parquet").num_rows == 30
    assert project.report("data.train=out/train.parquet", "data.validation=out/validation.parquet") == Report()
    assert main(["data", "arithmetic", "out", "--train", "0"]) == 2
    assert capsys.readouterr().err.startswith("error: train=0, ")


def test_command_report_of_no_run(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "run"]) == 2
    assert capsys.readouterr().err == "error: run: has no log.jsonl: give the folder of a run (run.dir)\n"
