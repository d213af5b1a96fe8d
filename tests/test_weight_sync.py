"""Weights from live Megatron ranks into live vLLM engines: the same, bit for bit, as if loaded from disk."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from engine_process import Engine, EngineError
from ranks import run_ranks
from tiny import make_model

from megappo.config import LoraConfig
from megappo.convert.command import convert
from megappo.convert.options import Options
from megappo.data import batch
from megappo.layout.mesh import Layout
from megappo.models.spec import read_model_spec, with_lora
from megappo.reshard.actor_to_rollout import Meeting, Probed, TransferSpec
from megappo.reshard.agreement import disagreement
from megappo.reshard.gloo import host_store
from megappo.workers.settings import EngineSettings, RoleSettings, Sampling

pytestmark = pytest.mark.runs

SAMPLING = Sampling(temperature=0.8, top_p=1.0, top_k=-1, max_response=12)
STOP = 7
MEAN_TOLERANCE = 1e-3


def requests() -> pa.Table:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, 24)
    return pa.table(
        {
            "id": pa.array(rng.permutation(24), pa.int64()),
            "prompt_ids": batch.ragged(rng.integers(2, 50, lengths.sum()).astype(np.int32), lengths),
        }
    )


REQUESTS = requests()


def send(
    folder: str,
    layout: Layout,
    transfer: TransferSpec,
    meeting: Meeting,
    version: int,
    samples: pa.Table | None,
    dies: bool,
    lora: LoraConfig | None,
    saved: str,
    dtype: str,
) -> Any:
    """One actor rank: read the weights, join, send; then score the engine's samples.

    With ``lora`` it sends random adapters, and saves them.
    """
    import torch.distributed as dist

    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.weight_sender import WeightSender

    role = MegatronRole(RoleSettings(folder, layout, dtype, 200, lora=lora, seed=version))
    if lora is not None:
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] (Megatron forks)
        spread(role, version)
        role.save(saved)
    sender = WeightSender(role, transfer, meeting)
    if dies:
        with contextlib.suppress(RuntimeError):  # the last rank may be gone before others have seen it leave
            dist.barrier()  # all others have joined too
        if dist.get_rank() == layout.world - 1:
            os._exit(1)
    sent = sender.send(version)
    if dies:
        signal.pause()  # or the engine might name this rank for leaving
    scored = None
    if samples is not None:
        share = samples.slice(layout.coordinates(dist.get_rank())["dp"] * 8, 8 if layout.dp > 1 else None)
        scored = role.logprobs(share, column="logprobs", temperature=SAMPLING.temperature)
    return sender.endpoint.fingerprint, sent, scored


def spread(role: Any, seed: int) -> None:
    """Give each B values that depend on its name and the place in it."""
    for box in role.boxes():
        if ".lora_B." in box.name:
            rows, ranks = (torch.arange(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
            role.params[box.param].copy_(torch.sin((seed + len(box.name)) * rows[:, None] + 3.0 * ranks) / 10)


@dataclass
class Case:
    """Two models of one shape, an engine that started from the first and one that started from the second.

    The latter has been a Megatron checkpoint between, so vLLM loads a folder that we have written.
    """

    a: str
    b: str
    tp: int
    layouts: tuple[Layout, Layout]
    engine: Engine
    cold: Engine
    layerwise: bool = False
    dtype: str = "float32"

    def transfer(self, layout: Layout) -> TransferSpec:
        return TransferSpec(
            read_model_spec(self.a), layout, engines=1, engine_tp=self.tp, fused_norms=False, layerwise=self.layerwise
        )

    def sync(
        self,
        folder: str,
        layout: Layout,
        version: int,
        samples: pa.Table | None = None,
        lora: LoraConfig | None = None,
        saved: str = "",
    ) -> tuple[int, list[Any]]:
        """Bytes received, and what each rank returned. Everything is verified."""
        transfer, store = self.transfer(layout), host_store("127.0.0.1", 300)
        transfer = replace(transfer, model=with_lora(transfer.model, lora))
        meeting = self._meet(transfer, store.port, version)
        try:
            sends = (send, folder, layout, transfer, meeting, version, samples, False, lora, saved, self.dtype)
            ranks = run_ranks(layout.world, *sends)
        except AssertionError:
            self.engine.forget(2)
            raise
        shown = self.engine.result()
        assert disagreement({**shown, **{rank: mark for rank, (mark, _, _) in enumerate(ranks)}}) is None
        receipt = self.engine.result()
        assert receipt.mismatches == ()
        return receipt.received, ranks

    def half_a_sync(self, folder: str, layout: Layout, version: int) -> str:
        """The last rank dies before it sends; what the engine says to that, while all others still live."""
        transfer, store = self.transfer(layout), host_store("127.0.0.1", 300)
        meeting = self._meet(transfer, store.port, version)
        said: list[str] = []

        def outcome() -> None:
            self.engine.result()
            with pytest.raises(EngineError) as error:
                self.engine.result()
            said.append(error.value.text)

        sends = (send, folder, layout, transfer, meeting, version, None, True, None, "", self.dtype)
        try:
            with pytest.raises(AssertionError, match=f"rank {layout.world - 1} died"):
                run_ranks(layout.world, *sends, one_died=outcome)
        finally:
            self.engine.forget(0 if said else 2)
        return said[0]

    def _meet(self, transfer: TransferSpec, port: int, version: int) -> Meeting:
        """Where the engine joins, and then receives."""
        meeting = Meeting("127.0.0.1", port, 300.0, verify="full")
        self.engine.start("join_transfer", transfer, 0, meeting)
        self.engine.start("receive_weights", version)
        return meeting


CASES = {
    "tp1-padded-vocabulary": (1, {"vocab_size": 51}, (Layout(tp=2, pp=2), Layout(pp=2, vpp=2, dp=2))),
    "tp2-tied": (
        2,
        {"vocab_size": 70, "tie_word_embeddings": True},
        (Layout(pp=2, dp=2), Layout(tp=2, sequence_parallel=True)),
    ),
}


def start_engine(model: str, tp: int, folder: Path, *, repacks: bool = False, dtype: str = "float32") -> Engine:
    settings = EngineSettings(
        folder=model,
        tp=tp,
        dtype=dtype,
        max_tokens=400,
        max_sequences=32,
        memory_fraction=0.5,
        kv_cache_gib=0.1,
        on_cuda=False,
        sleep="off",
        seed=0,
        stop_token_ids=(STOP,),
    )
    return Engine(settings, folder / f"engine-{Path(model).name}{repacks}.log", repacks=repacks)


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    tp, changes, layouts = request.param
    folder = tmp_path_factory.mktemp("sync")
    a, b = (
        str(make_model(folder / name, hidden_size=128, max_position_embeddings=512, seed=seed, **changes))
        for seed, name in enumerate("ab")
    )

    convert(b, folder / "megatron", Options(tp=2, pp=2), print)
    convert(folder / "megatron", folder / "converted", Options(), print)
    models = (a, str(folder / "converted"))
    found = Case(a, b, tp, layouts, *(start_engine(model, tp, folder) for model in models))
    for started in (found.engine, found.cold):
        started.call("megappo_checksums")
    yield found
    found.engine.close()
    found.cold.close()


def generate(engine: Engine, version: int = 0) -> pa.Table:
    return engine.call("generate", REQUESTS, SAMPLING, 5, version)


def same(a: pa.Table, b: pa.Table) -> bool:
    """Equal tokens, and equal log-probabilities to the last bit."""
    names = ("id", "response_ids", "rollout_logprobs", "finish_reason")
    return a.select(names).equals(b.select(names))


def test_a_token_of_the_configuration_ends_a_response(case: Case) -> None:
    rows = generate(case.cold)
    ended = [row for row in rows.to_pylist() if STOP in row["response_ids"]]
    assert ended
    assert all(row["response_ids"].index(STOP) == len(row["response_ids"]) - 1 for row in ended)
    assert {row["finish_reason"] for row in ended} == {"stop"}


def test_warm_update_equals_cold_load(case: Case) -> None:
    first, second = case.layouts
    spec = read_model_spec(case.a)
    cold_b, cold_a = generate(case.cold), generate(case.engine)
    assert not same(cold_a, cold_b)
    assert set(cold_a.column("weight_version").to_pylist()) == {0}

    # The probe agrees with vLLM's own loader, and leaves the weights as they were.
    assert case.engine.call("probe", case.transfer(first)) == Probed((), ())
    assert same(generate(case.engine), cold_a)

    received, ranks = case.sync(case.b, first, 7, samples=None)
    assert received == sum(sent for _, sent, _ in ranks)
    if case.tp == 1:
        assert received == 4 * spec.num_parameters()  # every weight once; nothing for the padding
    warm_b = generate(case.engine, 7)
    assert same(warm_b, cold_b)
    assert set(warm_b.column("weight_version").to_pylist()) == {7}
    with pytest.raises(EngineError, match="holds weights of version 7, not 8"):
        generate(case.engine, 8)
    assert case.engine.call("megappo_checksums") == case.cold.call("megappo_checksums")

    # From the other layout, back to the first model; and Megatron scores what the engine drew.
    samples = cold_a.append_column("prompt_ids", REQUESTS.column("prompt_ids"))
    _, ranks = case.sync(case.a, second, 8, samples)
    assert same(generate(case.engine, 8), cold_a)
    scored = pa.concat_tables([table for _, _, table in ranks if table is not None])
    rows = batch.join_by_id(scored, samples)
    gap = np.abs(batch.flat(rows, "logprobs") - batch.flat(rows, "rollout_logprobs"))
    print(f"Megatron {second.describe()} against vLLM TP{case.tp}: mean {gap.mean():.2e}, max {gap.max():.2e} nats")
    assert len(gap) > 50 and gap.mean() < MEAN_TOLERANCE


def test_adapters_alone_travel_and_give_what_a_merged_folder_gives(case: Case, tmp_path: Path) -> None:
    """The second ones are merged into the model's weights, not into those with the first ones."""
    layouts, base = case.layouts, read_model_spec(case.a)
    for version, targets in enumerate((("q_proj", "v_proj", "gate_proj", "down_proj"), ("all-linear",))):
        lora, saved = LoraConfig(rank=3, alpha=6.0, targets=targets), str(tmp_path / f"{version}" / "actor")
        received, ranks = case.sync(case.a, layouts[version], version, lora=lora, saved=saved)
        assert received == sum(sent for _, sent, _ in ranks) < 4 * base.num_parameters() / 5
        if case.tp == 1:
            assert received == 4 * (with_lora(base, lora).num_parameters() - base.num_parameters())
    warm, sums = generate(case.engine, 1), case.engine.call("megappo_checksums")

    convert(saved, tmp_path / "merged", Options(model=case.a), print)
    case.sync(str(tmp_path / "merged"), layouts[1], 2)  # whole weights, which is as if loaded from disk: see above
    assert same(generate(case.engine, 2), warm)
    assert case.engine.call("megappo_checksums") == sums != case.cold.call("megappo_checksums")


