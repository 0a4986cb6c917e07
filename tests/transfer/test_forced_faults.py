"""Faults that only the double can time: a pool smaller than its card says, bytes that change on the way, staging memory
that runs out or is not there, a peer that is replaced in each phase. Each ends by name and costs itself only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kv_world import PAGES, Rank, World, ask, give, until

from pdtransfer.contract.base import Role
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.errors import ChecksumMismatch, TransferError
from pdtransfer.session.api import Timeouts, TransferState

SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED
SRC, DST = list(range(1, 13)), list(range(13, 25))


def shrink(rank: Rank, pages: int) -> None:
    """The rank's registrations end after `pages` pages, though its card goes on saying PAGES."""
    agent = rank.agent
    for number, (kind, rows) in enumerate(list(agent.regions)):
        smaller = rows.copy()
        for i, (address, size, _) in enumerate(rows.tolist()):
            if any(address == a.ctypes.data and size == a.nbytes for a in rank.pool.arrays.values()):
                smaller[i, 1] = size // PAGES * pages
        agent.regions[number] = (kind, smaller)


@pytest.mark.parametrize("side", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 1)])
def test_a_pool_smaller_than_its_card_promises_is_never_wired_and_harms_nobody(world: World, side: Role, p, d):
    prefill = [world.rank(Role.PREFILL, t, p) for t in range(p)]
    decode = [world.rank(Role.DECODE, t, d) for t in range(d)]
    liar = (prefill if side is Role.PREFILL else decode)[0]
    others = decode if side is Role.PREFILL else prefill
    shrink(liar, PAGES // 2)
    for rank in (*prefill, *decode):
        rank.endpoint.apply_peers([o.endpoint.card for o in (decode if rank in prefill else prefill)])

    def known(rank: Rank) -> bool:
        bad = (VerdictState.UNREACHABLE, VerdictState.REFUSED)
        found = [v for v in rank.endpoint.verdicts if v.peer_rank == liar.endpoint.card.rank]
        return any(v.state in bad and "nixl" in v.message for v in found)

    assert until(lambda: all(known(rank) for rank in others)), [r.endpoint.verdicts for r in others]
    assert all(rank.endpoint.failed is None for rank in (*prefill, *decode))
    for array in liar.pool.arrays.values():
        assert not array.any()


def test_a_pool_that_shrinks_after_it_was_wired_fails_its_requests_by_name_and_lands_nothing(world: World):
    (prefill,), (decode,) = world.pair()
    shrink(decode, 4)
    prefill.agent.remove_peer(decode.agent.name)  # whatever was prepared before is gone
    receiver = ask(decode, 1, DST)
    sender = give(prefill, 1, SRC)
    assert receiver.wait(30) is FAILED and sender.wait(30) is FAILED
    assert isinstance(receiver.error, TransferError) and "nixl" in str(receiver.error)
    assert decode.pool.untouched([]) and prefill.endpoint.failed is None


@pytest.mark.parametrize(
    ("strategy", "p", "d"), [("sliced", 1, 1), ("sliced", 2, 1), ("staged", 2, 1), ("merge", 2, 1), ("split", 1, 2)]
)
def test_bytes_that_change_on_the_way_are_found_by_the_digest(world: World, strategy: str, p: int, d: int):
    forced: dict[str, Any] = {"digest": True, **({} if p == d else {"strategy": strategy})}
    prefill, decode = world.pair(p, d, **forced)
    prefill[0].agent.faults.corrupt = True
    receivers = [ask(rank, 1, DST) for rank in decode]
    for rank in prefill:
        give(rank, 1, SRC)
    ends = [r.wait(30) for r in receivers]
    assert prefill[0].agent.faults.seen, "nothing was changed"
    assert FAILED in ends
    for receiver in receivers:
        assert receiver.state is SUCCESS or isinstance(receiver.error, ChecksumMismatch), receiver.error
        assert receiver.metadata is None or receiver.state is SUCCESS
        assert until(lambda r=receiver: r.pages_releasable)
    assert all(rank.endpoint.failed is None for rank in (*prefill, *decode))
    prefill[0].agent.faults.corrupt = False
    again = [ask(rank, 2, DST) for rank in decode]
    for rank in prefill:
        give(rank, 2, SRC)
    assert [r.wait(30) for r in again] == [SUCCESS] * d
    assert all(rank.pool.holds(2, DST) for rank in decode)


def test_without_the_digest_changed_bytes_succeed(world: World):
    """Negative control: the fault is real, and nothing else would have found it."""
    (prefill,), (decode,) = world.pair()
    prefill.agent.faults.corrupt = True
    receiver = ask(decode, 1, DST)
    give(prefill, 1, SRC)
    assert receiver.wait(30) is SUCCESS and not decode.pool.holds(1, DST)


def test_one_slot_of_staging_serves_many_requests_one_after_the_other(world: World):
    """Back-pressure, never failure: decode has a single slot, eight rooms want many."""
    one = {"strategy": "staged", "staging_slot_bytes": 1024, "staging_bytes": 1024}
    long = Timeouts(waiting=60, transfer=60, settle=0.5, connect=5, probe=20)
    prefill, (decode,) = world.pair(2, 1, timeouts=long, **one)
    rooms = {room: [room * 3, room * 3 + 1, room * 3 + 2] for room in range(1, 9)}
    receivers = {room: ask(decode, room, pages) for room, pages in rooms.items()}
    for room, pages in rooms.items():
        for rank in prefill:
            give(rank, room, pages)
    assert {r.wait(60) for r in receivers.values()} == {SUCCESS}, [r.error for r in receivers.values()]
    # Source pages are shared by the rooms' own numbers, so each room's bytes are its own.
    assert all(decode.pool.holds(room, pages) for room, pages in rooms.items())
    assert decode.endpoint._destination.intake.book.counts()["granted"] == 0


@pytest.mark.parametrize("side", [Role.PREFILL, Role.DECODE])
def test_staging_memory_that_is_not_there_means_writing_in_place(world: World, side: Role, monkeypatch):
    from pdtransfer.session import depot

    real = depot.Arena

    def none(*args: Any, **more: Any) -> Any:
        raise TransferError("injected: no memory for an arena")

    monkeypatch.setattr(depot, "Arena", none if side is Role.PREFILL else real)
    prefill = [world.rank(Role.PREFILL, t, 2) for t in range(2)]
    monkeypatch.setattr(depot, "Arena", none if side is Role.DECODE else real)
    decode = world.rank(Role.DECODE)
    world.wire(prefill, [decode])
    cards = [r.endpoint.card for r in (prefill if side is Role.PREFILL else [decode])]
    assert all(card.staging == () for card in cards)
    receiver = ask(decode, 1, DST)
    for rank in prefill:
        give(rank, 1, SRC)
    assert receiver.wait(30) is SUCCESS and decode.pool.holds(1, DST)


PHASES = ("before the request", "waiting", "transferring", "settling")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", [Role.PREFILL, Role.DECODE])
def test_a_peer_that_is_replaced_in_any_phase_costs_that_request_only(world: World, victim: Role, phase: str):
    quick = Timeouts(waiting=20, transfer=20, settle=0.3, connect=2, probe=20)
    (prefill,), (decode,) = world.pair(timeouts=quick)
    receiver = sender = None
    if phase in ("transferring", "settling"):
        prefill.agent.faults.stall_all = True
    if phase != "before the request":
        receiver = ask(decode, 1, DST)
    if phase in ("transferring", "settling"):
        sender = give(prefill, 1, SRC)
        assert until(lambda: prefill.agent.faults.seen and receiver.state is TransferState.TRANSFERRING)
    if phase == "settling":
        assert receiver is not None
        receiver.abort("retracted")
        assert receiver.wait(30) is FAILED
    old, other = (prefill, decode) if victim is Role.PREFILL else (decode, prefill)
    world.hub.disconnect(old.agent.name)
    old.endpoint.close()
    other.agent.faults.stall_all = False
    again = world.rank(victim, incarnation=f"{victim.value}-2", timeouts=quick)
    world.wire(*(([again], [other]) if victim is Role.PREFILL else ([other], [again])))
    for transfer in (receiver, sender):
        if transfer is not None:
            assert transfer.wait(30) is FAILED, transfer
    if receiver is not None and victim is Role.PREFILL:
        # Its process is gone: connection closed by its side, port refuses, another incarnation wired.
        assert until(lambda: receiver.pages_releasable), decode.endpoint.counters
    assert until(lambda: other.endpoint.inflight == 0), other.endpoint.inflight
    first, second = (again, other) if victim is Role.PREFILL else (other, again)
    served = ask(second, 2, DST)
    give(first, 2, SRC)
    assert served.wait(30) is SUCCESS and second.pool.holds(2, DST)
    assert other.endpoint.failed is None


def test_a_rank_whose_agent_vanishes_fails_its_requests_and_says_so(world: World):
    """The agent of a rank is destroyed under it (as after a driver's reset)."""
    (prefill,), (decode,) = world.pair()
    world.hub.disconnect(decode.agent.name)
    receiver = ask(decode, 1, DST)
    sender = give(prefill, 1, SRC)
    assert sender.wait(30) is FAILED and receiver.wait(30) is FAILED
    assert "nixlRemoteDisconnectError" in str(sender.error)
    assert np.all([not a.any() for a in decode.pool.arrays.values()])
