"""Low-rank adapters: PEFT's own numbers, the same at every layout, resumed and exported without loss."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path
from typing import Any
from unittest import TestCase

import numpy as np
import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_update import PPO, ROWS, assert_same, gain, gathered, take_steps
from tiny import make_model

from megappo.config import LoraConfig
from megappo.convert.command import convert
from megappo.convert.options import Options
from megappo.data import batch
from megappo.layout.mesh import Layout
from megappo.models.spec import ModelError, read_model_spec, with_lora
from megappo.reshard.boxes import megatron_boxes, vllm_boxes
from megappo.reshard.copies import block
from megappo.reshard.merge import merge, updates

pytestmark = pytest.mark.ranks

ALL = LoraConfig(rank=4, alpha=8.0)
SOME = LoraConfig(rank=3, alpha=4.0, targets=("q_proj", "v_proj", "up_proj", "down_proj"))
"""Of fused projections only a part."""
FEW = LoraConfig(rank=1, alpha=2.0, targets=("q_proj",))
SPLIT = Layout(tp=2, pp=2, sequence_parallel=True)
CHUNKS = Layout(tp=2, pp=2, vpp=2, sequence_parallel=True)


def make_role(folder: str, layout: Layout, critic: bool, lora: LoraConfig, **options: Any) -> Any:
    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.settings import RoleSettings

    return MegatronRole(RoleSettings(folder, layout, "float32", 64, critic, PPO.optimizer, lora=lora, **options))


def factors(role: Any) -> dict[tuple[str, tuple[int, ...]], np.ndarray]:
    """What this rank holds of the adapters."""
    boxes = [box for box in role.boxes() if ".lora_" in box.name]
    return {(b.name, b.offset): np.array(role.params[b.param].tolist(), np.float32) for b in boxes}


def train(folder: str, layout: Layout, critic: bool, lora: LoraConfig, saved: str) -> dict[str, Any]:
    """Two updates with a checkpoint and all log-probabilities (or values) between; what each left."""
    from megappo.workers.offload import settle

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] (Megatron forks)
    role = make_role(folder, layout, critic, lora, offload="all")
    out: dict[str, Any] = {"before": factors(role)}
    frozen = {name: param.clone() for name, param in role.params.items() if name not in (role._stored or ())}
    out["trained"] = sum(buffer.grad_data.numel() for chunk in role.trained for buffer in chunk.buffers)
    take_steps(role, critic, PPO)
    role.residence.rest()
    settle()
    held = {param.untyped_storage().nbytes() for param in role.params.values()}
    assert held == {0}  # frozen weights leave too
    out["first"] = take_steps(role, critic, PPO)  # of a B that is no longer zero
    role.save(saved)
    out["scored"] = role.values(ROWS) if critic else role.logprobs(ROWS, column="scored", temperature=1.0)
    out["second"] = take_steps(role, critic, PPO)
    assert all(torch.equal(role.params[name], values) for name, values in frozen.items())
    return out


def resume(folder: str, layout: Layout, critic: bool, lora: LoraConfig, saved: str) -> tuple[Any, list[Any]]:
    role = make_role(folder, layout, critic, lora, seed=7)
    role.load(saved)
    return take_steps(role, critic, PPO)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=True))


@pytest.mark.parametrize(
    ("lora", "layout", "critic"), [(ALL, SPLIT, False), (SOME, CHUNKS, True)], ids=["actor", "critic"]
)
def test_trained_split_resumed_and_exported(
    tmp_path: Path, folder: str, lora: LoraConfig, layout: Layout, critic: bool
) -> None:
    name = "critic" if critic else "actor"
    saved = str(tmp_path / name)
    ranks = run_ranks(4, train, folder, layout, critic, lora, saved)
    (alone,) = run_ranks(1, train, folder, Layout(), critic, lora, str(tmp_path / "alone"))
    for step in ("first", "second"):
        assert_same(gathered([rank[step] for rank in ranks]), gathered([alone[step]]))
    size = sum(values.size for values in alone["before"].values()) + 64 * critic
    assert size <= alone["trained"] < 1.1 * size  # gradients of nothing else, but for padding

    resumed = gathered(run_ranks(2, resume, folder, Layout(dp=2), critic, lora, saved))
    assert_same(resumed, gathered([rank["second"] for rank in ranks]))

    convert(saved, tmp_path / "peft", Options(to="peft", model=folder), print)
    convert(saved, tmp_path / "merged", Options(model=folder), print)
    (scored,) = (rank["scored"] for rank in ranks if rank["scored"] is not None)
    ours = batch.flat(batch.take_ids(scored, batch.column(ROWS, "id")), scored.column_names[1])
    for loaded in (with_peft(folder, critic, tmp_path / "peft"), hugging_face(str(tmp_path / "merged"), critic)):
        np.testing.assert_allclose(ours, outputs(loaded, critic), atol=1e-5)
    assert np.abs(ours - outputs(hugging_face(folder, critic), critic)).max() > 0.01

    weights = Path(shutil.copytree(folder, tmp_path / "base")) / "model.safetensors"
    convert(saved, tmp_path / "again", Options(model=str(tmp_path / "base")), print)
    weights.touch()
    with pytest.raises(ModelError, match="made from something else"):
        convert(saved, tmp_path / "again", Options(model=str(tmp_path / "base")), print)
    save_file({**load_file(weights), "model.norm.weight": torch.full((64,), 1e5)}, weights)
    with pytest.raises(ModelError, match=r"base: tensor model\.norm\.weight has values of up to 100000"):
        convert(saved, tmp_path / "half", Options(model=str(tmp_path / "base"), dtype="float16"), print)
    save_file({**load_file(weights), "model.norm.weight": torch.ones(64, dtype=torch.int8)}, weights)
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight is int8: give 16- or 32-bit floats"):
        convert(saved, tmp_path / "again", Options(model=str(tmp_path / "base")), print)


def test_ranks_that_hold_no_parameter_save_and_resume(tmp_path: Path, folder: str) -> None:
    """Adapters are padded to more than they are, and all of it is dealt out: the last rank has padding alone."""
    saved = str(tmp_path / "saved")
    ranks = run_ranks(3, train_silently, folder, Layout(dp=3), False, FEW, saved)
    resumed = run_ranks(3, resume, folder, Layout(dp=3), False, FEW, saved)
    assert_same(gathered(resumed), gathered([rank["second"] for rank in ranks]))


def train_silently(*args: Any) -> dict[str, Any]:
    with TestCase().assertNoLogs("megatron.core.dist_checkpointing", "WARNING"):
        return train(*args)


PARTS: dict[str, Any] = {
    "megatron tp2 pp2": lambda spec: [megatron_boxes(spec, Layout(tp=2, pp=2), rank) for rank in range(4)],
    "vllm tp4, with copies of key/value heads": lambda spec: [vllm_boxes(spec, 4, at, at) for at in range(4)],
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("lora", [ALL, SOME], ids=["all", "some"])
def test_each_part_merges_what_the_whole_does(folder: str, lora: LoraConfig, parts: Any) -> None:
    spec, generator = with_lora(read_model_spec(folder), lora), torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in spec.hf_shapes().items()}
    merged = {name: tensor.clone() for name, tensor in whole.items()}
    scale, changed = lora.alpha / lora.rank, 0
    for name, tensor in whole.items():
        stem = name.removesuffix("weight")
        if f"{stem}lora_A.weight" in whole:
            product = whole[f"{stem}lora_B.weight"].double() @ whole[f"{stem}lora_A.weight"].double()
            merged[name] = (tensor.double() + scale * product).float()
            changed += 1
    assert changed == len(lora.targets if lora is SOME else "qkvogud") * spec.num_layers
    for boxes in parts(spec):
        local: dict[str, torch.Tensor] = {}
        for box in boxes:
            ends = [begin + extent for begin, extent in zip(box.local_offset, box.size, strict=True)]
            known = local.get(box.param, torch.zeros([0] * len(ends))).shape
            local[box.param] = torch.zeros([max(a, b) for a, b in zip(ends, known, strict=True)])
        for box in boxes:
            local[box.param][block(box.local_offset, box.size)] = whole[box.name][block(box.offset, box.size)]
        for box, a, columns, b, rows in updates(boxes):
            merge(
                local[box.param][block(box.local_offset, box.size)],
                local[a][:, columns],
                local[b][rows],
                lora.alpha / lora.rank,
            )
        for box in boxes:
            found, wanted = local[box.param][block(box.local_offset, box.size)], merged[box.name]
            assert torch.equal(found, wanted[block(box.offset, box.size)]), box


def test_what_cannot_be_exported_is_said(tmp_path: Path, folder: str) -> None:
    with pytest.raises(ModelError, match=r"--to peft: .* has no adapters: leave it out"):
        convert(folder, tmp_path / "peft", Options(to="peft"), print)
    convert(folder, tmp_path / "actor", Options(), print)  # not of adapters, whatever is said beside it
    (tmp_path / "actor" / "lora.json").write_text('{"rank": 4, "alpha": 8.0, "targets": ["q_proj"]}')
    with pytest.raises(ModelError, match=r"tensor decoder.layers.mlp.linear_fc1\.weight is not part of the model"):
        convert(tmp_path / "actor", tmp_path / "peft", Options(to="peft", model=folder), print)
    for damaged in (
        '{"rank": "four"}',
        '{"rank": 4, "alpha": NaN, "targets": ["q_proj"]}',
        '{"rank": 0, "alpha": 8.0, "targets": ["q_proj"]}',
        "[" * 100_000,
    ):
        (tmp_path / "actor" / "lora.json").write_text(damaged)
        with pytest.raises(ModelError, match=r"lora\.json: cannot be read"):
            convert(tmp_path / "actor", tmp_path / "merged", Options(model=folder), print)
    with pytest.raises(ModelError, match=r"--verify: is for weights that are the same on both sides, and DST will"):
        convert(tmp_path / "actor", tmp_path / "merged", Options(model=folder, verify=True), print)
    assert not list(tmp_path.glob("peft*")) and not list(tmp_path.glob("merged*"))


def hugging_face(folder: str, critic: bool) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    if critic:
        return AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32, num_labels=1).eval()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def with_peft(folder: str, critic: bool, adapters: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(hugging_face(folder, critic), str(adapters)).eval()


def sequences() -> list[tuple[torch.Tensor, torch.Tensor]]:
    columns = [batch.split_rows(ROWS, name) for name in ("prompt_ids", "response_ids")]
    return [(torch.tensor(p).long(), torch.tensor(r).long()) for p, r in zip(*columns, strict=True)]


@torch.no_grad()
def outputs(model: Any, critic: bool) -> np.ndarray:
    """Log-probability of each response token, or the value before it, row by row."""
    out = []
    for prompt, response in sequences():
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        out.append(logits[:, 0] if critic else logits.log_softmax(-1).gather(1, response[:, None])[:, 0])
    return torch.cat(out).numpy()


def first_step(folder: str, lora: LoraConfig) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """One rank's first mini-batch with random adapters, and these."""
    from megappo.ppo.balance import mini_batches
    from megappo.workers.objectives import ActorObjective
    from megappo.workers.settings import MiniBatch, Totals

    role = make_role(folder, Layout(), False, lora)
    generator = torch.Generator().manual_seed(0)
    for param in role.model.parameters():
        if param.requires_grad:
            param.data.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    held = {name: values for (name, _), values in factors(role).items()}
    rows = mini_batches(ROWS.num_rows, PPO.mini_batch)[0]
    totals = Totals(len(rows), int(batch.lengths(ROWS, "response_ids")[rows].sum()))
    mini = MiniBatch(batch.column(ROWS, "id")[rows], totals)
    return role.update(ROWS, [mini], ActorObjective(PPO, 0.8), 1e-3), held