def test_layers_that_vllm_repacks_are_put_through_its_own_reload(case: Case, tmp_path: Path) -> None:
    """The weights that an engine started from, sent to it after others: log-probabilities are those of before."""
    if case.tp > 1:
        pytest.skip("see the test of two workers")
    engine = start_engine(case.a, 1, tmp_path, repacks=True)
    try:
        repacked = replace(case, engine=engine, layerwise=True)
        first, second = case.layouts
        problems, staged = engine.call("probe", repacked.transfer(first))
        assert problems == ()
        assert {"model.layers.3.mlp.down_proj", "lm_head"} <= set(staged) and "model.norm" not in staged
        cold_a, cold_b = generate(engine), generate(case.cold)  # the latter by other kernels
        received, _ = repacked.sync(case.b, first, 1)
        assert received == 4 * read_model_spec(case.a).num_parameters()
        warm_b = generate(engine, 1)
        assert warm_b.column("response_ids") == cold_b.column("response_ids")
        gap = batch.flat(warm_b, "rollout_logprobs") - batch.flat(cold_b, "rollout_logprobs")
        assert np.abs(gap).max() < 1e-4
        repacked.sync(case.a, second, 2)
        assert same(generate(engine, 2), cold_a) and not same(warm_b, cold_a)
        lora = LoraConfig(rank=3, alpha=6.0)
        repacked.sync(case.a, first, 3, lora=lora, saved=str(tmp_path / "actor"))
        adapted = generate(engine, 3)
        convert(tmp_path / "actor", tmp_path / "merged", Options(model=case.a), print)
        repacked.sync(str(tmp_path / "merged"), second, 4)
        assert same(generate(engine, 4), adapted) and not same(adapted, cold_a)
        with pytest.raises(EngineError, match=r"these layers are staged here, but not in the plan: .*lm_head"):
            engine.call("join_transfer", case.transfer(first), 0, Meeting("127.0.0.1", 1, 1.0))
    finally:
        engine.close()


