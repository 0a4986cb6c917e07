"""Requests through slots that are given up, cut off, doubled or slow: no page is hit by a late write, every
slot comes back, and only the request concerned fails."""

from __future__ import annotations

import threading
import time

import pytest
from kv_world import PAGES, READY, TOKENS, Rank, ask, first_request, give, slots, until

from pdtransfer.contract.base import MemoryKind, Role
from pdtransfer.errors import Aborted, LayoutMismatch, TransferError
from pdtransfer.session.api import Timeouts, TransferState
from pdtransfer.session.channel import Channel
from pdtransfer.session.frames import Done, Request, SlotFilled, SlotGrant, SlotsWanted, Started

SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED
SMALL = {"staging_slot_bytes": 1024, "staging_bytes": 8192}
SRC, DST = [5, 1, 9, 2, 30, 7, 11, 12], [30, 7, 2, 3, 4, 31, 0, 8]


def all_free(rank: Rank) -> bool:
    return slots(rank) == {"free": 8, "granted": 0, "quarantined": 0}


def packs_free(rank: Rank) -> bool:
    return all(s.slots.free == s.arena.slots for s in rank.endpoint._depot._stores.values())


@pytest.mark.parametrize("strategy", ["staged", "merge"])
def test_pages_of_an_aborted_request_are_free_at_once_and_its_slots_when_its_writes_settled(world, strategy):
    prefill, (decode,) = world.pair(
        2, 1, strategy=strategy, quarantine_cap=1 << 30, **{**SMALL, "staging_bytes": 16384}
    )
    for rank in prefill:
        rank.agent.faults.stall |= {rank.agent.posts + 1, rank.agent.posts + 2}
    first = ask(decode, 1, DST)
    for rank in prefill:
        give(rank, 1, SRC)
    assert until(lambda: all(len(r.agent.faults.seen) == 2 for r in prefill))  # writes are in flight
    first.abort("retracted")
    assert first.wait(30) is FAILED and isinstance(first.error, Aborted)
    assert first.pages_releasable  # no remote write targets a page
    assert until(lambda: slots(decode)["quarantined"] > 0) and slots(decode)["granted"] == 0
    # Slots that nothing flies to are freed meanwhile.
    assert until(lambda: decode.endpoint.counters["quarantined_bytes"] == 1024 * slots(decode)["quarantined"] > 0)
    # The pages are another request's now. What is left of the slots carries it.
    decode.pool.fill(9, DST)
    second = ask(decode, 2, [20, 21])
    for rank in prefill:
        give(rank, 2, [3, 4])
    assert second.wait(30) is SUCCESS, second.error
    assert sum(world.hub.unstall(r.agent.name) for r in prefill) > 0  # the late writes
    assert until(lambda: slots(decode)["free"] == 16), slots(decode)
    assert decode.pool.holds(9, DST) and decode.pool.holds(2, [20, 21])
    assert all(until(lambda r=r: packs_free(r)) for r in prefill)


@pytest.mark.parametrize("strategy", ["sliced", "split"])
def test_pages_that_are_written_in_place_wait_for_the_writes_to_settle(world, strategy):
    (prefill,), decode = world.pair(1, 2, strategy=strategy, **SMALL)
    prefill.agent.faults.stall_all = True
    receivers = [ask(r, 1, DST) for r in decode]
    give(prefill, 1, SRC)
    assert until(lambda: len(prefill.agent.faults.seen) >= 2)
    for receiver in receivers:
        receiver.abort("retracted")
        assert receiver.wait(30) is FAILED
    time.sleep(0.2)
    assert not any(r.pages_releasable for r in receivers)
    world.hub.unstall(prefill.agent.name)
    assert all(until(lambda r=r: r.pages_releasable) for r in receivers)


