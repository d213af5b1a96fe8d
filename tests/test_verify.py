"""Checksums of regions: what they are, what they see, and that samples cover everything in time."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_transfer import CASES, MODEL, numbered, small

from megappo.layout.mesh import Layout
from megappo.reshard.actor_to_rollout import NAMED, Probed, Receipt, TransferSpec, total_receipt
from megappo.reshard.copies import Copy
from megappo.reshard.endpoint import Endpoint
from megappo.reshard.routes import DEVICE, distance
from megappo.reshard.transfer import destination_block
from megappo.reshard.verify import MOST, ROW, SHARE, Verifier, _all_multipliers, _device_checksums, checksums, stamped


def checksum(block: torch.Tensor) -> int:
    return int(checksums([block]))


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float32, (37, 2001)), (torch.bfloat16, (7, 9)), (torch.int8, (5,))]
)
def test_checksum_is_the_sum_of_words_times_multipliers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    block = (torch.randn(shape) * 50).to(dtype)
    data = block.contiguous().view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(data + b"\0" * (-len(data) % 4), dtype="<i4")
    multipliers = _all_multipliers(torch.device("cpu")).numpy()
    assert (multipliers % 2 == 1).all() and len(np.unique(multipliers)) == len(multipliers)
    wanted = sum(int(word) * int(multiplier) for word, multiplier in zip(words, multipliers, strict=False)) % 2**64
    assert checksum(block) % 2**64 == wanted
    # As CUDA computes it, several at a time, of several sizes.
    parts = (block[:1], block, block.swapaxes(0, -1))
    there = _device_checksums(parts).tolist()
    assert there == checksums(parts).tolist()
    assert there[1] % 2**64 == wanted
    # Wherever it lies, in one piece or not.
    assert checksum(torch.cat([block.view(-1)[:1], block.view(-1)])[1:]) == checksum(block)
    if len(shape) == 2:
        assert checksum(block.T.contiguous().T) == checksum(block)


def test_checksum_sees_changes_and_swaps() -> None:
    block = torch.randn(256, 256)  # two rows of words
    assert block.numel() == 2 * ROW
    seen = {checksum(block)}
    for bit in range(32):
        changed = block.clone()
        changed.view(torch.int32)[3, 5] ^= -(2**31) if bit == 31 else 1 << bit
        seen.add(checksum(changed))
    for permuted in (
        block.flip(0),
        block.flip(1),
        block.T,
        block.roll(1, 0),
        block[torch.randperm(256)],
        block.roll(128, 0),
        -block,
    ):
        seen.add(checksum(permuted))
    assert len(seen) == 1 + 32 + 7


def test_samples_cover_everything_in_time() -> None:
    transfer = replace(small(False), model=replace(MODEL, num_layers=24))
    receiver = transfer.world - 1
    part = transfer.part(receiver)
    sample = Verifier(receiver, part, "sample")
    for source, regions in Verifier(receiver, part, "full").received.items():
        assert len(regions) > SHARE
        assert sample._chosen(0, sample.received[source]) == regions  # the first sync
        chosen = [sample._chosen(version, sample.received[source]) for version in range(1, SHARE + 1)]
        assert sorted(region for some in chosen for region in some) == sorted(regions)
        assert max(map(len, chosen)) <= min(MOST, -(-len(regions) // SHARE))
    assert not Verifier(receiver, part, "off").received


def test_a_sample_finds_what_it_looks_at_and_no_more() -> None:
    transfer = small(False)
    receiver = transfer.world - 1
    ends = [Verifier(rank, transfer.part(rank), "sample") for rank in range(transfer.world)]
    params = numbered(transfer, receiver, 1)
    for copy in transfer.part(receiver):
        source = numbered(transfer, copy.source, 1)[copy.source_param]
        begin, size = copy.source_offset, copy.size
        destination_block(params, copy).copy_(source[tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))])
    victim = "model.layers.1.mlp.down_proj.weight"
    seen: list[list[Copy]] = []
    for version in range(SHARE + 1):
        said = {
            rank: stamped(version, sums[receiver])
            for rank in range(receiver)
            if (sums := ends[rank].sent_sums(version, numbered(transfer, rank, 1)))
        }
        assert said.keys() == ends[receiver].empty_sums(version).keys()
        found = ends[receiver].received_sums(version, params)
        assert ends[receiver].differences(version, found, said) == []
        spoilt = {name: param.clone() for name, param in params.items()}
        spoilt[victim][0, 0] += 1
        spoilt_sums = ends[receiver].received_sums(version, spoilt)
        seen.append([copy for copy, _ in ends[receiver].differences(version, spoilt_sums, said)])
        # Sums of another sync are not taken for this one's.
        others = {rank: sums + torch.eye(1, len(sums))[0].long() for rank, sums in said.items()}
        assert bool(ends[receiver].differences(version, found, others)) == bool(said)
    first, *later = seen  # the first is looked at as a whole
    assert [copy.param for copy in first] == [victim]
    assert [copy.param for found in later for copy in found] == [victim]
    assert first[0].source == 0  # the sender of the first columns


def test_what_is_wrong_everywhere_is_told_in_a_few_lines() -> None:
    """Of every rank one, before a second of any; all are counted."""
    transfer, receiver = small(False), 2
    copies = [copy for copy in transfer.part(receiver) if copy.destination == receiver] * 9
    assert len(copies) > 3 * NAMED
    end: Any = SimpleNamespace(
        _transfer=transfer, verifier=SimpleNamespace(differences=lambda *_: [(copy, 4) for copy in copies])
    )
    count, lines = Endpoint.mismatches(end, 5, {}, {})
    assert (count, len(lines)) == (len(copies), NAMED)
    assert lines[0].startswith("weight sync 5: ") and lines[0].endswith("has it (which sent version 4)")

    ranks = [Receipt(1, 2, count, tuple(f"{rank}: {line}" for line in lines)) for rank in range(NAMED - 3)]
    ranks += [Receipt(1, 2), Receipt(1, 2, 1, ("alone",))]
    total = total_receipt(ranks)
    assert total[:3] == total_receipt([total_receipt(ranks[:7]), total_receipt(ranks[7:])])[:3]
    assert total[:3] == (len(ranks), 2 * len(ranks), 1 + count * (NAMED - 3))
    told = total.complaint.splitlines()
    assert len(told) == NAMED + 1 and "alone" in told
    assert told[-1] == f"and {1 + count * (NAMED - 3) - NAMED:,} more regions"
    assert total_receipt([Receipt(), Receipt(1, 2, 1, ("alone",))]).complaint == "alone" and not Receipt().complaint


def test_of_a_table_that_is_wrong_everywhere_some_is_told() -> None:
    told = Probed(tuple(f"layer {number}: refused" for number in range(5000)), ()).complaint.splitlines()
    assert (told[0], len(told), told[-1]) == ("layer 0: refused", NAMED + 1, "and 4,980 more parameters")


def test_what_is_known_without_the_plan() -> None:
    for transfer in CASES.values():
        plan = transfer.plan()
        assert transfer.elements() == sum(copy.elements for copy in plan)
    layout, model = Layout(tp=2, dp=2), replace(MODEL, vocab_size=512)  # which neither side pads
    for devices, stays in (("0101", True), ("0123", True), ("1032", False), ("0011", False)):
        places = (*(("node", str(rank)) for rank in range(4)), *(("node", device) for device in devices))
        transfer = TransferSpec(model, layout, engines=2, engine_tp=2, fused_norms=False, places=places)
        on_device = all(distance(places, copy.source, copy.destination) == DEVICE for copy in transfer.plan())
        assert transfer.stays_on_device() == on_device == stays, devices
    assert not replace(transfer, places=()).stays_on_device()