def test_loss_and_gradient_equal_those_of_peft(folder: str) -> None:
    """PEFT's model with the same factors, the loss written out, one row at a time."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    from megappo.ppo.balance import mini_batches

    ((stats, held),) = run_ranks(1, first_step, folder, SOME)
    config = PeftConfig(r=SOME.rank, lora_alpha=int(SOME.alpha), target_modules=list(SOME.targets))
    model = get_peft_model(hugging_face(folder, False), config)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert len(params) == len(held)
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(torch.from_numpy(held[name.removeprefix("base_model.model.").replace(".default", "")]))
    columns = {name: batch.split_rows(ROWS, name) for name in ("logprobs", "ref_logprobs", "advantages")}
    rows, surrogate = mini_batches(ROWS.num_rows, PPO.mini_batch)[0], 0.0
    for row in rows:
        prompt, response = sequences()[row]
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / 0.8
        distribution = torch.distributions.Categorical(logits=logits)
        logprobs = distribution.log_prob(response)
        old, ref, advantage = (torch.tensor(columns[name][row]) for name in columns)
        gained = gain(PPO, logprobs, old, advantage)
        kl = torch.exp(ref - logprobs) - (ref - logprobs) - 1
        ((-gained + (0.05 * kl - 0.01 * distribution.entropy()).mean()) / len(rows)).backward()
        surrogate += -gained.item() / len(rows)
    norm = torch.nn.utils.clip_grad_norm_(params.values(), 1e9).item()
    assert stats["actor/pg_loss"] == pytest.approx(surrogate, abs=1e-6)
    assert stats["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)


def begun(folder: str, layout: Layout, lora: LoraConfig, seed: int) -> Any:
    return factors(make_role(folder, layout, False, lora, seed=seed))


def test_adapters_begin_as_pefts_do_at_every_layout(folder: str) -> None:
    whole = {name: values for (name, _), values in run_ranks(1, begun, folder, Layout(), ALL, 3)[0].items()}
    for rank in run_ranks(2, begun, folder, Layout(tp=2), ALL, 3):
        for (name, offset), values in rank.items():
            place = tuple(slice(begin, begin + extent) for begin, extent in zip(offset, values.shape, strict=True))
            np.testing.assert_array_equal(values, whole[name][place])
    other = run_ranks(1, begun, folder, Layout(), ALL, 4)[0]
    for name, values in whole.items():
        if ".lora_B." in name:
            assert not values.any()
        else:
            bound = values.shape[1] ** -0.5
            assert 0.8 * bound < np.abs(values).max() <= bound and abs(values.mean()) < 0.1 * bound
            assert not np.array_equal(values, other[name, (0, 0)])
