"""Strided descriptor lists: what they stand for, and that the double and the real NIXL agree on it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdtransfer.agent.fake import FakeAgent, FakeHub
from pdtransfer.agent.lists import Blocks
from pdtransfer.agent.nixl import NixlAgent
from pdtransfer.agent.port import AgentFailure, AgentPort, HandleState
from pdtransfer.contract.base import MemoryKind

SIZE = 1 << 14
DRAM = MemoryKind.DRAM
SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
"""Of a machine that stands still for a second nothing is said here."""


class Pair:
    """Two agents, each with SIZE bytes registered; `a` knows `b`."""

    def __init__(self, a: AgentPort, b: AgentPort) -> None:
        self.a, self.b = a, b
        self.mine = np.random.default_rng(1).integers(1, 255, SIZE, dtype=np.uint8)
        self.theirs = np.zeros(SIZE, dtype=np.uint8)
        for agent, memory in ((a, self.mine), (b, self.theirs)):
            agent.register(np.array([[memory.ctypes.data, SIZE, 0]], dtype=np.uint64), DRAM)
        self.peer = a.add_peer(b.metadata())
        a.connect(self.peer)

    def table(self, memory: np.ndarray, rows: list[tuple[int, ...]]) -> np.ndarray:
        """Rows whose first column counts from the start of `memory`."""
        table = np.array(rows, dtype=np.uint64)
        table[:, 0] += np.uint64(memory.ctypes.data)
        return table

    def write(self, local: object, mine: list[int], remote: object, theirs: list[int]) -> None:
        handle = self.a.post("WRITE", local, np.array(mine, dtype=np.int32), remote, np.array(theirs, dtype=np.int32))
        until = time.monotonic() + 60
        while self.a.poll(handle) is not HandleState.DONE:
            self.b.progress()
            assert time.monotonic() < until, "the write did not end"
        self.a.release(handle)


def make_pair(kind: str) -> Pair:
    if kind == "fake":
        hub = FakeHub()
        return Pair(hub.agent("a"), hub.agent("b"))
    return Pair(NixlAgent(f"a-{uuid.uuid4().hex}"), NixlAgent(f"b-{uuid.uuid4().hex}"))


@pytest.fixture(params=["fake", pytest.param("nixl", marks=pytest.mark.nixl)])
def pair(request, monkeypatch) -> Iterator[Pair]:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    made = make_pair(request.param)
    yield made
    made.a.close()
    made.b.close()


@st.composite
def strided(draw) -> list[tuple[int, int, int, int, int]]:
    """Rows within SIZE bytes: offset, bytes, device, stride, count; one block size for all."""
    size = draw(st.integers(1, 96))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        stride = size + draw(st.integers(0, 64))
        count = draw(st.integers(1, 20))
        offset = draw(st.integers(0, SIZE - stride * (count - 1) - size))
        rows.append((offset, size, 0, stride, count))
    return rows


def expanded(rows: list[tuple[int, int, int, int, int]]) -> list[int]:
    """Offset of every block, one by one."""
    return [offset + i * stride for offset, _, _, stride, count in rows for i in range(count)]


@settings(deadline=None)
@given(strided(), st.data())
def test_blocks_are_numbered_row_by_row(rows, data):
    offsets = expanded(rows)
    blocks = Blocks(np.array(rows, dtype=np.uint64))
    assert len(blocks) == len(offsets)
    numbers = data.draw(st.lists(st.integers(0, len(offsets) - 1), min_size=1, max_size=30))
    found = blocks.rows(np.array(numbers, dtype=np.int32))
    assert found.tolist() == [[offsets[n], rows[0][1], 0] for n in numbers]
    assert blocks.within(np.array([[0, SIZE, 0]], dtype=np.uint64))
    end = max(offsets) + rows[0][1]
    assert not blocks.within(np.array([[0, end - 1, 0]], dtype=np.uint64))
    assert not blocks.within(np.array([[min(offsets) + 1, SIZE, 0]], dtype=np.uint64))
    assert not blocks.within(np.array([[0, SIZE, 1]], dtype=np.uint64))


@settings(max_examples=50, suppress_health_check=SLOW, deadline=None)
@given(rows=strided(), data=st.data())
def test_a_prepared_list_serves_many_writes(pair, rows, data):
    """Every block goes where a loop over the blocks would put it, and nothing else changes."""
    size, offsets = rows[0][1], expanded(rows)
    slots = SIZE // size
    pair.theirs[:] = 0
    local = pair.a.prepare(None, pair.table(pair.mine, rows), DRAM)
    remote = pair.a.prepare(pair.peer, pair.table(pair.theirs, [(0, size, 0, size, slots)]), DRAM)
    expected = np.zeros(SIZE, dtype=np.uint8)
    for _ in range(2):
        mine = data.draw(st.lists(st.integers(0, len(offsets) - 1), min_size=1, max_size=12))
        theirs = data.draw(st.lists(st.integers(0, slots - 1), min_size=len(mine), max_size=len(mine), unique=True))
        for m, t in zip(mine, theirs, strict=True):
            expected[t * size : (t + 1) * size] = pair.mine[offsets[m] : offsets[m] + size]
        pair.write(local, mine, remote, theirs)
    assert np.array_equal(pair.theirs, expected)
    for prepared in (local, remote):
        pair.a.release_prepared(prepared)


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([(0, 16, 0, 64, SIZE // 64 + 1)], "nixlNotFoundError"),  # past the end
        ([(SIZE - 15, 16, 0)], "nixlNotFoundError"),
        ([(0, 16, 0, 8, 3)], "nixlNotFoundError"),  # blocks that overlap
        ([(0, 16, 0, 0, 1)], "nixlNotFoundError"),
        ([(0, 0, 0, 64, 3)], "nixlNotFoundError"),
        ([(0, 16, 0, 64, 0)], "nixlNotFoundError"),
        ([(0, 16, 7, 64, 3)], "nixlNotFoundError"),  # another device
        ([(0, 1, 0, 1 << 62, 1 << 62)], "nixlNotFoundError"),  # wraps around 64 bits
        ([(0, 16, 0, 64)], "nixlInvalidParamError"),
    ],
)
@pytest.mark.parametrize("side", ["local", "remote"])
def test_lists_that_are_not_within_registered_memory_are_refused(pair, rows, kind, side):
    memory, peer = (pair.mine, None) if side == "local" else (pair.theirs, pair.peer)
    with pytest.raises(AgentFailure) as caught:
        pair.a.prepare(peer, pair.table(memory, rows), DRAM)
    assert caught.value.kind == kind and not caught.value.posted


@pytest.mark.parametrize("shape", [(0, 3), (0, 5)])
def test_an_empty_list_is_refused_by_name(pair, shape):
    with pytest.raises(AgentFailure, match="no descriptors"):
        pair.a.prepare(None, np.empty(shape, dtype=np.uint64), DRAM)


def test_the_last_block_needs_no_room_for_its_stride(pair):
    pair.a.prepare(None, pair.table(pair.mine, [(48, 16, 0, 64, SIZE // 64)]), DRAM)


def test_a_list_of_any_memory_order_and_integer_type_is_taken(pair):
    rows = pair.table(pair.mine, [(0, 16, 0, 64, 4), (1000, 16, 0, 32, 8)])
    for odd in (np.asfortranarray(rows), rows.astype(np.int64)):
        pair.a.prepare(None, odd, DRAM)


@pytest.mark.parametrize(("mine", "theirs"), [([4], [0]), ([-1], [0]), ([], []), ([0, 1], [0]), ([0], [8])], ids=str)
def test_wrong_indices_are_refused_and_nothing_is_posted(pair, mine, theirs):
    local = pair.a.prepare(None, pair.table(pair.mine, [(0, 16, 0, 64, 4)]), DRAM)
    remote = pair.a.prepare(pair.peer, pair.table(pair.theirs, [(0, 16, 0, 16, 8)]), DRAM)
    with pytest.raises(AgentFailure) as caught:
        pair.write(local, mine, remote, theirs)
    assert caught.value.kind == "nixlInvalidParamError" and not caught.value.posted
    assert not pair.theirs.any()


def test_blocks_of_other_sizes_released_lists_and_wrong_sides_are_refused(pair):
    local = pair.a.prepare(None, pair.table(pair.mine, [(0, 16, 0, 64, 4)]), DRAM)
    remote = pair.a.prepare(pair.peer, pair.table(pair.theirs, [(0, 16, 0, 16, 8)]), DRAM)
    wide = pair.a.prepare(pair.peer, pair.table(pair.theirs, [(0, 32, 0, 32, 8)]), DRAM)
    gone = pair.a.prepare(None, pair.table(pair.mine, [(0, 16, 0, 64, 4)]), DRAM)
    pair.a.release_prepared(gone)
    for one, other in ((local, wide), (gone, remote), (local, local), (remote, remote)):
        with pytest.raises(AgentFailure) as caught:
            pair.write(one, [0], other, [0])
        assert caught.value.kind == "nixlInvalidParamError" and not caught.value.posted
    pair.write(local, [3], remote, [5])
    assert np.array_equal(pair.theirs[80:96], pair.mine[192:208])


def test_lists_of_a_removed_peer_stay_stale_when_it_is_loaded_again(pair):
    rows = pair.table(pair.theirs, [(0, 16, 0, 16, 8)])
    local = pair.a.prepare(None, pair.table(pair.mine, [(0, 16, 0, 64, 4)]), DRAM)
    old = pair.a.prepare(pair.peer, rows, DRAM)
    pair.write(local, [0], old, [0])
    pair.a.remove_peer(pair.peer)
    for again in (False, True):
        if again:
            pair.a.add_peer(pair.b.metadata())
        with pytest.raises(AgentFailure) as caught:
            pair.write(local, [1], old, [1])
        assert caught.value.kind == "nixlNotFoundError" and not caught.value.posted
    pair.write(local, [1], pair.a.prepare(pair.peer, rows, DRAM), [1])
    assert np.array_equal(pair.theirs[:32], np.concatenate([pair.mine[0:16], pair.mine[64:80]]))


def test_an_agent_writes_into_its_own_memory_as_a_loopback(pair):
    if isinstance(pair.a, FakeAgent | NixlAgent):
        local = pair.a.prepare(None, pair.table(pair.mine, [(0, 16, 0, 64, 4)]), DRAM)
        own = pair.a.prepare(pair.a.name, pair.table(pair.mine, [(1024, 16, 0, 16, 8)]), DRAM)
        expected = pair.mine[64:80].copy()
        pair.write(local, [1], own, [2])
        assert np.array_equal(pair.mine[1056:1072], expected)
