"""Unequal tensor parallelism over real NIXL between processes, in each strategy: byte-exact, nothing else
changes, and the bytes really went that way."""

from __future__ import annotations

import random

import pytest
from kv_world import PAGES

pytestmark = pytest.mark.nixl

MEMORY = ("DRAM", "DRAM")
DEVICE, MIXED = "gpu:VRAM", "gpu:mixed"
KINDS = [(DEVICE, DEVICE), (DEVICE, "DRAM"), ("DRAM", DEVICE), (MIXED, MIXED)]
WAYS = [("direct", 1, 1), ("sliced", 2, 1), ("sliced", 1, 2), ("staged", 2, 1), ("staged", 1, 2)]
ON_GPU = [
    pytest.param(*way, "", kinds, marks=pytest.mark.gpu)
    for way in (*WAYS, ("merge", 2, 1), ("split", 1, 2))
    for kinds in KINDS
]
LONG = {"waiting": 20, "transfer": 20, "settle": 2, "connect": 10, "probe": 20}


@pytest.mark.parametrize(
    ("strategy", "p", "d", "ucx_tls", "memory"),
    [
        ("staged", 2, 1, "", MEMORY),
        ("staged", 2, 1, "tcp", ("mixed", "mixed")),  # VRAM emulated on host memory
        ("staged", 1, 2, "tcp", MEMORY),
        ("merge", 2, 1, "", MEMORY),
        ("merge", 2, 1, "tcp", MEMORY),
        ("split", 1, 2, "", MEMORY),
        ("split", 1, 2, "tcp", MEMORY),
        ("sliced", 2, 1, "tcp", MEMORY),
        ("sliced", 1, 2, "", MEMORY),
        ("direct", 1, 1, "", MEMORY),
        *ON_GPU,
    ],
)
def test_a_strategy_moves_every_byte_between_processes(ranks, strategy, p, d, ucx_tls, memory):
    forced = "auto" if strategy == "direct" else strategy  # equal slices have nothing to choose
    config = {"strategy": forced, "staging_slot_bytes": 2048, "staging_bytes": 16384, "digest": True}
    options = {"config": config, "timeouts": LONG}
    prefill, decode = ranks.start(p, d, memory=memory, ucx_tls=ucx_tls, options=options)
    rng = random.Random(p * 10 + d)
    src = rng.sample(range(PAGES), PAGES)
    taken: list[int] = []
    for room, count in enumerate((1, 10, 15)):
        dst = rng.sample(sorted(set(range(PAGES)) - set(taken)), count)
        taken += dst
        for rank in decode:
            rank.ask("receive", room=room, pages=dst)
        for rank in prefill:
            rank.ask("send", room=room, pages=src[:count])
        for rank in (*prefill, *decode):
            done = rank.ask("wait", room=room, timeout=25)
            assert done["state"] == "Success", done
        for rank in decode:
            done = rank.ask("wait", room=room)
            assert done["metadata"] == f"room {room}" and done["releasable"]
            assert rank.ask("check", room=room, pages=dst, all=taken) == {"holds": True, "untouched": True}
    for rank in prefill:
        counters = rank.ask("counters")
        assert (counters.get("copied_bytes{operation=pack}", 0) > 0) == (strategy in ("staged", "split"))
        assert counters[f"handles{{strategy={strategy}}}"] > 0
    for rank in decode:
        counters = rank.ask("counters")
        assert (counters.get("copied_bytes{operation=scatter}", 0) > 0) == (strategy in ("staged", "merge"))
        assert counters["quarantined_bytes"] == 0
    for rank in (*prefill, *decode):
        assert rank.ask("close") == {"closed": True}
