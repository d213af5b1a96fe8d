"""The check before a run, of files: models, prompts, rewards and the run folder."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_project import MODEL, REPLAY, Project, make_project, write_model, write_prompts, write_safetensors

from megappo.check import Report, check_file
from megappo.models.spec import read_model_spec


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    return make_project(tmp_path)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _index(folder: Path, shards: Sequence[str]) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    names = read_model_spec(folder).hf_shapes()
    files = {name: shards[number % len(shards)] for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "unknown family": (
        lambda at: (at / "model/config.json").write_text('{"model_type": "gpt2"}'),
        "model: FOLDER/model/config.json: model_type 'gpt2' is not a family we know: known are llama, mixtral, qwen2, "
        "qwen3, qwen3_moe",
    ),
    "no tokenizer": (
        lambda at: [path.unlink() for path in (at / "model").glob("tokenizer*")],
        "model: FOLDER/model: has no tokenizer: add tokenizer.json, or tokenizer_config.json and its vocabulary",
    ),
    "no vocabulary": (
        lambda at: (at / "model/tokenizer.json").unlink(),
        "model: FOLDER/model: its tokenizer has no vocabulary: add tokenizer.json or one of vocab.json, vocab.txt, "
        "tokenizer.model, spiece.model",
    ),
    "no weights": (
        lambda at: (at / "model/model.safetensors").unlink(),
        "model: FOLDER/model: has no weights: add model.safetensors, or model.safetensors.index.json and its shards",
    ),
    "truncated weights": (
        lambda at: _truncate(at / "model/model.safetensors"),
        "model: FOLDER/model/model.safetensors: cannot be read as safetensors (494590 bytes instead of 494600): "
        "copy it again",
    ),
    "weights that are a text": (
        lambda at: (at / "model/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1"),
        "model: FOLDER/model/model.safetensors: cannot be read as safetensors (a pointer of Git LFS: git lfs "
        "pull): copy it again",
    ),
    "missing shards": (
        lambda at: _index(at / "model", ["a.safetensors", "b.safetensors", "c.safetensors"]),
        "model: FOLDER/model/model.safetensors.index.json: of 3 files that it names, there is no b.safetensors and 1 "
        "more: add what is missing",
    ),
    "weights of another depth": (
        lambda at: (at / "model/config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": 5})),
        "model: FOLDER/model: its weights lack model.layers.4.input_layernorm.weight and 11 more: "
        "give the config.json that the weights belong to",
    ),
    "weights of another size": (
        lambda at: (at / "model/config.json").write_text(json.dumps({**MODEL, "vocab_size": 120})),
        "model: FOLDER/model: model.embed_tokens.weight has shape [100, 32] where config.json asks for [120, 32]: "
        "give the config.json that the weights belong to",
    ),
    "no end of text": (
        lambda at: (at / "model/config.json").write_text(json.dumps({**MODEL, "eos_token_id": None})),
        "model: FOLDER/model: has no end-of-text token, so that responses would never stop: give eos_token_id in "
        "generation_config.json or config.json, or eos_token in tokenizer_config.json",
    ),
    "broken generation config": (
        lambda at: (at / "model/generation_config.json").write_text("{"),
        "model: FOLDER/model/generation_config.json: holds no JSON object: write or download it again",
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
    "JSON lines": (
        lambda at: (at / "train.parquet").write_text('{"prompt": "1+1="}\n{"prompt": "1+2="}\n'),
        "data.train: train.parquet: is JSON, not parquet: write it with pyarrow.parquet.write_table("
        "pyarrow.Table.from_pylist([*map(json.loads, open('train.parquet'))]), 'train.parquet')",
    ),
    "no chat template": (
        lambda at: write_prompts(at / "train.parquet", prompt=[{"role": "user", "content": "1+1?"}]),
        "data.train: train.parquet: its prompts are chat messages, and FOLDER/model has no chat template: "
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
    assert project.report().errors == (message.replace("FOLDER", str(project.folder)),)


def test_weights_in_several_forms(project: Project) -> None:
    """Which transformers and vLLM read from different files are an error; pickles that nobody reads are a warning."""
    folder = project.folder / "model"
    (folder / "pytorch_model.bin").touch()
    (warning,) = project.report().warnings
    assert warning.startswith(f"model: {folder}: pytorch_model.bin is not read, since there are safetensors: remove it")
    assert project.report().errors == ()
    (folder / "a.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "a.safetensors"}}')
    (error,) = project.report().errors
    assert error.startswith(f"model: {folder}: has model.safetensors, which transformers reads, and model.safetensors.")


def test_good_variants(project: Project) -> None:
    """What must not be refused: shards, a vocabulary file, a chat template, optional columns, roles sharing a pool."""
    _index(project.folder / "model", ["a.safetensors"])
    (project.folder / "model/tokenizer.json").rename(project.folder / "model/vocab.json")
    (project.folder / "model/chat_template.jinja").write_text("{{ messages }}")
    write_prompts(project.folder / "train.parquet", drop="extra_info", prompt=[{"role": "user", "content": "1+1?"}])
    # In three stages the 4 layers are uneven; 5 responses divide nothing.
    project.edit("{pool: value, pp: 2}", "{pool: train, tp: 4}")
    assert project.report("pools.value.devices_per_node=6", "roles.reference.pp=3", "ppo.mini_batch=5") == Report()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{**REPLAY, "response_ids": [5, 100]}], ", row 0 (counting from 0): token 100 of the response is not in the"),
        ([{**REPLAY, "prompt_ids": [5] * 63}], ", row 0 (counting from 0): 65 tokens are more than the 64 that every"),
        ([REPLAY, REPLAY], ", row 1 (counting from 0): repeats an id, 1: number the rows anew"),
        ([{"prompt": "1+2="}], ": has no column id, prompt_index, data_source, ground_truth, prompt_text, prompt_ids,"),
        ([], ": no such file: give a rollouts/step_N.parquet, or what megappo score wrote"),
    ],
)
def test_every_replay_is_read(project: Project, rows: list[dict[str, object]], message: str) -> None:
    pq.write_table(pa.Table.from_pylist([REPLAY]), "good.parquet")
    if rows:
        pq.write_table(pa.Table.from_pylist(rows), "bad.parquet")
    assert project.report("run.steps=1", "data.replay=good.parquet") == Report()
    (error,) = project.report("run.steps=2", "data.replay=[good.parquet, bad.parquet]").errors
    assert error.startswith(f"data.replay: bad.parquet{message}")


def test_a_replay_without_what_the_estimator_takes(project: Project) -> None:
    pq.write_table(pa.Table.from_pylist([REPLAY]), "good.parquet")
    overrides = ("run.steps=1", "data.replay=good.parquet", "roles.critic=null", "ppo.estimator=remax")
    assert project.report(*overrides, "ppo.overlong.buffer=2").errors == (
        "data.replay: good.parquet: has no column baseline, baseline_failed, baseline_tokens, of greedy responses, "
        "which ppo.estimator remax takes: give batches that such a run dumped, or choose another estimator",
    )


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


@pytest.mark.parametrize(
    ("definition", "problem"),
    [
        ("def score(a, b): return 0", "takes (a, b) ("),
        ("def score(data_source, solution_str, ground_truth): return 0", "unexpected keyword argument 'extra_info'"),
        ("def score(data_source, solution_str, ground_truth, extra_info, more): return 0", "argument: 'more'"),
        ("def score(solution_str, /, **more): return 0", "'solution_str'"),
        ("async def score(**all): return 0", "is async"),
        ("def score(**all): return 0", ""),
        ("def score(solution_str, more=1, *, other=None, **rest): return 0", ""),
        ("def score(data_source, solution_str, ground_truth, extra_info=None, *, sandbox): return 0", ""),
        ("from functools import cache\n@cache\ndef score(a, b): return 0", ""),
        ("def score(a): return 0\ndef score(**all): return 0", ""),
    ],
)
def test_arguments_of_reward_functions(project: Project, definition: str, problem: str) -> None:
    (project.folder / "own.py").write_text(f"raise RuntimeError('imported')\n{definition}\n")
    errors = project.report("roles.reward.function=own.py:score", "run.dir=runs/a").errors
    assert len(errors) == bool(problem) and problem in "".join(errors)
    if problem:
        wanted = "it must be callable as compute_score(data_source, solution_str, ground_truth, extra_info)"
        assert errors[0].startswith("roles.reward.function: own.py:score: ") and wanted in errors[0]


def test_models_of_their_own(project: Project) -> None:
    write_model(project.folder / "other", vocab_size=90, max_position_embeddings=20, num_key_value_heads=1)
    assert project.report("roles.reference.model=other", "roles.critic.model=other").errors == (
        "roles.critic.model: other has a vocabulary of 90 tokens, the actor's has 100: "
        "give a model with the actor's tokenizer",
        "roles.reference.model: other has a vocabulary of 90 tokens, the actor's has 100: "
        "give a model with the actor's tokenizer",
        "roles.reference.tp: 2 is more than 1 key/value head (training does not replicate them): legal are 1",
        "data.max_response: 16 plus max_prompt 16 is more than the 20 positions of "
        f"{project.folder}/other: lower one by 12",
    )


def test_critic_needs_no_language_model_head(project: Project) -> None:
    write_model(project.folder / "value", tie_word_embeddings=False)
    shapes = dict(read_model_spec(project.folder / "value").hf_shapes())
    del shapes["lm_head.weight"]
    write_safetensors(project.folder / "value/model.safetensors", {**shapes, "score.weight": (1, 32)})
    assert project.report("roles.critic.model=value") == Report()
    assert project.report("roles.reference.model=value").errors == (
        f"roles.reference.model: {project.folder}/value: its weights lack lm_head.weight: "
        "give the config.json that the weights belong to",
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
