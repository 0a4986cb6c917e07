"""Counts of a request that hold on any hardware: descriptors posted, and bytes that staging copies (the bench shows the
same two for its shapes)."""

from __future__ import annotations

import random

import pytest
from kv_world import DIMS, HEADS, LAYERS, READY, TOKENS, World, ask

from pdtransfer.session.api import TransferState

PAGES = 1024
REGIONS = LAYERS * len(DIMS)
NBYTES = PAGES * TOKENS * HEADS * sum(DIMS.values()) * 2 * LAYERS
"""Of the prompt, computed by hand: bfloat16, K and V. 1.5 MiB: some of its blocks fill a slot of 64 KiB."""


@pytest.mark.parametrize(
    ("strategy", "p", "d", "copies"),
    # How often each byte is copied in memory: packed and scattered, or one of the two.
    [("direct", 1, 1, 0), ("staged", 2, 1, 2), ("staged", 1, 2, 2), ("merge", 2, 1, 1), ("split", 1, 2, 1)],
)
def test_descriptors_and_copies_of_a_request(world: World, strategy: str, p: int, d: int, copies: int) -> None:
    forced = {"staging_bytes": 0} if strategy == "direct" else {"strategy": strategy}
    prefill, decode = world.pair(p, d, pages=PAGES, **forced)
    pages = list(range(PAGES))
    if strategy == "staged":  # no two pages are neighbours
        random.Random(7).shuffle(pages)
    receivers, senders = [ask(rank, 1, pages) for rank in decode], []
    for rank in prefill:
        for array in rank.pool.arrays.values():
            array[:] = 1
        sender = rank.endpoint.send(room=1, tokens=PAGES * TOKENS - 1)
        sender.chunk(pages if strategy == "direct" else pages[::-1], 0, READY)
        sender.finish(b"")
        senders.append(sender)
    assert [r.wait(60) for r in receivers] == [TransferState.SUCCESS] * d, [r.error for r in receivers]
    assert [s.wait(60) for s in senders] == [TransferState.SUCCESS] * p  # prefill counts after it has told decode
    assert all((array == 1).all() for rank in decode for array in rank.pool.arrays.values())

    def total(ranks: list, name: str) -> float:
        return sum(rank.endpoint.counters.get(name, 0) for rank in ranks)

    assert NBYTES == 1_572_864 == total(prefill, "bytes") == total(decode, "bytes")
    assert total(prefill, "copied_bytes") + total(decode, "copied_bytes") == copies * NBYTES
    posted = total(prefill, f"descriptors{{strategy={strategy}}}")
    if strategy in ("direct", "staged"):  # runs of pages are merged; a slot is one piece
        assert 0 < posted <= NBYTES / (64 << 10) + REGIONS * p * d
    else:  # whole pages: as many as there are, at most
        assert 0 < posted <= PAGES * REGIONS * p * d
    assert total(prefill, "handles") <= posted
