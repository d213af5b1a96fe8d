"""Conversion in both directions: byte-exact, loadable by the real systems, clear about bad input."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny import LLAMA3_ROPE, make_model, random_rows

from megappo.cli import main
from megappo.convert import destination, share
from megappo.convert.command import convert
from megappo.convert.options import Options
from megappo.convert.to_megatron import ToMegatron
from megappo.formats.torch_dist import read_chunks
from megappo.layout.mesh import Layout
from megappo.models.spec import ModelError

VOCABULARY = 70
"""Padded to 72 rows by Megatron for one rank, to 80 for two."""


@pytest.fixture(autouse=True)
def unfrozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command freezes what is imported, as it is about to end; this process goes on."""
    monkeypatch.setattr("gc.freeze", lambda: None)


def make(folder: Path, family: str = "qwen2", **changes: Any) -> Path:
    """A model folder with all that belongs to one; its weights in bfloat16."""
    make_model(folder, family, **{"num_hidden_layers": 2, "vocab_size": VOCABULARY, **changes})
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "special_tokens_map.json"):
        (folder / name).write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def run(source: Path, target: Path, **options: Any) -> list[str]:
    said: list[str] = []
    convert(source, target, Options(**options), said.append)
    return said


def weights(folder: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        out.update(load_file(path))
    return out


def assert_same_weights(a: Path, b: Path) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


def problems(source: Path, target: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        run(source, target, **options)
    assert not target.exists() and not target.with_name(target.name + ".partial").exists()
    return str(caught.value)


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_there_and_back_is_byte_exact(tmp_path: Path, family: str, tied: bool) -> None:
    """Cut for other ranks on the way, in chunks of a few rows, by two processes; every file comes back as it was."""
    folder = make(tmp_path / "model", family, tie_word_embeddings=tied)
    run(folder, tmp_path / "checkpoint", tp=2, pp=2, processes=2)
    run(tmp_path / "checkpoint", tmp_path / "back", processes=2)
    assert len(list((tmp_path / "checkpoint").glob("__*.distcp"))) == 4
    names = {path.name for path in folder.iterdir()}
    assert {path.name for path in (tmp_path / "back").iterdir()} == {*names, destination.RECORD}
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "back" / name).read_bytes(), name


def test_moving_bytes_takes_no_torch(tmp_path: Path) -> None:
    """Its import takes longer than the conversion of many a model."""
    folder = make(tmp_path / "model")
    script = (
        "import sys\n"
        "from megappo.cli import main\n"
        "model, checkpoint, back = sys.argv[1:]\n"
        "assert main(['convert', model, checkpoint, '--tp', '2']) == main(['convert', checkpoint, back]) == 0\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    arguments = [str(folder), str(tmp_path / "checkpoint"), str(tmp_path / "back")]
    subprocess.run([sys.executable, "-c", script, *arguments], env=environment, check=True)
    assert_same_weights(folder, tmp_path / "back")


def test_files_for_a_virtual_pipeline(tmp_path: Path) -> None:
    """Each stage's files have the layers of all its chunks."""
    folder = make(tmp_path / "model", num_hidden_layers=4)
    work = ToMegatron(folder, None, Layout(pp=2, vpp=2), 2**20)
    layers = {(int(part.file.split("_")[2]), part.tensor.layer) for part in work.parts if part.tensor.layer is not None}
    assert layers == {(0, 0), (0, 2), (1, 1), (1, 3)}
    run(folder, tmp_path / "checkpoint", pp=2, vpp=2)
    run(tmp_path / "checkpoint", tmp_path / "back")
    assert_same_weights(folder, tmp_path / "back")


def test_one_folder_in_other_forms(tmp_path: Path) -> None:
    """Shards have a limit; another dtype is rounded once, and said in the config."""
    folder = make(tmp_path / "model")
    run(folder, tmp_path / "checkpoint", dtype="float32")
    run(tmp_path / "checkpoint", tmp_path / "back", shard_gb=2e-5, dtype="float16")
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    source, back = weights(folder), weights(tmp_path / "back")
    assert index["weight_map"].keys() == back.keys() == source.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in back.values())
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors" and len(files) > 3
    assert all(sum(tensor.nbytes for tensor in load_file(path).values()) <= 2e4 for path in files)
    assert all(torch.equal(back[name], tensor.half()) for name, tensor in source.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float16"


def load_and_save(checkpoint: str, folder: str, layout: Layout, critic: bool, saved: str) -> list[Any]:
    """A real role reads a checkpoint over other weights, and writes its own; returns its outputs on random rows."""
    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.settings import RoleSettings

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] (Megatron forks)
    role = MegatronRole(RoleSettings(folder, layout, "float32", 64, critic))
    role.load(checkpoint)
    role.save(saved)
    rows = random_rows(2, vocab=VOCABULARY)
    table = role.values(rows) if critic else role.logprobs(rows, column="logprobs", temperature=1.0)
    return [] if table is None else table.sort_by("id")["values" if critic else "logprobs"].to_pylist()


def expected_outputs(folder: Path, critic: bool) -> list[Any]:
    """The same from transformers, which must find every tensor and no other."""
    import transformers

    kind = transformers.AutoModelForTokenClassification if critic else transformers.AutoModelForCausalLM
    model, info = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert set(info["missing_keys"]) <= {"score.bias"} and not info["unexpected_keys"] and not info["mismatched_keys"]
    out = []
    for row in random_rows(2, vocab=VOCABULARY).sort_by("id").to_pylist():
        tokens = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            logits = model(tokens).logits[0, len(row["prompt_ids"]) - 1 : -1]
        if critic:
            out.append(logits[:, 0].tolist())
        else:
            out.append(logits.log_softmax(-1).gather(-1, tokens[0, len(row["prompt_ids"]) :, None])[:, 0].tolist())
    return out


@pytest.mark.parametrize(
    ("family", "changes", "critic", "layout"),
    [
        ("qwen2", {"tie_word_embeddings": True, "num_hidden_layers": 3}, False, Layout(tp=2, pp=2)),
        ("qwen3", {}, False, Layout(tp=2)),
        ("llama", {"rope_parameters": LLAMA3_ROPE}, True, Layout(pp=2)),
    ],
)
def test_megatron_and_transformers_read_what_was_written(
    tmp_path: Path, family: str, changes: dict[str, Any], critic: bool, layout: Layout
) -> None:
    """HF -> checkpoint -> Megatron at a layout of its own -> its checkpoint -> HF -> transformers."""
    folder = make(tmp_path / "model", family, **changes)
    if critic:
        tensors = load_file(folder / "model.safetensors")
        del tensors["lm_head.weight"]
        tensors["score.weight"] = torch.randn(1, 64).bfloat16()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    other = str(make(tmp_path / "other", family, seed=1, **changes))
    run(folder, tmp_path / "checkpoint", tp=1 if layout.tp == 2 else 2)
    saved = str(tmp_path / "saved")
    ranks = run_ranks(layout.world, load_and_save, str(tmp_path / "checkpoint"), other, layout, critic, saved)
    run(Path(saved), tmp_path / "back", model=str(folder), dtype="bfloat16")
    assert_same_weights(folder, tmp_path / "back")
    (ours,) = [outputs for outputs in ranks if outputs]
    for a, b in zip(ours, expected_outputs(tmp_path / "back", critic), strict=True):
        assert a == pytest.approx(b, abs=2e-4)


def test_a_run_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's folder means its last checkpoint; the model is the one of its configuration."""
    from small_project import make_project

    monkeypatch.chdir(tmp_path)
    make_project(tmp_path).edit("model: model", "model: weights")
    folder = make(tmp_path / "weights")
    run(folder, tmp_path / "checkpoint")
    shutil.rmtree(tmp_path / "checkpoint/huggingface")
    for step in (1, 10):
        held = tmp_path / "run/checkpoints" / f"step_{step}"
        shutil.copytree(tmp_path / "checkpoint", held / "critic")
        (held / "trainer.json").write_text("{}")  # without which it is not complete
    shutil.copy("config.yaml", "run/config.yaml")
    (tmp_path / "run/checkpoints/step_1/critic/.metadata").unlink()
    run(tmp_path / "run", tmp_path / "back", role="critic")
    assert_same_weights(folder, tmp_path / "back")
    assert "has no weights of --role actor: it has those of critic" in problems(tmp_path / "run", tmp_path / "b2")


# --- verification ---------------------------------------------------------------------------------------------------


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, checkpoint = make(tmp_path / "model"), tmp_path / "checkpoint"
    assert main(["convert", str(folder), str(checkpoint), "--tp", "2", "--verify"]) == 0
    out = capsys.readouterr().out
    assert "verified: all 27 tensors are equal, element by element; logits on random tokens differ by at most " in out
    stored = read_chunks(checkpoint)[1][0].stored(checkpoint)[0]
    content = bytearray(stored.path.read_bytes())
    content[stored.position + 100] ^= 1
    stored.path.write_bytes(content)
    assert main(["convert", str(folder), str(checkpoint), "--tp", "2", "--verify"]) == 1
    assert "error: 1 tensors differ between" in capsys.readouterr().err
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": "x"}))
    assert main(["convert", str(folder), str(tmp_path / "other"), "--verify"]) == 1
    said = capsys.readouterr().err
    assert f"error: weights of {folder} and {tmp_path}/other are equal, but the model cannot be run (" in said
    assert said.endswith("): mend config.json, or leave out --verify\n") and "attention_dropout" in said


# --- bad input ------------------------------------------------------------------------------------------------------


def test_every_problem_of_a_folder_at_once(tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(96, 63)
    tensors["visual.weight"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors")
    text = problems(folder, tmp_path / "checkpoint")
    assert "tensor model.norm.weight [64] is missing" in text
    assert "tensor model.layers.1.mlp.up_proj.weight has shape [96, 63], config.json says [96, 64]" in text
    assert "tensor visual.weight is not part of this family" in text


def test_a_type_that_no_weight_has(tmp_path: Path) -> None:
    """Said of every tensor that is needed; one that nobody needs is in nobody's way."""
    folder = make(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4, dtype=torch.uint16)}
    save_file({**tensors, **rotary}, folder / "model.safetensors")
    run(folder, tmp_path / "checkpoint")
    names = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, **{name: tensors[name].view(torch.uint16) for name in names}}, folder / "model.safetensors")
    text = problems(folder, tmp_path / "other")
    assert all(f"tensor {name} is U16: give 16- or 32-bit floats" in text for name in names)


