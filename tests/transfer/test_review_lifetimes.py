"""What outlives its owner: prepared lists of a peer that left and came back, requests of a room that failed while it
was being opened, identities that are used twice, grants that nobody asked for."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from kv_world import BOOTSTRAP, READY, TOKENS, Pool, Rank, World, ask, give, handled, template, until

from pdtransfer.contract.base import MemoryKind, Role
from pdtransfer.contract.card import RankProcess
from pdtransfer.errors import LayoutMismatch, TransferError
from pdtransfer.reach import is_dead
from pdtransfer.session.api import EndpointConfig, PoolRegion, TransferState
from pdtransfer.session.endpoint import RankEndpoint
from pdtransfer.session.frames import Abort, SlotGrant

SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED
SMALL = {"staging_slot_bytes": 1024, "staging_bytes": 8192}


def held_of_peers(rank: Rank) -> tuple[int, int, int]:
    """Prepared lists and plans kept by peer on the source's side, plans on decode's."""
    endpoint = rank.endpoint
    links = endpoint._source.feeding.links
    return len(links._held), len(links._pairs._known), len(endpoint._destination.pairs._known)


@pytest.mark.parametrize("strategy", ["sliced", "staged"])
def test_a_decode_rank_that_left_the_roster_and_came_back_is_served_at_once(world: World, strategy: str):
    (prefill,), decode = world.pair(1, 2, strategy=strategy, **SMALL)
    cards = [r.endpoint.card for r in decode]
    receivers = [ask(r, 1, [1, 2]) for r in decode]
    give(prefill, 1, [3, 4])
    assert all(r.wait(30) is SUCCESS for r in receivers)
    prefill.endpoint.apply_peers([])
    assert until(lambda: not prefill.agent.peers)  # they were let go
    assert held_of_peers(prefill) == (0, 0, 0)
    prefill.endpoint.apply_peers(cards)
    assert prefill.endpoint.wait_wired(20)
    for rank in decode:
        assert rank.endpoint.wait_wired(20)
    again = [ask(r, 2, [5, 6]) for r in decode]
    give(prefill, 2, [7, 8])
    assert [r.wait(30) for r in again] == [SUCCESS, SUCCESS], [r.error for r in again]
    assert all(r.pool.holds(2, [5, 6]) for r in decode)


def test_a_prefill_rank_that_was_let_go_leaves_no_plan_at_decode(world: World):
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [1])
    give(prefill, 1, [3])
    assert receiver.wait(30) is SUCCESS
    assert held_of_peers(decode)[2] == 1
    decode.endpoint.apply_peers([])
    assert until(lambda: held_of_peers(decode) == (0, 0, 0))


def test_a_room_that_fails_as_it_opens_ends_every_request_that_waited_for_it(world: World):
    (prefill,), decode = world.pair(1, 2, strategy="sliced")
    receivers = [ask(r, 1, [1, 2]) for r in decode]
    rooms = prefill.endpoint._source._rooms
    assert until(lambda: len(rooms.pending.get(1, {})) == 2)
    broken = next(iter(rooms.pending[1].values()))

    def fail() -> None:
        raise LayoutMismatch("lists can not be made")

    broken.feeder.begin = lambda *_: fail()  # of the first of the two, as a peer's lists that are gone would
    sender = prefill.endpoint.send(room=1, tokens=2 * TOKENS - 1)
    assert sender.wait(30) is FAILED
    assert [r.wait(30) for r in receivers] == [FAILED, FAILED]  # not only at its deadline
    assert until(lambda: all(r.pages_releasable for r in receivers))
    assert until(lambda: not prefill.endpoint._core.mover.peers)  # no job is left


def test_an_identity_can_not_be_used_again_while_its_slots_are_in_quarantine(world: World):
    prefill, (decode,) = world.pair(2, 1, strategy="staged", quarantine_cap=1 << 30, **SMALL)
    for rank in prefill:
        rank.agent.faults.stall_all = True
    first = ask(decode, 1, [1, 2])
    for rank in prefill:
        give(rank, 1, [3, 4])
    assert until(lambda: all(r.agent.faults.seen for r in prefill))
    first.abort("retracted")
    assert first.wait(30) is FAILED and first.pages_releasable
    assert decode.endpoint._destination.intake.book.counts()["quarantined"] > 0
    with pytest.raises(LayoutMismatch, match="already receiving"):
        ask(decode, 1, [5, 6])
    for rank in prefill:
        rank.agent.faults.stall_all = False
        world.hub.unstall(rank.agent.name)
    assert until(lambda: decode.endpoint._destination.intake.book.counts()["free"] == 8)
    assert until(lambda: decode.endpoint.inflight == 0)


def test_slots_that_nobody_asked_for_end_the_request_that_they_name(world: World):
    prefill, (decode,) = world.pair(2, 1, strategy="staged", **SMALL)
    receiver = ask(decode, 1, [1, 2])
    source = prefill[0].endpoint._source
    assert until(lambda: source._rooms.pending.get(1))
    leg = next(iter(source._rooms.pending[1].values()))

    def flood() -> None:
        for ticket in range(10_000):
            grant = SlotGrant(**leg.request.ids, arena=MemoryKind.DRAM, slot=0, ticket=1000 + ticket)
            source.on_grant(leg.peer, grant)

    prefill[0].endpoint._core.call(flood)
    assert receiver.wait(30) is FAILED
    assert isinstance(receiver.error, TransferError) and "slot" in str(receiver.error)
    held = leg.stage.grants.values() if leg.stage is not None else ()
    assert sum(len(grants) for grants in held) <= 64


def in_both(world: World, role: Role) -> tuple[RankEndpoint, dict[str, dict[str, np.ndarray]]]:
    """A rank whose one layer lies in (emulated) VRAM and in DRAM, 8 and 16 pages of 64 bytes."""
    arrays = {m: {k: np.zeros((n, 64 * TOKENS), np.uint8) for k in "KV"} for m, n in (("VRAM", 8), ("DRAM", 16))}
    regions = [
        PoolRegion(0, kind, int(a.ctypes.data), a[0].nbytes, len(a), memory)
        for memory, kinds in arrays.items()
        for kind, a in kinds.items()
    ]
    card = template(role, Pool(0, 1), f"{role.value}-1", emulated=True)
    card = card.model_copy(update={"model": card.model.model_copy(update={"v_head_dim": 8})})
    config = EndpointConfig(listen_host="127.0.0.1", staging_bytes=0)
    endpoint = RankEndpoint(card, regions, config, lambda name, _: world.hub.agent(name))
    world.ranks.append(Rank(endpoint, Pool(0, 1), []))
    return endpoint, arrays


def test_a_page_number_of_device_memory_is_not_that_page_of_host_memory(world: World):
    (prefill, sent), (decode, got) = in_both(world, Role.PREFILL), in_both(world, Role.DECODE)
    world.wire(world.ranks[:1], world.ranks[1:])
    for kind in "KV":
        sent["VRAM"][kind][:] = np.arange(8, dtype=np.uint8)[:, None] + 1
    receivers = [
        decode.receive(room=room, attempt=0, bootstrap=BOOTSTRAP, pages=pages, tokens=2 * TOKENS, memory=memory)
        for room, memory, pages in ((1, MemoryKind.VRAM, [5, 6]), (2, MemoryKind.DRAM, [5, 14]))
    ]
    with pytest.raises(LayoutMismatch, match="is owned by"):
        decode.receive(room=3, attempt=0, bootstrap=BOOTSTRAP, pages=[14], tokens=TOKENS, memory=MemoryKind.DRAM)
    for room, page in ((1, 2), (2, 4)):
        sender = prefill.send(room=room, tokens=2 * TOKENS)
        sender.chunk([page, page + 1], 0, READY)
        sender.finish(b"")
    assert [r.wait(30) for r in receivers] == [SUCCESS, SUCCESS], [r.error for r in receivers]
    for kind in "KV":
        assert got["VRAM"][kind][:, 0].tolist() == [0, 0, 0, 0, 0, 3, 4, 0]
        assert got["DRAM"][kind][:, 0].tolist() == [*[0] * 5, 5, *[0] * 8, 6, 0]


def test_a_process_number_that_can_not_be_is_no_sign_of_death():
    mine = RankProcess(host="h", pid_namespace=1, pid=os.getpid(), started=1)
    assert is_dead(mine)  # this process began later
    assert not is_dead(mine.model_copy(update={"pid": 1 << 70}))


def test_a_slot_that_was_filled_before_the_request_was_given_up_is_not_scattered_after_it(world: World) -> None:
    """The pages are free at once, so that nothing may come into them any more."""
    prefill, (decode,) = world.pair(2, 1, strategy="staged", **SMALL)
    side = decode.endpoint._destination
    real = side.intake.on_filled
    given_up: list[int] = []

    def on_filled(receive: Any, leg: Any, frame: Any) -> None:
        real(receive, leg, frame)
        if not given_up:
            given_up.append(len(side.intake._filled))
            side._abort((1, 0), "retracted")

    side.intake.on_filled = on_filled  # type: ignore[method-assign]
    receiver = ask(decode, 1, [1, 2])
    for rank in prefill:
        give(rank, 1, [3, 4])
    assert receiver.wait(30) is FAILED and given_up == [1]  # a block was waiting for its turn
    assert until(lambda: receiver.pages_releasable and decode.endpoint.inflight == 0)
    handled(decode)
    assert decode.pool.untouched([]) and not decode.endpoint.counters.get("copied_bytes{operation=scatter}")


def test_an_abort_that_was_lost_with_its_connection_is_said_again_on_the_next_one(world: World) -> None:
    """Or the pages would wait for a new agent, which is a minute away."""
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4])
    assert until(lambda: prefill.endpoint.asked(1) is not None)
    hooks, lost = prefill.endpoint._wiring.hooks, []
    real = hooks.on_frame

    def on_frame(peer: Any, frame: Any) -> None:
        if isinstance(frame, Abort) and not lost:
            lost.append(frame)
            peer.channel.close()
        else:
            real(peer, frame)

    hooks.on_frame = on_frame  # type: ignore[method-assign]
    receiver.abort("retracted")
    assert receiver.wait(30) is FAILED and until(lambda: lost)
    assert until(lambda: receiver.pages_releasable)
    assert decode.endpoint.card.generation == 0
    # It is counted, and the receive forgotten, just after its pages are free.
    assert until(lambda: decode.endpoint.counters.get("quarantine_released{fence=acknowledged}") == 1)
    assert until(lambda: decode.endpoint.inflight == 0)
