"""Every state of a transfer has a deadline of its own, on both sides: in each case one of them is short, all others are
a minute, and its error and its count tell which one it was."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from kv_world import READY, TOKENS, Rank, World, ask, give, until

from pdtransfer.contract.base import Role
from pdtransfer.errors import DeadlineExceeded, PeerUnreachable
from pdtransfer.session.api import Timeouts, TransferState

FAILED, TRANSFERRING = TransferState.FAILED, TransferState.TRANSFERRING
LONG = Timeouts(waiting=60, transfer=60, settle=60, connect=60, probe=60)
SMALL: dict[str, Any] = {"staging_slot_bytes": 1024, "staging_bytes": 8192}


class Never:
    """A ready event that is never set."""

    def wait(self, timeout: float) -> bool:
        return False


def pair(
    world: World, p: int = 1, d: int = 1, *, prefill: Timeouts = LONG, decode: Timeouts = LONG, **options: Any
) -> tuple[list[Rank], list[Rank]]:
    """Wired ranks; each role has timeouts of its own."""
    sources = [world.rank(Role.PREFILL, t, p, timeouts=prefill, **options) for t in range(p)]
    targets = [world.rank(Role.DECODE, t, d, timeouts=decode, **options) for t in range(d)]
    world.wire(sources, targets)
    return sources, targets


def passed(rank: Rank) -> dict[str, float]:
    """Deadlines that passed at a rank, by state, those of probes and of connections at start apart."""
    found = {k: v for k, v in rank.endpoint.counters.items() if k.startswith("deadlines{") and v}
    return {k.split("=")[1].rstrip("}"): v for k, v in found.items()}


def begin(rank: Rank, pages: int = 1) -> Any:
    return rank.endpoint.send(room=1, tokens=pages * TOKENS - 1)


# --- prefill ----------------------------------------------------------------------------------


def test_a_send_that_some_decode_ranks_never_ask_for(world: World) -> None:
    (prefill,), decode = pair(world, 1, 2, prefill=replace(LONG, waiting=2))  # the one that asks comes in time
    ask(decode[0], 1, [4])
    sender = give(prefill, 1, [1])
    assert sender.wait(30) is FAILED and isinstance(sender.error, DeadlineExceeded)
    assert "1 of 2 decode ranks asked in time" in str(sender.error)
    assert passed(prefill) == {"waiting": 1}


def test_a_request_that_the_engine_never_serves(world: World) -> None:
    (prefill,), (decode,) = pair(world, prefill=replace(LONG, waiting=0.3))
    receiver = ask(decode, 1, [4])
    assert receiver.wait(30) is FAILED and isinstance(receiver.error, DeadlineExceeded)
    assert "prefill did not start in time" in str(receiver.error)
    assert passed(prefill) == {"waiting": 1} and passed(decode) == {}
    assert until(lambda: receiver.pages_releasable) and until(lambda: prefill.endpoint.inflight == 0)


def test_an_engine_that_begins_a_room_and_hands_nothing_over(world: World) -> None:
    (prefill,), (decode,) = pair(world, prefill=replace(LONG, waiting=1.5, transfer=0.2))  # it is begun in time
    receiver, sender = ask(decode, 1, [4]), begin(prefill)
    assert sender.wait(30) is FAILED and receiver.wait(30) is FAILED
    assert "handed over nothing more" in str(sender.error) and isinstance(receiver.error, DeadlineExceeded)
    assert passed(prefill) == {"ready": 1}
    assert until(lambda: receiver.pages_releasable)


def test_a_ready_event_that_never_comes(world: World) -> None:
    (prefill,), (decode,) = pair(world, prefill=replace(LONG, transfer=0.3))
    receiver, sender = ask(decode, 1, [4]), begin(prefill)
    posts = prefill.agent.posts
    sender.chunk([1], 0, Never())
    sender.finish(b"")
    assert sender.wait(30) is FAILED and receiver.wait(30) is FAILED
    assert "ready event never came" in str(sender.error) and "ready event never came" in str(receiver.error)
    assert passed(prefill) == {"ready": 1} and prefill.agent.posts == posts
    assert until(lambda: receiver.pages_releasable)


def test_an_engine_that_stops_between_two_chunks(world: World) -> None:
    (prefill,), (decode,) = pair(world, prefill=replace(LONG, transfer=0.3))
    receiver = ask(decode, 1, [4, 5])
    sender = begin(prefill, 2)
    sender.chunk([1], 0, READY)
    assert sender.wait(30) is FAILED and receiver.wait(30) is FAILED
    assert isinstance(sender.error, DeadlineExceeded) and "did not finish in time" in str(sender.error)
    assert passed(prefill) == {"transfer": 1}
    assert until(lambda: receiver.pages_releasable)


def test_decode_that_lends_no_slot(world: World) -> None:
    short = replace(LONG, transfer=0.3, settle=0.2)  # the other rank's room ends once decode has given up
    prefill, (decode,) = pair(world, 2, 1, prefill=short, strategy="staged", **SMALL)
    decode.endpoint._destination.intake.book.lend = lambda: iter(())  # type: ignore[method-assign]
    receiver = ask(decode, 1, [4])
    senders = [give(rank, 1, [1]) for rank in prefill]
    assert receiver.wait(30) is FAILED and [s.wait(30) for s in senders] == [FAILED, FAILED]
    assert isinstance(receiver.error, DeadlineExceeded)
    assert "transfer" in {**passed(prefill[0]), **passed(prefill[1])}
    assert until(lambda: receiver.pages_releasable)


def test_writes_that_hang_have_a_deadline_and_their_settling_another(world: World) -> None:
    (prefill,), (decode,) = pair(world, prefill=replace(LONG, transfer=0.3, settle=0.2))
    prefill.agent.faults.stall_all = True
    receiver, sender = ask(decode, 1, [4]), give(prefill, 1, [1])
    assert sender.wait(30) is FAILED and receiver.wait(30) is FAILED
    assert prefill.agent.faults.seen
    assert passed(prefill) == {"transfer": 1, "settle": 1} and not receiver.pages_releasable
    world.hub.unstall(prefill.agent.name)
    assert until(lambda: receiver.pages_releasable)


def test_a_room_that_decode_gave_up_and_never_takes_up_again(world: World) -> None:
    (prefill,), (decode,) = pair(world, prefill=replace(LONG, settle=0.3))
    receiver, sender = ask(decode, 1, [4]), begin(prefill)
    assert until(lambda: prefill.endpoint.asked(1) is not None)
    receiver.abort("retracted")
    assert sender.wait(30) is FAILED and "retracted" in str(sender.error)
    assert until(lambda: prefill.endpoint.inflight == 0)


def test_a_decode_rank_that_stands_still(world: World) -> None:
    """Its connection stays open, as that of a stopped process does."""
    (prefill,), (decode,) = pair(world, prefill=replace(LONG, connect=2.0))
    ask(decode, 1, [4])
    sender = begin(prefill)
    assert until(lambda: prefill.endpoint.asked(1) is not None)
    with stopped(decode):
        assert sender.wait(30) is FAILED and isinstance(sender.error, PeerUnreachable)


# --- decode -----------------------------------------------------------------------------------


def test_a_receive_that_is_never_begun(world: World) -> None:
    _, (decode,) = pair(world, decode=replace(LONG, waiting=0.3))
    receiver = ask(decode, 1, [4])
    assert receiver.wait(30) is FAILED and isinstance(receiver.error, DeadlineExceeded)
    assert "Waiting for too long" in str(receiver.error) and "prefill-pod/0" in str(receiver.error)
    assert passed(decode) == {"waiting": 1}
    assert until(lambda: receiver.pages_releasable)


@pytest.mark.parametrize(("strategy", "p", "d"), [("sliced", 1, 1), ("staged", 2, 1), ("split", 1, 2)])
def test_a_receive_whose_bytes_stop_coming(world: World, strategy: str, p: int, d: int) -> None:
    forced = {} if p == d else {"strategy": strategy, **SMALL}
    prefill, decode = pair(world, p, d, decode=replace(LONG, transfer=1.5), **forced)  # all sources begin in time
    for rank in prefill:
        rank.agent.faults.stall_all = True
    receivers = [ask(rank, 1, [4]) for rank in decode]
    for rank in prefill:
        give(rank, 1, [1])
    assert [r.wait(30) for r in receivers] == [FAILED] * d
    assert "Transferring for too long" in str(receivers[0].error), receivers[0].error
    assert all(isinstance(r.error, DeadlineExceeded) for r in receivers)
    assert all(rank.agent.faults.seen for rank in prefill) and passed(decode[0]) == {"transfer": 1}


def test_a_prefill_rank_that_stands_still(world: World) -> None:
    (prefill,), (decode,) = pair(world, decode=replace(LONG, connect=2.0))
    receiver = ask(decode, 1, [4])
    assert until(lambda: prefill.endpoint.asked(1) is not None)
    with stopped(prefill):
        assert receiver.wait(30) is FAILED and isinstance(receiver.error, PeerUnreachable)
        assert not receiver.pages_releasable  # it may write when it goes on
    assert until(lambda: receiver.pages_releasable)


class stopped:
    """The rank's thread does nothing inside the block: no frame is read or answered, no connection accepted."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._go, self._at = rank, threading.Event(), threading.Event()

    def __enter__(self) -> None:
        def hang() -> None:
            self._at.set()
            self._go.wait(60)

        self._rank.endpoint._core.call(hang)
        assert self._at.wait(20)

    def __exit__(self, *_: object) -> None:
        self._go.set()