def test_every_problem_of_a_checkpoint_at_once(tmp_path: Path) -> None:
    """A checkpoint under the config of another model."""
    run(make(tmp_path / "model"), tmp_path / "checkpoint")
    other = make(tmp_path / "other", "qwen3", tie_word_embeddings=True, num_hidden_layers=3, vocab_size=90)
    text = problems(tmp_path / "checkpoint", tmp_path / "back", model=str(other))
    qkv = "decoder.layers.self_attention.linear_qkv"
    for part in (
        f"tensor {qkv}.bias is not part of the model in {other}/config.json",
        f"tensor {qkv}.weight has shape [2, 128, 64], {other}/config.json says [3, 256, 64]",
        "tensor decoder.layers.self_attention.q_layernorm.weight [3, 32] is missing",
        "tensor embedding.word_embeddings.weight has shape [72, 64]",
        "tensor output_layer.weight is not part of",
        "give the config that the checkpoint belongs to with --model",
    ):
        assert part in text


def test_wrong_folders_are_named_with_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, checkpoint, out = make(tmp_path / "model"), tmp_path / "checkpoint", tmp_path / "out"
    run(folder, checkpoint)
    mixture = make(tmp_path / "mixture", "mixtral")
    (tmp_path / "old" / "mp_rank_00").mkdir(parents=True)
    (peft := tmp_path / "peft").mkdir()
    (peft / "adapter_config.json").write_text("{}")
    shutil.copytree(checkpoint, tmp_path / "cut")
    (tmp_path / "cut" / ".metadata").unlink()
    shutil.copytree(checkpoint, tmp_path / "alone")
    shutil.rmtree(tmp_path / "alone" / "huggingface")
    for source, options, words in (
        (tmp_path / "none", {}, "no such folder: give a Hugging Face folder, a Megatron checkpoint or a run"),
        (folder / "config.json", {}, "model/config.json: is a file: give the folder that it is in"),
        (peft, {}, "peft: holds adapters (PEFT), and not the model that they belong to: merge them into their model"),
        (folder, {"role": "critic"}, "--role critic: "),
        (folder, {"model": "x"}, "is a Hugging Face folder, with one model and a config: leave it out"),
        (tmp_path, {}, "is no model: give a Hugging Face folder"),
        (tmp_path / "old", {}, "is Megatron's old format"),
        (tmp_path / "cut", {}, "has no .metadata, so it is no complete checkpoint"),
        (tmp_path / "alone", {}, "does not say which model it is: give the model's Hugging Face folder with --model"),
        (folder, {"to": "hf"}, "is in that format already: give --to megatron"),
        (folder, {"ep": 2}, "--ep, --etp: qwen2 has no experts: leave them out"),
        (mixture, {"ep": 3}, "--ep: 3 does not divide 4 experts: legal are 1, 2, 4"),
        (mixture, {"etp": 5}, "--etp: 5 does not divide 96 MLP columns of an expert: legal are 1, 2, 3, 4, 6, 8,"),
        (mixture, {"etp": 0}, "--etp 0: must be positive"),
        (folder, {"tp": 3}, "--tp: 3 does not divide 4 attention heads"),
        (folder, {"pp": 3}, "--pp: 3 stages cannot share 2 layers: legal are 1 to 2"),
        (folder, {"tp": 0}, "--tp 0: must be positive"),
        (folder, {"vpp": 2}, "--vpp 2: chunks are of several pipeline stages: leave it out, or raise --pp"),
        (folder, {"pp": 2, "vpp": 2}, "--vpp: 2 chunks of each of 2 stages cannot share 2 layers"),
        (checkpoint, {"tp": 2}, "--tp 2: is the layout of a checkpoint's files, and DST will be a Hugging Face folder"),
    ):
        assert words in problems(source, out, **options)
    assert "lies in" in problems(folder, folder / "inside")
    for name in ("step_40", "step_60", "step_70.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "trainer.json").write_text("{}")
    gone = problems(tmp_path / "checkpoints" / "step_20", out)
    assert gone.endswith("step_20: is not there (old ones go, see run.keep_checkpoints): there are step_40, step_60")
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "none"), str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'none'}: no such folder")


