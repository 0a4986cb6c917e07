"""One request over all ranks of a pair, driven as SGLang's two schedulers do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn

from pdtransfer.engines.sglang import receiver
from tests.sglang.plugin_pools import RankPool
from tests.sglang.plugin_world import Engine, World, wait_for


@dataclass
class Request:
    """One request over all ranks of a pair, driven as the two schedulers do."""

    room: int
    prefill: Engine
    decode: Engine
    prompt: int
    prefix: int = 0
    """Pages that decode has already."""
    source: tuple[int, ...] = ()
    target: tuple[int, ...] = ()
    row: int = 1
    senders: list[Any] = field(default_factory=list)
    receivers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.source = self.source or tuple(range(1, 1 + self.prompt))
        self.target = self.target or tuple(range(2, 2 + self.prompt - self.prefix))

    def begin(self) -> Request:
        """Senders and receivers are there, decode knows prefill."""
        self.senders = self.prefill.senders(self.room)
        self.join()
        return self

    def join(self) -> None:
        """Decode's half of `begin`."""
        address = self.prefill.address
        self.receivers = [receiver.PdclusterKVReceiver(m, address, self.room) for m in self.decode.managers]
        for m in self.decode.managers:
            wait_for(
                lambda m=m: m.try_ensure_parallel_info(address) or m.request_status.get(self.room) == KVPoll.Failed,
                "the first contact",
            )
        for one in self.receivers:
            if one.poll() != KVPoll.Failed:
                one.init(self.room % self.prefill.shape.dp)

    def ask(self, **how: Any) -> None:
        """Decode has pages: it asks."""
        for one, pool in zip(self.receivers, self.decode.pools, strict=True):
            pool.aux[-1][self.row] = 0
            state = how.get("state")
            one.send_metadata(
                np.array(self.target, dtype=np.int32), self.row, state,
                decode_prefix_len=self.prefix * self.decode.shape.page_size,
                **{k: v for k, v in how.items() if k != "state"},
            )  # fmt: skip

    def asked(self) -> None:
        """Prefill's scheduler sees WaitingForInput on all ranks, and begins. SGLang asks the first pipeline stage
        only (poll_and_all_reduce_prefill_pp), which has the states of the others."""
        if self.prefill.shape.pp > 1:
            first = self.group[: len(self.group) // self.prefill.shape.pp]
            self.reach(first, KVPoll.WaitingForInput, "poll_pp_consensus")
        else:
            self.reach(self.group, KVPoll.WaitingForInput)
        for one in self.group:
            assert one.pop_decode_prefix_len() == self.prefix * self.prefill.shape.page_size
            one.init(self.prompt - self.prefix, self.row)

    @property
    def group(self) -> list[Any]:
        """The senders of the request's data-parallel group."""
        size = len(self.senders) // self.prefill.shape.dp
        at = (self.room % self.prefill.shape.dp) * size
        return self.senders[at : at + size]

    @property
    def filled(self) -> list[RankPool]:
        size = len(self.senders) // self.prefill.shape.dp
        at = (self.room % self.prefill.shape.dp) * size
        return self.prefill.pools[at : at + size]

    def send(self, chunks: Sequence[int] | None = None, token: int = 4711, **how: Any) -> None:
        """Prefill computes and hands over, in chunks of so many pages."""
        pages = list(self.source[self.prefix :])
        sizes = list(chunks or [len(pages)])
        assert sum(sizes) == len(pages)
        for pool in self.filled:
            pool.set_row(self.row, self.room, token)
        at = 0
        for n, size in enumerate(sizes):
            for one, pool in zip(self.group, self.filled, strict=True):
                pool.fill(self.room, pages[at : at + size], self.prefix + at)
                last = n == len(sizes) - 1
                one.send(np.array(pages[at : at + size], dtype=np.int32), how.get("state") if last else None, size)
            at += size

    def reach(self, ends: Sequence[Any], state: int, poll: str = "poll") -> None:
        """Until all of them are in a state (MIN over ranks, as SGLang reduces them)."""
        wait_for(lambda: min(int(getattr(e, poll)()) for e in ends) == state, f"state {state}")

    def finish(self) -> None:
        """Both sides see success."""
        self.reach(self.receivers, KVPoll.Success)
        self.reach(self.group, KVPoll.Success)

    def clear(self) -> None:
        for one in (*self.group, *self.receivers):
            one.clear()

    def run(self, chunks: Sequence[int] | None = None, **how: Any) -> None:
        """All of it."""
        self.begin()
        self.ask()
        self.asked()
        self.send(chunks, **how)
        self.finish()

    def wrong(self, host: bool = False) -> list[str]:
        """What decode holds wrongly, over all ranks."""
        return [w for pool in self.decode.pools for w in pool.wrong(self.room, self.target, self.prefix, host)]

    def reason(self, end: Any) -> str:
        """Why one end failed, as SGLang learns it."""
        with pytest.raises(conn.KVTransferError) as caught:
            end.failure_exception()
        return str(caught.value)


def stuck(request: Request, here: World, **how: Any) -> Request:
    """Drives it until decode sees its bytes under way: prefill's writes are posted and do not complete."""
    request.begin()
    request.ask(**how)
    request.asked()
    for m in request.prefill.managers:
        here.hub.agents[m.rank.card.agent_name].faults.stall_all = True
    request.send()
    for one in request.receivers:
        wait_for(lambda one=one: one.poll() == KVPoll.Transferring, "bytes under way")
    return request


def land(request: Request, here: World) -> None:
    """What was posted lands now, late."""
    for m in request.prefill.managers:
        here.hub.agents[m.rank.card.agent_name].faults.stall_all = False
        assert here.hub.unstall(m.rank.card.agent_name)