def test_repacked_layers_of_two_workers_in_bfloat16(case: Case, tmp_path: Path) -> None:
    """What they generate after other weights and their own again is what it was, to the last bit."""
    if case.tp == 1:
        pytest.skip("see the test of one worker")
    engine = start_engine(case.a, case.tp, tmp_path, repacks=True, dtype="bfloat16")
    try:
        repacked = replace(case, engine=engine, layerwise=True, dtype="bfloat16")
        problems, staged = engine.call("probe", repacked.transfer(case.layouts[0]))
        assert problems == ()
        assert {"model.layers.3.mlp.down_proj", "model.layers.0.self_attn.qkv_proj"} <= set(staged)
        cold_a = generate(engine)
        repacked.sync(case.b, case.layouts[0], 1)
        assert not same(generate(engine, 1), cold_a)
        repacked.sync(case.a, case.layouts[1], 2)
        assert same(generate(engine, 2), cold_a)
    finally:
        engine.close()


def test_the_probe_names_what_a_wrong_table_misplaces(case: Case) -> None:
    if case.tp > 1:
        pytest.skip("the table of an engine's own worker processes cannot be spoilt from here")
    before = generate(case.cold)
    transfer = case.transfer(case.layouts[0])
    case.cold.call("swap_gate_and_up")
    found = case.cold.call("probe", transfer).problems
    names = [line.split(":")[0] for line in found]
    assert {f"model.layers.{layer}.mlp.gate_up_proj.weight" for layer in (0, 3)} <= set(names)
    assert all(name.endswith("gate_up_proj.weight") for name in names)
    assert "vLLM's loader puts other elements there than our table says" in found[0]
    assert same(generate(case.cold), before)