@pytest.mark.parametrize("strategy", ["staged", "merge"])
@pytest.mark.parametrize("who", ["decode", "prefill"])
@pytest.mark.parametrize("after", [Request, SlotsWanted, SlotGrant, Started, SlotFilled])
def test_an_abort_at_every_step_ends_the_request_and_frees_every_slot(world, monkeypatch, strategy, who, after):
    prefill, (decode,) = world.pair(2, 1, strategy=strategy, **SMALL)
    seen = threading.Event()
    real = Channel.send

    def watch(self: Channel, frame: object) -> bool:
        sent = real(self, frame)
        if isinstance(frame, after):
            seen.set()
        return sent

    monkeypatch.setattr(Channel, "send", watch)
    receiver = ask(decode, 1, DST)
    senders = [give(r, 1, SRC) for r in prefill]
    assert seen.wait(30)
    (receiver if who == "decode" else senders[0]).abort("given up")
    state = receiver.wait(30)
    assert state in (SUCCESS, FAILED)
    if state is SUCCESS:  # it may have been faster
        assert decode.pool.holds(1, DST)
    assert until(lambda: all_free(decode)), slots(decode)
    assert until(lambda: receiver.pages_releasable)
    assert all(s.wait(30) in (SUCCESS, FAILED) for s in senders)
    assert all(until(lambda r=r: packs_free(r)) for r in prefill)
    again = ask(decode, 2, DST)
    for rank in prefill:
        give(rank, 2, SRC)
    assert again.wait(30) is SUCCESS and decode.pool.holds(2, DST)


@pytest.mark.parametrize("strategy", ["staged", "merge"])
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("lost", [Request, SlotsWanted, SlotGrant, SlotFilled, Started, Done])
def test_a_connection_that_ends_with_a_frame_loses_nothing(world, monkeypatch, strategy, lost, number):
    prefill, (decode,) = world.pair(2, 1, strategy=strategy, **SMALL)
    real, count = Channel.send, [0]

    def lose(self: Channel, frame: object) -> bool:
        if isinstance(frame, lost):
            count[0] += 1
            if count[0] == number:
                self._transport.abort()  # as a network would, with the frame in it
                return True
        return real(self, frame)

    monkeypatch.setattr(Channel, "send", lose)
    receiver = ask(decode, 1, DST)
    senders = [give(r, 1, SRC) for r in prefill]
    for transfer in (receiver, *senders):
        assert transfer.wait(30) is SUCCESS, transfer.error
    assert count[0] >= number or lost in (Request, Started, Done)  # the fault happened, where there are so many
    assert decode.pool.holds(1, DST) and decode.pool.untouched(DST)
    assert receiver.metadata == b"first token"
    assert until(lambda: all_free(decode)), slots(decode)


@pytest.mark.parametrize("strategy", ["staged", "merge", "sliced"])
def test_frames_that_come_twice_change_nothing(world, monkeypatch, strategy):
    prefill, (decode,) = world.pair(2, 1, strategy=strategy, **SMALL)
    real = Channel.send
    twice = (Request, SlotsWanted, SlotGrant, SlotFilled, Started, Done)

    def double(self: Channel, frame: object) -> bool:
        sent = real(self, frame)
        return real(self, frame) if isinstance(frame, twice) else sent

    monkeypatch.setattr(Channel, "send", double)
    for room in (1, 2):
        receiver = ask(decode, room, DST)
        for rank in prefill:
            give(rank, room, SRC)
        assert receiver.wait(30) is SUCCESS, receiver.error
        assert decode.pool.holds(room, DST) and decode.pool.untouched(DST)
    assert until(lambda: all_free(decode)), slots(decode)
    moved = decode.endpoint.counters["copied_bytes"] if strategy != "sliced" else 0
    whole = sum(a[0].nbytes for a in decode.pool.arrays.values()) * len(DST)
    assert moved == (2 * whole if strategy != "sliced" else 0)  # nothing is scattered twice


def test_many_requests_share_eight_slots_and_all_arrive(world):
    long = Timeouts(waiting=60, transfer=60, settle=0.3, connect=5, probe=20)
    prefill, (decode,) = world.pair(2, 1, strategy="staged", timeouts=long, **SMALL)
    pages = list(range(PAGES))
    receivers = {room: ask(decode, room, [pages[room]]) for room in range(PAGES)}
    for room in receivers:
        for rank in prefill:
            rank.pool.fill(room, [room])
            sender = rank.endpoint.send(room=room, tokens=TOKENS - 1)
            sender.chunk([room], 0, READY)
            sender.finish(b"m")
    for room, receiver in receivers.items():
        assert receiver.wait(60) is SUCCESS, receiver.error
        assert decode.pool.holds(room, [pages[room]])
    assert until(lambda: all_free(decode)), slots(decode)


