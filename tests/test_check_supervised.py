"""`megappo check --for reward-train|sft`: every mistake with its fix, from a good configuration on."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_project import write_model

from megappo.check.supervised import check_supervised_file
from megappo.check.unused import SUPERVISED
from megappo.cli import main

CONFIG = """\
run: {dir: run, steps: 10, device: cpu}
model: model
data: {train: pairs.parquet, validation: pairs.parquet, batch: 8, max_tokens: 32}
pools: {train: {devices_per_node: 4}}
role: {pool: train, tp: 2}
lr: 1.0e-5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "chosen": "b", "rejected": "c"}]), "pairs.parquet")
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def test_a_good_configuration(folder: Path) -> None:
    config, errors, warnings = check_supervised_file("config.yaml", (), "reward-train")
    assert config is not None and not errors and not warnings


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=none", "model: FOLDER/none: no such folder: give the path of a Hugging Face model folder"),
        ("role.pool=value", "role.pool: 'value' is not a pool: pools are train"),
        ("role.pp=3", "role.tp: 2 times pp 3 does not divide the 4 devices of the pool"),
        ("role.tp=3", "role.tp: 3 does not divide 8 attention heads"),
        (
            "role.micro_batch_tokens=63",
            "role.micro_batch_tokens: 63 does not hold a pair of two sequences of data.max_tokens 32: give at least 64",
        ),
        ("data.max_tokens=65", "data.max_tokens: 65 is more than the 64 positions of FOLDER/model: give at most 64"),
        ("data.train=[]", "data.train: empty: give at least one parquet file"),
        ("data.train=none.parquet", "data.train: none.parquet: no such file: give the path of a parquet file"),
        ("pools.value={devices_per_node: 1}", "pools.value: is not the pool of the one role, train: leave it out"),
        ("role.fp8=blockwise", "role.fp8: blockwise needs CUDA and bfloat16"),
        (
            "role.lora.targets=[lm_head]",
            "role.lora.targets: 'lm_head' is no linear layer to adapt: known for qwen2 are",
        ),
        ("data.batches=4", "data.batches: unknown key: did you mean data.batch?"),
    ],
)
def test_mistakes(folder: Path, override: str, message: str) -> None:
    _, errors, _ = check_supervised_file("config.yaml", (override,), "reward-train")
    assert any(line.startswith(message.replace("FOLDER", str(folder))) for line in errors), errors


def test_what_leaves_the_device_for_nobody(folder: Path) -> None:
    _, errors, (line,) = check_supervised_file("config.yaml", ("role.offload=all",), "reward-train")
    assert line == "role.offload: all costs time and makes room for nobody, as no other role is there: set none"
    assert not errors


def test_mistakes_come_out_together(folder: Path) -> None:
    _, errors, _ = check_supervised_file("config.yaml", ("run.nope=1", "role.tp=3", "data.train=[]"), "reward-train")
    assert [line.split(":")[0] for line in errors] == ["run.nope", "role.tp", "role.tp", "data.train"], errors


def test_columns_are_the_tasks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "config.yaml", "--for", "reward-train"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["role", "pool", "devices", "tp", "pp", "dp", "model"]
    assert row.split() == ["role", "train", "4", "2", "1", "2", str(folder / "model")]
    assert main(["check", "config.yaml", "--for", "sft"]) == 2
    assert "data.train: pairs.parquet: has no column response" in capsys.readouterr().err


def test_a_configuration_of_train_is_one_error(folder: Path) -> None:
    (folder / "ppo.yaml").write_text("run: {dir: run}\nroles: {}\nppo: {}\n")
    _, errors, _ = check_supervised_file("ppo.yaml", (), "sft")
    assert errors == ("ppo.yaml: this is a configuration of train: megappo check ppo.yaml",)


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"chosen": 3}, "chosen holds whole numbers: it must hold strings: write it again"),
        ({"rejected": ["c"]}, "rejected holds lists of strings: it must hold strings: write it again"),
        ({"margin": "large"}, "margin holds strings: it must hold numbers: write it again"),
        ({"margin": True}, "margin holds bool: it must hold numbers: write it again"),
        ({"prompt": 1.5}, "prompt holds numbers: it must hold strings, or chat messages: write it again"),
    ],
)
def test_columns_of_another_kind(folder: Path, wrong: dict[str, object], message: str) -> None:
    pq.write_table(pa.Table.from_pylist([{**PAIR, "margin": 1, **wrong}]), "wrong.parquet")
    _, errors, _ = check_supervised_file("config.yaml", ("data.train=wrong.parquet",), "reward-train")
    assert errors == (f"data.train: wrong.parquet: {message}",)


def test_a_column_that_comes_twice(folder: Path) -> None:
    table = pa.Table.from_pylist([PAIR])
    pq.write_table(table.append_column("chosen", table["rejected"]), "wrong.parquet")
    _, errors, _ = check_supervised_file("config.yaml", ("data.train=wrong.parquet",), "reward-train")
    assert errors == ("data.train: wrong.parquet: has chosen twice: keep one column of each name",)


def test_responses_of_another_kind(folder: Path) -> None:
    for name, response in (("good", "2"), ("wrong", 2)):
        pq.write_table(pa.Table.from_pylist([{"prompt": "1+1=", "response": response}]), f"{name}.parquet")
    _, errors, _ = check_supervised_file(
        "config.yaml", ("data.train=good.parquet", "data.validation=wrong.parquet"), "sft"
    )
    message = "response holds whole numbers: it must hold strings: write it again"
    assert errors == (f"data.validation: wrong.parquet: {message}",)


def test_keys_without_effect(folder: Path) -> None:
    given = {"run.validate_every": "2", "run.validate_before": "false", "run.peak_tflops": "9.0", "run.restarts": "3"}
    given |= {"run.dump_rollouts": "false", "run.upload_timeout_s": "9.0", "optimizer.min_lr_ratio": "0.5"}
    assert given.keys() == SUPERVISED.keys()
    overrides = (*(f"{key}={value}" for key, value in given.items()), "data.validation=[]")
    _, errors, warnings = check_supervised_file("config.yaml", overrides, "reward-train")
    assert not errors
    assert [line.partition(" has no effect")[0] for line in warnings] == [f"{key}: {given[key]}" for key in given]


def test_resuming_with_other_data(folder: Path) -> None:
    checkpoint = folder / "run" / "checkpoints" / "step_2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer.json").write_text(json.dumps({"step": 2}))
    (folder / "run" / "config.yaml").write_text(CONFIG)
    _, errors, _ = check_supervised_file("config.yaml", ("data.batch=4", "role.pp=2"), "reward-train")
    assert errors == (
        "data.batch: 4 differs from 8, with which the run in run began: set it back, or choose another run.dir",
    )
