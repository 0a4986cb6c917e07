"""Chunks by layer, other page spaces, layers in both memory kinds, and digests: over the fake agent."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest
from kv_world import BOOTSTRAP, LAYERS, READY, TOKENS, Pool, World, ask, give, template, until
from places import DEVICES, address_of

from pdtransfer.agent.nixl import NixlAgent
from pdtransfer.agent.port import AgentPort
from pdtransfer.contract.base import MemoryKind, Role
from pdtransfer.errors import BadInput, ChecksumMismatch, LayoutMismatch
from pdtransfer.session.api import EndpointConfig, PoolRegion, TransferState
from pdtransfer.session.endpoint import RankEndpoint

SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED
SMALL = {"staging_slot_bytes": 1024, "staging_bytes": 8192}
WAYS = [("staged", 2, 1), ("merge", 2, 1), ("split", 1, 2), ("sliced", 2, 1), ("sliced", 1, 1)]
SRC, DST = [5, 1, 9, 2, 8], [30, 7, 2, 3, 4]


@pytest.mark.parametrize(("strategy", "p", "d"), WAYS)
def test_layers_stream_one_by_one_and_chunks_overlap_in_any_order(world, place, strategy, p, d):
    prefill, decode = world.pair(p, d, strategy=strategy, **SMALL)
    receivers = [ask(r, 1, DST) for r in decode]
    rng = random.Random(p * 10 + d)
    for rank in prefill:
        rank.pool.fill(1, SRC)
        sender = rank.endpoint.send(room=1, tokens=len(SRC) * TOKENS - 1)
        parts = [(layer, first) for layer in range(LAYERS) for first in range(0, len(SRC), 2)]
        for layer, first in rng.sample(parts, len(parts)):
            sender.chunk(SRC[first : first + 3], first, READY, layers=range(layer, layer + 1))
        sender.chunk(SRC, 0, READY)  # what is left: nothing
        sender.finish(b"m")
    for rank, receiver in zip(decode, receivers, strict=True):
        assert receiver.wait(30) is SUCCESS, receiver.error
        assert rank.pool.holds(1, DST) and rank.pool.untouched(DST)


def test_a_layer_that_is_never_handed_over_fails_the_request_by_name(world):
    prefill, (decode,) = world.pair(2, 1, strategy="staged", **SMALL)
    receiver = ask(decode, 1, DST)
    for rank in prefill:
        rank.pool.fill(1, SRC)
        sender = rank.endpoint.send(room=1, tokens=len(SRC) * TOKENS - 1)
        sender.chunk(SRC, 0, READY, layers=range(1))
        sender.finish(b"m")
    assert receiver.wait(30) is FAILED and "0 of 5 pages" in str(receiver.error)


def test_layers_that_leave_some_out_are_refused_where_they_are_given(world):
    prefill, _ = world.pair(1, 1)
    sender = prefill[0].endpoint.send(room=1, tokens=TOKENS)
    with pytest.raises(BadInput, match="layers"):
        sender.chunk([1], 0, READY, layers=range(0, 4, 2))


class Custom:
    """One rank over regions of its own: (layer, kind, memory, pool) to (items, bytes an item)."""

    def __init__(self, world: World, role: Role, tp: int, tp_size: int, shape: dict, **config) -> None:
        place = world.place
        self.arrays = {key: place.array(of, np.uint8, key[2]) for key, of in shape.items()}
        regions = [
            PoolRegion(layer, kind, address_of(a), a[0].nbytes, len(a), memory, pool=pool)
            for (layer, kind, memory, pool), a in self.arrays.items()
        ]

        def agent(name: str, _: EndpointConfig) -> AgentPort:
            return NixlAgent(name, net_devices="lo") if place.gpu else world.hub.agent(name)

        card = template(role, Pool(tp, tp_size), f"{role.value}-1", emulated=place.emulated)
        self.endpoint = RankEndpoint(card, regions, EndpointConfig(listen_host="127.0.0.1", **config), agent)
        world.ranks.append(self)  # type: ignore[arg-type]


def heads_of(tp: int, size: int, heads: int = 4) -> tuple[int, int]:
    return tp * heads // size, heads // size


def page_of(layer: int, kind: str, page: int) -> np.ndarray:
    """(tokens, heads, bytes) of one page over all heads."""
    rng = np.random.default_rng([layer, ord(kind), page])
    return rng.integers(1, 256, (TOKENS, 4, HEAD[kind]), dtype=np.uint8)


HEAD = {"K": 16, "V": 32}
"""Bytes of a head of one token: 8 and 16 dims of bfloat16 (kv_world's model)."""


def page_bytes(kind: str, size: int) -> int:
    return TOKENS * (4 // size) * HEAD[kind]


@pytest.mark.parametrize(("strategy", "p", "d"), WAYS)
def test_window_pages_and_state_of_other_page_spaces_travel_beside_the_kv(world, strategy, p, d):
    """Layer 0 in the KV pages, layer 1 in a sliding window's own pages, and a state slot every rank holds."""

    def shape(size: int) -> dict:
        kv = {(0, kind, "DRAM", ""): (16, page_bytes(kind, size)) for kind in "KV"}
        window = {(1, kind, "DRAM", "swa"): (8, page_bytes(kind, size)) for kind in "KV"}
        # A state slot is refused by name where TP differs: it is not sliced.
        return {**kv, **window, **({(2, "STATE", "DRAM", "slots"): (4, 100)} if p == d else {})}

    prefill = [Custom(world, Role.PREFILL, t, p, shape(p), strategy=strategy, **SMALL) for t in range(p)]
    decode = [Custom(world, Role.DECODE, t, d, shape(d), strategy=strategy, **SMALL) for t in range(d)]
    world.wire(prefill, decode)  # type: ignore[arg-type]
    kv = ([3, 9, 1], [2, 15, 7])
    window, state = ([6, 2], [1, 5]), ([3], [0])
    pools = [{"swa": window[i], **({"slots": state[i]} if p == d else {})} for i in (0, 1)]
    receivers = [
        r.endpoint.receive(room=1, attempt=0, bootstrap=BOOTSTRAP, pages=kv[1], tokens=3 * TOKENS, pools=pools[1])
        for r in decode
    ]
    for tp, rank in enumerate(prefill):
        first, count = heads_of(tp, p)
        for layer, pages in ((0, kv[0]), (1, window[0])):
            for kind in "KV":
                pool = rank.arrays[layer, kind, "DRAM", "" if layer == 0 else "swa"]
                for i, page in enumerate(pages):
                    pool[page] = page_of(layer, kind, i)[:, first : first + count].ravel()
        if p == d:
            rank.arrays[2, "STATE", "DRAM", "slots"][3] = np.arange(100)
        sender = rank.endpoint.send(room=1, tokens=3 * TOKENS)
        sender.chunk(kv[0], 0, READY)
        sender.chunk([], 0, READY, pools=pools[0])
        sender.finish(b"m")
    for tp, (rank, receiver) in enumerate(zip(decode, receivers, strict=True)):
        assert receiver.wait(30) is SUCCESS, receiver.error
        first, count = heads_of(tp, d)
        for layer, pages in ((0, kv[1]), (1, window[1])):
            for kind in "KV":
                pool = rank.arrays[layer, kind, "DRAM", "" if layer == 0 else "swa"]
                for i, page in enumerate(pages):
                    assert (pool[page] == page_of(layer, kind, i)[:, first : first + count].ravel()).all()
                assert not np.delete(pool, pages, axis=0).any()
        if p == d:
            slots = rank.arrays[2, "STATE", "DRAM", "slots"]
            assert (slots[0] == np.arange(100)).all() and not slots[1:].any()


def test_a_missing_page_list_of_another_page_space_is_named(world):
    shape = {(0, kind, "DRAM", ""): (8, page_bytes(kind, 1)) for kind in "KV"}
    shape[1, "STATE", "DRAM", "slots"] = (4, 100)
    prefill = Custom(world, Role.PREFILL, 0, 1, shape)
    decode = Custom(world, Role.DECODE, 0, 1, shape)
    world.wire([prefill], [decode])  # type: ignore[list-item]
    with pytest.raises(LayoutMismatch, match="slots"):
        decode.endpoint.receive(room=1, attempt=0, bootstrap=BOOTSTRAP, pages=[1], tokens=TOKENS)
    for given, told in (({}, "other pools"), ({"slots": [1, 2]}, "'slots'")):
        receiver = decode.endpoint.receive(
            room=len(given), attempt=0, bootstrap=BOOTSTRAP, pages=[1], tokens=TOKENS, pools={"slots": [1]}
        )
        sender = prefill.endpoint.send(room=len(given), tokens=TOKENS)
        sender.chunk([1], 0, READY, pools=given)
        sender.finish(b"")
        assert receiver.wait(30) is FAILED and told in str(receiver.error), receiver.error


@pytest.mark.parametrize(("strategy", "p", "d"), WAYS)
@pytest.mark.parametrize("into", [MemoryKind.VRAM, MemoryKind.DRAM])
@pytest.mark.parametrize("place", DEVICES, indirect=True)
def test_a_layer_in_both_memory_kinds_comes_from_and_goes_where_the_calls_say(world, place, strategy, p, d, into):
    def shape(size: int) -> dict:
        return {(0, k, memory, ""): (16, page_bytes(k, size)) for memory in ("VRAM", "DRAM") for k in "KV"}

    prefill = [Custom(world, Role.PREFILL, t, p, shape(p), strategy=strategy, **SMALL) for t in range(p)]
    decode = [Custom(world, Role.DECODE, t, d, shape(d), strategy=strategy, **SMALL) for t in range(d)]
    world.wire(prefill, decode)  # type: ignore[arg-type]
    with pytest.raises(LayoutMismatch, match="the request must say which"):
        decode[0].endpoint.receive(room=9, attempt=0, bootstrap=BOOTSTRAP, pages=[1], tokens=TOKENS)
    receivers = [
        r.endpoint.receive(room=1, attempt=0, bootstrap=BOOTSTRAP, pages=[2, 15], tokens=2 * TOKENS, memory=into)
        for r in decode
    ]
    for tp, rank in enumerate(prefill):
        first, count = heads_of(tp, p)
        sender = rank.endpoint.send(room=1, tokens=2 * TOKENS)
        for i, (page, memory) in enumerate(((3, MemoryKind.DRAM), (9, MemoryKind.VRAM))):
            for kind in "KV":
                rank.arrays[0, kind, memory.value, ""][page] = page_of(0, kind, i)[:, first : first + count].ravel()
            sender.chunk([page], i, READY, memory=memory)
        sender.finish(b"m")
    for tp, (rank, receiver) in enumerate(zip(decode, receivers, strict=True)):
        assert receiver.wait(30) is SUCCESS, receiver.error
        first, count = heads_of(tp, d)
        for kind in "KV":
            pool = rank.arrays[0, kind, into.value, ""]
            for i, page in enumerate((2, 15)):
                assert (pool[page] == page_of(0, kind, i)[:, first : first + count].ravel()).all()
            other = "DRAM" if into is MemoryKind.VRAM else "VRAM"
            assert not rank.arrays[0, kind, other, ""][:].any()


@pytest.mark.parametrize(("strategy", "p", "d"), WAYS)
def test_a_digest_is_compared_and_wrong_bytes_are_never_a_success(world, strategy, p, d):
    prefill, decode = world.pair(p, d, strategy=strategy, digest=True, **SMALL)
    for corrupt in (False, True):
        for rank in prefill:
            rank.agent.faults.corrupt = corrupt
        receivers = [ask(r, 1 + corrupt, DST) for r in decode]
        for rank in prefill:
            give(rank, 1 + corrupt, SRC)
        states = [r.wait(30) for r in receivers]
        if not corrupt:
            assert states == [SUCCESS] * d, [r.error for r in receivers]
            assert all(r.pool.holds(1, DST) for r in decode)
            continue
        assert all(any("corrupt" in s for s in r.agent.faults.seen) for r in prefill)  # the fault happened
        assert states == [FAILED] * d
        for receiver in receivers:
            assert isinstance(receiver.error, ChecksumMismatch), receiver.error
            assert receiver.metadata is None and until(lambda r=receiver: r.pages_releasable)


def test_a_byte_that_changes_in_the_slot_is_found(world):
    """The wire is sound, the arena is not: what is scattered is what the digest is about."""
    prefill, (decode,) = world.pair(2, 1, strategy="staged", digest=True, **SMALL)
    depot = decode.endpoint._depot
    real = depot.scatter

    def flip(kind, slot, rows):
        arena = depot._stores[kind].arena
        at = arena.address + slot * arena.slot_bytes
        ctypes.memset(at, ctypes.string_at(at, 1)[0] ^ 1, 1)
        return real(kind, slot, rows)

    depot.scatter = flip  # type: ignore[method-assign]
    receiver = ask(decode, 1, DST)
    for rank in prefill:
        give(rank, 1, SRC)
    assert receiver.wait(30) is FAILED and isinstance(receiver.error, ChecksumMismatch)