# --- what goes on has time --------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "p", "d"), [("sliced", 1, 1), ("staged", 2, 1), ("merge", 2, 1)])
def test_each_chunk_moves_the_deadlines_of_both_sides_on(world: World, strategy: str, p: int, d: int) -> None:
    forced = {} if p == d else {"strategy": strategy, **SMALL}
    prefill, (decode,) = pair(world, p, d, **forced)
    receiver = ask(decode, 1, [4, 5, 6])
    senders = []
    for rank in prefill:
        rank.pool.fill(1, [1, 2, 3])
        senders.append(begin(rank, 3))
    assert until(lambda: all(rank.endpoint.asked(1) for rank in prefill))
    before: tuple[float, ...] = ()
    for page in range(3):
        for sender in senders:
            sender.chunk([1 + page], page, READY)
        assert until(lambda page=page: all(a[4 + page].any() for a in decode.pool.arrays.values()))
        if before:
            assert until(
                lambda before=before: all(a > b for a, b in zip(deadlines(prefill, decode), before, strict=True))
            )
        # One source's bytes are enough for the page to show: the other's job has no deadline before its first chunk.
        assert until(lambda: math.inf not in deadlines(prefill, decode))
        before = deadlines(prefill, decode)
    for sender in senders:
        sender.finish(b"")
    assert receiver.wait(30) is TransferState.SUCCESS and decode.pool.holds(1, [4, 5, 6])


