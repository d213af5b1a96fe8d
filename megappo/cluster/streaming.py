"""Engines that draw responses while others work, and go on with them after each weight sync."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from megappo.cluster.actors import CONTROL
from megappo.cluster.calls import Call, Calls, Pending, WorkerLost
from megappo.cluster.dataflow import Selection, put_table
from megappo.cluster.groups import Member
from megappo.cluster.serving import Serving
from megappo.data import batch
from megappo.data.progress import SCHEMA, dealt_out
from megappo.workers.settings import Sampling

COLUMNS = ("prompt_ids", "response_ids", "rollout_logprobs", "token_versions")
"""What an engine is given of a response: the prompt, and how far it is."""


@dataclass
class _Share:
    """What an engine is at in a turn, and its calls whose rows are still to be taken: the one that draws first."""

    member: Member
    ids: np.ndarray
    calls: list[Call]


class Streaming:
    """All engines, drawing in turns that last from one weight sync to the next; see :mod:`megappo.workers.stream`.

    Its state: the number of the turn, and who is at what in it. What a dead engine was at is as it was before the turn.
    """

    def __init__(self, serving: Serving, calls: Calls) -> None:
        self._serving, self._calls = serving, calls
        self._turn = 0
        self._shares: dict[int, _Share] = {}
        serving.on_loss(self._lose)

    @property
    def is_running(self) -> bool:
        """Whether engines are at it, or were until they had no more to do."""
        return bool(self._shares)

    def start(self, batches: Sequence[pa.Table], sampling: Sampling, seed: Sequence[int], version: int) -> None:
        """Begin a turn.

        Args:
            batches: responses that are not done, with :data:`COLUMNS` and ``prompt_index``; those of the first come
                first. Each is spread over the engines, all samples of a prompt on the same.
            seed: all randomness follows from it, the number of engines, and what was done in the turns before.
            version: of the weights, which the actor has.
        """
        members = self._serving.members(version)
        self._turn += 1
        seeds = np.random.default_rng(list(seed)).integers(0, 2**31 - 1, len(members)).tolist()
        dealt = [dealt_out(rows.select(["id", "prompt_index", *COLUMNS]), len(members)) for rows in batches]
        for member, number, *parts in zip(members, seeds, *dealt, strict=True):
            rows = pa.concat_tables(parts).combine_chunks()
            ids = batch.column(rows, "id")
            selected = Selection(ids, COLUMNS, ((put_table(rows),),))
            # A turn lasts as long as the others train; its end is what may not take long.
            call = self._call(member, "stream", selected, sampling, number, version, limited=False)
            self._shares[member.place.rank] = _Share(member, ids, [call])

    def wait(self, ids: np.ndarray) -> pa.Table:
        """These responses once they are done, in :data:`~megappo.data.progress.SCHEMA`; the turn goes on.

        If an engine dies meanwhile, the turn ends: what comes then is all that has become of it.

        Raises:
            WorkerLost: more engines died than may be replaced, or other workers.
        """
        asked = []
        for share in self._shares.values():
            if (wanted := np.intersect1d(ids, share.ids)).size:
                asked.append(self._call(share.member, "wait", wanted.tolist(), beside=True))
                share.calls.append(asked[-1])
        try:
            (tables,) = self._calls.gather(Pending(tuple(asked), list))
        except WorkerLost as loss:
            self._serving.survive(loss)
            return self.stop()
        for share in self._shares.values():
            del share.calls[1:]
        return _joined(tables)

    def stop(self) -> pa.Table:
        """End the turn: all of its responses that :meth:`wait` did not return, done or not.

        Raises:
            WorkerLost: more engines died than may be replaced, or other workers.
        """
        for share in self._shares.values():
            self._calls.limit(share.calls[0])
            share.calls.append(self._call(share.member, "stop", beside=True))
        while True:
            try:
                ended = self._calls.gather(*(Pending(tuple(share.calls), list) for share in self._shares.values()))
                break
            except WorkerLost as loss:
                self._serving.survive(loss)
        self._shares = {}
        return _joined([rows for *tables, _ in ended for rows in tables])

    def _lose(self, dead: Collection[int]) -> None:
        for rank in [*self._shares]:
            if rank in dead:
                self._calls.forget(self._shares.pop(rank).calls)

    def _call(self, member: Member, method: str, *args: Any, beside: bool = False, limited: bool = True) -> Call:
        remote = getattr(member.actor, method)
        if beside:
            remote = remote.options(concurrency_group=CONTROL)
        return self._calls.start(member.place, method, remote.remote(self._turn, *args), limited=limited)


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    return pa.concat_tables([SCHEMA.empty_table(), *tables])
