"""The first request of a pair pays for nothing that could be done before: peers, connections, lists, plans, arenas."""

from __future__ import annotations

from collections import Counter

import pytest
from kv_world import Rank, World, ask, give

from pdtransfer.session.api import TransferState

WAYS = [("staged", 2, 1), ("staged", 1, 2), ("merge", 2, 1), ("split", 1, 2), ("sliced", 2, 1), ("sliced", 1, 1)]
SET_UP = ("register", "deregister", "metadata", "add_peer", "remove_peer", "connect", "prepare", "release_prepared")
"""Calls of an agent that belong to set-up and wiring."""


def count_set_up(rank: Rank, calls: Counter[str]) -> None:
    for name in SET_UP:
        real = getattr(rank.agent, name)

        def counted(*args, name=name, real=real):
            calls[name] += 1
            return real(*args)

        setattr(rank.agent, name, counted)


@pytest.mark.parametrize(("strategy", "p", "d"), WAYS)
def test_a_first_request_sets_nothing_up(world: World, strategy: str, p: int, d: int):
    prefill, decode = world.pair(p, d, strategy=strategy, staging_slot_bytes=1024, staging_bytes=8192)
    calls: Counter[str] = Counter()
    for rank in (*prefill, *decode):
        count_set_up(rank, calls)
    receivers = [ask(r, 1, [4, 5, 6, 7]) for r in decode]
    for rank in prefill:
        give(rank, 1, [1, 2, 3, 8])
    for rank, receiver in zip(decode, receivers, strict=True):
        assert receiver.wait(30) is TransferState.SUCCESS, receiver.error
        assert rank.pool.holds(1, [4, 5, 6, 7])
    assert not calls, calls


def test_the_count_sees_a_set_up_call(world: World):
    (prefill,), _ = world.pair()
    calls: Counter[str] = Counter()
    count_set_up(prefill, calls)
    prefill.endpoint._core.call(prefill.agent.metadata)
    prefill.agent.connect(next(iter(prefill.agent.peers)))
    assert calls["connect"] == 1