def deadlines(prefill: list[Rank], decode: Rank) -> tuple[float, ...]:
    """Of the receive, and of what each source sends (monotonic seconds)."""
    rooms = [rank.endpoint._source._rooms.open[1] for rank in prefill]
    jobs = [leg.job.deadline for room in rooms for leg in room.legs.values() if leg.job is not None]
    return decode.endpoint._destination._live[1, 0].deadline, *(room.deadline for room in rooms), *jobs


def moved_on(old: tuple[float, ...], new: tuple[float, ...]) -> bool:
    return all(b > a for a, b in zip(old, new, strict=True))


def test_each_block_through_a_slot_moves_the_deadlines_of_both_sides_on(world: World) -> None:
    """A single slot: no block is placed before the last one was scattered. Only the first ones come with news of
    the chunk."""
    one = {"strategy": "staged", "staging_slot_bytes": 256, "staging_bytes": 256}
    (prefill,), decode = pair(world, 1, 2, **one)
    seen: list[tuple[float, float]] = []
    side, source = decode[0].endpoint._destination, prefill.endpoint._source
    real = side.intake.on_filled

    def on_filled(receive: Any, mine: Any, frame: Any) -> None:
        if (room := source._rooms.open.get(1)) is not None:  # else it has placed everything
            seen.extend((receive.deadline, leg.job.deadline) for key, leg in room.legs.items() if key[1] == 0)
        real(receive, mine, frame)

    side.intake.on_filled = on_filled  # type: ignore[method-assign]
    receivers = [ask(rank, 1, [4, 5, 6, 7]) for rank in decode]
    give(prefill, 1, [1, 2, 3, 4])
    assert [r.wait(60) for r in receivers] == [TransferState.SUCCESS] * 2, [r.error for r in receivers]
    assert len(seen) >= 8
    later = seen[4:]
    assert all(moved_on(old, new) for old, new in pairwise(later)), seen