def test_a_peer_that_stands_still_does_not_keep_the_slots_from_another(world):
    """Two prefill engines: the writes of one never end, the other's requests go through."""
    options = {"strategy": "merge", **SMALL}
    prefill = []
    for pod in ("a", "b"):
        prefill.append(
            [
                world.rank(
                    Role.PREFILL,
                    t,
                    2,
                    incarnation=f"prefill-{pod}",
                    card=lambda c, pod=pod: c.model_copy(update={"pod_uid": pod, "bootstrap": f"127.0.0.1:{ord(pod)}"}),
                    **options,
                )
                for t in range(2)
            ]
        )
    decode = world.rank(Role.DECODE, **options)
    world.wire([*prefill[0], *prefill[1]], [decode])
    for rank in prefill[0]:
        rank.agent.faults.stall_all = True

    def receive(pod: str, room: int, pages: list[int]):
        return decode.endpoint.receive(
            room=room, attempt=0, bootstrap=f"127.0.0.1:{ord(pod)}", pages=pages, tokens=len(pages) * TOKENS - 1
        )

    stuck = [receive("a", room, DST[room : room + 1]) for room in range(6)]
    for room in range(6):
        for rank in prefill[0]:
            give(rank, room, [room])
    assert until(lambda: slots(decode)["granted"] >= 4)
    fine = receive("b", 100, [20, 21, 22, 23])
    for rank in prefill[1]:
        give(rank, 100, [1, 2, 3, 4])
    assert fine.wait(30) is SUCCESS, (fine.error, slots(decode))
    assert decode.pool.holds(100, [20, 21, 22, 23])
    assert not any(r.state is SUCCESS for r in stuck)


def test_a_ready_event_that_changes_the_bytes_is_awaited_before_they_are_packed_or_posted(world):
    for strategy, p, d in (("staged", 2, 1), ("merge", 2, 1), ("split", 1, 2), ("sliced", 1, 2), ("sliced", 1, 1)):
        prefill, decode = world.pair(p, d, strategy=strategy, **SMALL)
        receivers = [ask(r, 1, [4, 5]) for r in decode]
        for rank in prefill:

            class Late:
                def __init__(self, pool, calls=0) -> None:
                    self.pool, self.calls = pool, calls

                def wait(self, timeout: float) -> bool:
                    """The bytes are there from the third look on, and not before."""
                    self.calls += 1
                    if self.calls == 3:
                        self.pool.fill(1, [1, 2])
                    return self.calls >= 3

            sender = rank.endpoint.send(room=1, tokens=2 * TOKENS - 1)
            sender.chunk([1, 2], 0, Late(rank.pool))
            sender.finish(b"m")
        for rank, receiver in zip(decode, receivers, strict=True):
            assert receiver.wait(30) is SUCCESS, receiver.error
            assert rank.pool.holds(1, [4, 5]), strategy
        world.close()
        world.ranks.clear()


@pytest.mark.parametrize(
    ("strategy", "p", "d"), [("staged", 2, 1), ("merge", 2, 1), ("split", 1, 2), ("sliced", 2, 1), ("sliced", 1, 1)]
)
def test_success_and_metadata_are_never_there_before_the_bytes(world, place, strategy, p, d):
    prefill, decode = world.pair(p, d, strategy=strategy, **SMALL)
    for room in range(5):
        receivers = [ask(r, room, DST) for r in decode]
        for rank in prefill:
            give(rank, room, SRC)
        for rank, receiver in zip(decode, receivers, strict=True):
            while receiver.metadata is None and receiver.state is not SUCCESS:
                assert receiver.state is not FAILED, receiver.error
                time.sleep(0)
            assert rank.pool.holds(room, DST)