def test_the_probe_names_what_does_not_fit(case: Case) -> None:
    transfer = case.transfer(case.layouts[0])
    wrong = replace(transfer, model=replace(transfer.model, num_kv_heads=4))
    found = case.engine.call("probe", wrong).problems
    assert any("self_attn.qkv_proj.weight" in line for line in found), found


def test_half_a_sync_is_noticed_and_a_whole_one_heals(case: Case) -> None:
    layout = case.layouts[0]
    said = case.half_a_sync(case.b, layout, 9)
    gone = set(re.findall(r"(\w+ rank \d+|engine \d+ worker \d+) \w+ \w+ and is gone", said))
    assert f"actor rank {layout.world - 1}" in gone, said
    with pytest.raises(EngineError) as stale:
        generate(case.engine, 9)
    assert stale.value.kind == "StaleWeightsError"
    assert "did not complete" in stale.value.text

    case.sync(case.b, layout, 10)
    assert same(generate(case.engine, 10), generate(case.cold))


def test_keys_and_values_of_older_weights_are_never_found(case: Case) -> None:
    lengths = [300, 310]  # more than one block of the key/value cache
    prompts = np.random.default_rng(1).integers(2, 50, sum(lengths)).astype(np.int32)
    long = pa.table({"id": pa.array([0, 1], pa.int64()), "prompt_ids": batch.ragged(prompts, lengths)})
    case.sync(case.a, case.layouts[0], 11)
    old = case.engine.call("generate", long, SAMPLING, 5, 11)
    case.sync(case.b, case.layouts[0], 12)
    new, cold = case.engine.call("generate", long, SAMPLING, 5, 12), case.cold.call("generate", long, SAMPLING, 5, 0)
    gap = np.abs(batch.flat(new, "rollout_logprobs") - batch.flat(cold, "rollout_logprobs")).max()
    assert new.column("response_ids") == cold.column("response_ids") and gap < 1e-4
    assert old.column("response_ids") != cold.column("response_ids")


def test_senders_that_never_come_are_waited_for_no_longer_than_the_limit(case: Case) -> None:
    store = host_store("127.0.0.1", 300)
    case.cold.start("join_transfer", case.transfer(case.layouts[0]), 0, Meeting("127.0.0.1", store.port, 2.0))
    with pytest.raises(EngineError, match=r"actor rank 0, .*did not join the transfer group within 2 s"):
        case.cold.result(50)  # the meeting point would wait for 60 s