def test_a_full_disk_is_seen_before_work_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "model")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))  # type: ignore[attr-defined]
    assert "its disk has 5e-09 GB free: make room" in problems(folder, tmp_path / "checkpoint")


def test_a_checkpoint_file_that_is_cut_short(tmp_path: Path) -> None:
    run(make(tmp_path / "model"), tmp_path / "checkpoint")
    (file,) = (tmp_path / "checkpoint").glob("*.distcp")
    os.truncate(file, file.stat().st_size // 2)
    assert f"{file}: cannot be read at byte" in problems(tmp_path / "checkpoint", tmp_path / "back")


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("direction", ["to megatron", "to hf"])
def test_a_source_that_can_no_longer_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: str, processes: int
) -> None:
    """It was whole when looked at, and shrank or went while its values were copied."""
    folder = make(tmp_path / "model")
    run(folder, tmp_path / "checkpoint")
    source = folder if direction == "to megatron" else tmp_path / "checkpoint"
    file = next(path for path in source.iterdir() if path.suffix in (".safetensors", ".distcp"))
    whole, open_ = file.read_bytes(), os.open

    def shrink(*_: object) -> None:
        os.truncate(file, len(whole) // 2)

    def fail(path: Any, flags: int, *mode: Any) -> int:
        if path == file and flags & os.O_CLOEXEC and not flags & os.O_WRONLY:
            raise PermissionError(13, "Permission denied", str(path))
        return open_(path, flags, *mode)

    with monkeypatch.context() as patch:
        patch.setattr("megappo.convert.from_checkpoint.prepare", shrink)
        patch.setattr("megappo.convert.to_megatron.prepare", shrink)
        said = problems(source, tmp_path / "out", processes=processes)
        assert said.startswith(f"{file}: cannot be read") and said.endswith(": copy it again")
    file.write_bytes(whole)
    monkeypatch.setattr(os, "open", fail)
    said = problems(source, tmp_path / "out", processes=processes)
    assert said == f"{file}: cannot be read ([Errno 13] Permission denied: '{file}'): copy it again"


def test_a_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(tmp_path / "gone")
    text = problems(folder, tmp_path / "checkpoint")
    assert text.startswith(f"{folder / 'tokenizer.json'}: cannot be read ([Errno 2] No such file")


def test_one_process_does_between_items_what_is_to_be_done_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "OFTEN_S", 0.0)
    done: list[object] = []
    assert share.shared(lambda n: done.append(n), [1, 2], [1, 1], 1, often=lambda: done.append("often")) == [None, None]
    assert done == [1, "often", 2, "often"]