class HeldFence:
    """A GPU's copy that is done when the test says so."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def done(self) -> bool:
        return self.over.is_set()


def test_success_waits_for_the_scatter_and_an_abort_does_not_free_its_pages_before(world):
    prefill, (decode,) = world.pair(2, 1, strategy="staged", **SMALL)
    fence = HeldFence()
    depot = decode.endpoint._depot
    real = depot.scatter
    begun: list[int] = []
    depot.scatter = lambda kind, slot, rows: (real(kind, slot, rows), begun.append(slot), fence)[2]  # type: ignore[method-assign]
    first = ask(decode, 1, [4])
    for rank in prefill:
        give(rank, 1, [1])
    assert until(lambda: begun and first.state is TransferState.TRANSFERRING)
    assert first.wait(0.3) is TransferState.TRANSFERRING and first.metadata is None
    first.abort("given up")
    assert first.wait(30) is FAILED
    time.sleep(0.2)
    assert not first.pages_releasable  # the device still writes
    fence.over.set()
    assert until(lambda: first.pages_releasable) and until(lambda: all_free(decode))
    second = ask(decode, 2, [4])
    for rank in prefill:
        give(rank, 2, [1])
    assert second.wait(30) is SUCCESS and decode.pool.holds(2, [4])


def test_nothing_is_posted_before_a_device_has_packed_it(world):
    (prefill,), decode = world.pair(1, 2, strategy="split", **SMALL)
    fence = HeldFence()
    depot = prefill.endpoint._depot
    real = depot.pack
    begun: list[int] = []
    depot.pack = lambda rows, kind, slot: (real(rows, kind, slot), begun.append(slot), fence)[2]  # type: ignore[method-assign]
    posts = prefill.agent.posts
    receivers = [ask(r, 1, [4]) for r in decode]
    give(prefill, 1, [1])
    assert until(lambda: begun)
    time.sleep(0.3)
    assert prefill.agent.posts == posts and not any(r.state is SUCCESS for r in receivers)
    fence.over.set()
    for receiver in receivers:
        assert receiver.wait(30) is SUCCESS, receiver.error


FORGED = {
    "a lane that is none": {"lane": 99},
    "regions that are not in the lane": {"first_region": 1, "regions": 99},
    "pages that were not asked for": {"first_page": 7, "pages": 2},
    "pages before the first one": {"first_page": 0},
    "more than a slot holds": {"regions": 2, "pages": 8},
}


@pytest.mark.parametrize("what", FORGED)
def test_a_filled_slot_that_makes_no_sense_fails_that_request_by_name_and_no_other(world, what):
    prefill, (decode,) = world.pair(2, 1, strategy="staged", **SMALL)
    real = prefill[0].endpoint._wiring.send

    def forge(peer, frame):
        if isinstance(frame, SlotFilled) and frame.room == 1:
            frame = frame.model_copy(update=FORGED[what])
        return real(peer, frame)

    prefill[0].endpoint._wiring.send = forge  # type: ignore[method-assign]
    receiver = decode.endpoint.receive(
        room=1, attempt=0, bootstrap="127.0.0.1:8998", pages=DST, first_page=1, tokens=9 * TOKENS - 1
    )
    for rank in prefill:
        give(rank, 1, [20, *SRC])
    assert receiver.wait(30) is FAILED and isinstance(receiver.error, LayoutMismatch), receiver.error
    assert until(lambda: all_free(decode)), slots(decode)
    other = ask(decode, 2, [4])
    for rank in prefill:
        give(rank, 2, [1])
    assert other.wait(30) is SUCCESS and decode.pool.holds(2, [4])


def test_wishes_and_grants_that_make_no_sense_are_refused_by_name(world):
    prefill, (decode,) = world.pair(2, 1, strategy="staged", **SMALL)
    cases = (
        (prefill[0], SlotsWanted, {"total": 10_000}, "total"),
        (prefill[0], SlotsWanted, {"arena": MemoryKind.VRAM}, "arena"),
        (decode, SlotGrant, {"slot": 99}, "slot"),
        (decode, SlotGrant, {"arena": MemoryKind.VRAM}, "slot"),
    )
    for room, (rank, kind, change, told) in enumerate(cases):
        real = rank.endpoint._wiring.send

        def forge(peer, frame, real=real, kind=kind, change=change):
            return real(peer, frame.model_copy(update=change) if isinstance(frame, kind) else frame)

        rank.endpoint._wiring.send = forge  # type: ignore[method-assign]
        receiver = ask(decode, room, [4])
        senders = [give(one, room, [1]) for one in prefill]
        assert receiver.wait(30) is FAILED and f"{told}:" in str(receiver.error), receiver.error
        rank.endpoint._wiring.send = real  # type: ignore[method-assign]
        for sender in senders:
            sender.abort("nobody asks")  # one that was given later than decode gave up would wait
        assert until(lambda: all_free(decode)), slots(decode)
        assert until(lambda: all(r.endpoint.inflight == 0 for r in prefill))
    assert all(r.endpoint.failed is None for r in (*prefill, decode))


def test_a_source_refuses_a_strategy_it_can_not_serve(world):
    (prefill,), decode = world.pair(1, 2, **SMALL)
    (peer,) = decode[0].endpoint._wiring._peers.values()
    request = first_request(strategy="merge")
    decode[0].endpoint._core.call(decode[0].endpoint._wiring.send, peer, request)
    posts = prefill.agent.posts
    sender = give(prefill, 1, [1])
    assert sender.wait(30) is FAILED and isinstance(sender.error, TransferError)
    assert "strategy merge" in str(sender.error) and prefill.agent.posts == posts