@pytest.mark.parametrize("processes", [1, 2])
def test_damaged_values_are_all_named(tmp_path: Path, processes: int) -> None:
    """As many bytes as there should be, but zeros: only the checksums tell."""
    run(make(tmp_path / "model"), checkpoint := tmp_path / "checkpoint")
    chunks = read_chunks(checkpoint)[1]
    hurt = {
        "decoder.final_layernorm.weight",
        "decoder.layers.mlp.linear_fc1.weight",
        "embedding.word_embeddings.weight",
    }
    for chunk in chunks:
        if chunk.key in hurt and chunk.offset[0] == 0:
            stored, saved = chunk.stored(checkpoint)
            assert saved
            with stored.path.open("rb+") as file:
                file.seek(stored.position)
                file.write(bytes(stored.num_bytes))
    said = problems(checkpoint, tmp_path / "back", processes=processes)
    (file,) = checkpoint.glob("*.distcp")
    names = "embed_tokens", "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", "norm"
    assert said.splitlines() == [
        f"{file}: model.{name}.weight: is damaged (other bytes than were saved): copy the checkpoint again"
        for name in names
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_saved_without_checksums(tmp_path: Path) -> None:
    """torch.save leaves them out on demand."""
    import torch.distributed.checkpoint as dcp

    folder = make(tmp_path / "model")
    run(folder, tmp_path / "checkpoint")
    shapes, _ = read_chunks(tmp_path / "checkpoint")
    whole = {key: torch.empty(shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
    dcp.load(whole, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save(whole, checkpoint_id=tmp_path / "plain", no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    chunks = read_chunks(tmp_path / "plain")[1]
    assert {chunk.stored(tmp_path / "plain")[1] for chunk in chunks} == {0}
    warning, _ = run(tmp_path / "plain", tmp_path / "back", model=str(folder), processes=2)
    assert warning == (
        f"warning: {tmp_path}/plain: {len(chunks)} of {len(chunks)} chunks have no checksum "
        "(torch.serialization.set_crc32_options(False)), so that damage to them would not be seen: "
        "compare the files with those that were saved"
    )
    assert_same_weights(folder, tmp_path / "back")


# --- memory ---------------------------------------------------------------------------------------------------------


def peak_mib(source: Path, target: Path, options: dict[str, Any], pipe: Any) -> None:
    """By how much a conversion, all in this process, raises its resident memory at most."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    run(source, target, processes=1, **options)
    pipe.send(resident("VmHWM") - before)


def resident(field: str) -> float:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) / 1024


def test_memory_is_bounded_by_buckets_not_by_the_model(tmp_path: Path) -> None:
    """One tensor of 100 MB, widened and rounded again, in a few buckets of 8 MiB."""
    folder = make(tmp_path / "model", vocab_size=800_000, tie_word_embeddings=True)
    context = multiprocessing.get_context("fork")
    ways: list[tuple[Path, Path, dict[str, Any]]] = [
        (folder, tmp_path / "checkpoint", {"dtype": "float32", "bucket_mb": 8}),
        (tmp_path / "checkpoint", tmp_path / "back", {"dtype": "bfloat16"}),
    ]
    for source, target, options in ways:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=peak_mib, args=(source, target, options, theirs), daemon=True)
        process.start()
        theirs.close()
        assert ours.recv() < 40
        process.join()
    assert_same_weights(folder, tmp_path / "back")
