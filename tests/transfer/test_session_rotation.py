"""The last fence over the fake agent: a decode rank takes a new agent, peers follow, the old one is destroyed
and what waited is free; what goes wrong on the way costs itself only."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

import pytest
from kv_world import PAGES, READY, TOKENS, Rank, World, ask, give, handled, until

from pdtransfer.agent.port import AgentFailure
from pdtransfer.contract.base import Role
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.errors import DeadlineExceeded
from pdtransfer.session.api import Timeouts, TransferState
from pdtransfer.session.frames import Rotated

SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED
TIMES = Timeouts(waiting=20, transfer=20, settle=0.2, connect=5, probe=20, quarantine=0.3, rotation=20)
PAGE_BYTES = 2 * (256 + 512)
"""2 layers of K and V: 4 tokens, 4 heads, 8 or 16 dims of 2 bytes."""


def lose_a_handle(prefill: Rank, decode: Rank, room: int, pages: list[int]):
    """A transfer whose handle errors: the source can never say that nothing of it will land."""
    prefill.agent.faults.error.add(prefill.agent.posts + 1)
    receiver = ask(decode, room, pages)
    give(prefill, room, list(range(1, len(pages) + 1)))
    assert receiver.wait(30) is FAILED
    assert any("error" in s for s in prefill.agent.faults.seen)
    return receiver


def moves(prefill: Rank, decode: Rank, room: int, pages: list[int]) -> None:
    receiver = ask(decode, room, pages)
    sender = give(prefill, room, list(range(1, len(pages) + 1)))
    assert receiver.wait(30) is SUCCESS, receiver.error
    assert sender.wait(30) is SUCCESS, sender.error
    assert decode.pool.holds(room, pages)


def held_rotation(decode: Rank) -> threading.Event:
    """It takes no new agent before the event is set, however long the test takes to come there."""
    core, go_on = decode.endpoint._core, threading.Event()
    make = core.make_agent
    core.make_agent = lambda name: (go_on.wait(60), make(name))[1]
    return go_on


def generation(rank: Rank) -> int:
    return rank.endpoint.card.generation


def test_pages_that_wait_too_long_are_free_after_a_new_agent_and_the_late_write_does_not_land(world):
    (prefill,), (decode,) = world.pair(timeouts=TIMES)
    first, go_on = decode.agent, held_rotation(decode)
    receiver = lose_a_handle(prefill, decode, 1, [4, 5])
    assert not receiver.pages_releasable  # before there is a new agent
    go_on.set()
    assert until(lambda: receiver.pages_releasable)
    assert [a.name for a in decode.agents] == [first.name, f"{first.name}.1"]
    assert first.name in world.hub.destroyed and generation(decode) == 1
    for array in decode.pool.arrays.values():
        array[:] = 7  # the pages are another request's
    world.hub.unstall(prefill.agent.name)
    assert any("fenced" in s for s in prefill.agent.faults.seen)  # it came, late
    assert all((array == 7).all() for array in decode.pool.arrays.values())
    assert until(lambda: decode.endpoint.counters.get("rotations{outcome=succeeded}") == 1)
    counters = decode.endpoint.counters
    assert counters["quarantined_bytes"] == 0 and counters["quarantine_released{fence=rotation}"] == 1
    moves(prefill, decode, 2, [4, 5])
    assert until(lambda: prefill.endpoint.inflight == 0 and prefill.agent.peers == {decode.agent.name})


def test_without_the_fence_the_late_write_lands(world):
    """Negative control of the test above: the same fault, and no new agent."""
    (prefill,), (decode,) = world.pair()
    receiver = lose_a_handle(prefill, decode, 1, [4, 5])
    for array in decode.pool.arrays.values():
        array[:] = 7
    world.hub.unstall(prefill.agent.name)
    assert not receiver.pages_releasable
    assert not all((array == 7).all() for array in decode.pool.arrays.values())


def test_a_transfer_that_began_before_goes_on_to_the_old_agent_which_lives_until_it_ends(world):
    (prefill,), (decode,) = world.pair(timeouts=TIMES)
    first = decode.agent
    healthy = ask(decode, 7, [8, 9])
    prefill.pool.fill(7, [20, 21])
    sender = prefill.endpoint.send(room=7, tokens=2 * TOKENS - 1)
    sender.chunk([20], 0, READY)
    assert until(lambda: healthy.state is TransferState.TRANSFERRING)
    assert until(lambda: decode.pool.holds(7, [8]))  # all of the chunk: the fault is for the next post
    lost = lose_a_handle(prefill, decode, 1, [4, 5])
    assert until(lambda: generation(decode) == 1)
    moves(prefill, decode, 2, [12])  # to the new one, while the old one lives
    assert first.alive and not lost.pages_releasable
    posted = len(prefill.agent.handles)
    sender.chunk([21], 1, READY)
    sender.finish(b"late")
    assert healthy.wait(30) is SUCCESS and decode.pool.holds(7, [8, 9])
    assert first.name in {h.peer for h in prefill.agent.handles[posted:] if h.landed}
    assert until(lambda: lost.pages_releasable) and not first.alive


def test_a_transfer_that_hangs_on_the_old_agent_fails_by_name_when_the_rotation_has_waited_long_enough(world):
    times = replace(TIMES, rotation=0.5)
    (prefill,), (decode,) = world.pair(timeouts=times)
    hangs = ask(decode, 7, [8])
    sender = prefill.endpoint.send(room=7, tokens=TOKENS - 1)
    lost = lose_a_handle(prefill, decode, 1, [4, 5])
    assert until(lambda: lost.pages_releasable)
    assert hangs.wait(30) is FAILED and isinstance(hangs.error, DeadlineExceeded)
    assert "agent" in str(hangs.error) and hangs.pages_releasable
    assert sender.wait(30) is FAILED and "gone" in str(sender.error)
    moves(prefill, decode, 8, [8, 4])


def cut(rank: Rank) -> None:
    """End every control connection from this side."""
    done = []
    rank.endpoint._core.call(
        lambda: done.append([p.channel.close() for p in rank.endpoint._wiring.known() if p.channel])
    )
    assert until(lambda: done)


def test_a_peer_that_was_away_learns_of_the_new_agent_before_it_may_post(world):
    (prefill,), (decode,) = world.pair(timeouts=TIMES)
    listener, go_on = decode.endpoint._wiring, held_rotation(decode)
    lost = lose_a_handle(prefill, decode, 1, [4, 5])
    decode.endpoint._core.call(setattr, listener, "wants", lambda peer: False)  # it dials no more
    cut(decode)
    assert until(lambda: listener.known()[0].channel is None)
    go_on.set()
    assert until(lambda: lost.pages_releasable)
    assert prefill.endpoint._wiring.known()[0].card.generation == 0  # it was not told
    decode.endpoint._core.call(delattr, listener, "wants")
    for peer in listener.known():
        decode.endpoint._core.call(listener._dial, peer)
    assert until(lambda: prefill.endpoint._wiring.known()[0].card.generation == 1)
    assert until(lambda: prefill.endpoint.inflight == 0)
    moves(prefill, decode, 2, [4, 5])


def test_two_generations_in_a_row(world):
    (prefill,), (decode,) = world.pair(timeouts=TIMES)
    for number in (1, 2, 3):
        lost = lose_a_handle(prefill, decode, number, [4, 5])
        assert until(lambda lost=lost: lost.pages_releasable)
        assert generation(decode) == number and decode.agent.name == f"{decode.agents[0].name}.{number}"
        moves(prefill, decode, 10 + number, [4, 5])
    assert [a.alive for a in decode.agents] == [False, False, False, True]


def test_a_rotated_card_from_the_operator_is_the_same_peer_and_an_old_one_changes_nothing(world):
    (prefill,), (decode,) = world.pair(timeouts=TIMES)
    old = decode.endpoint.card
    lost = lose_a_handle(prefill, decode, 1, [4, 5])
    assert until(lambda: lost.pages_releasable)
    healthy = ask(decode, 7, [8])
    sender = prefill.endpoint.send(room=7, tokens=TOKENS - 1)
    for card in (decode.endpoint.card, old, decode.endpoint.card):
        prefill.endpoint.apply_peers([card])
        handled(prefill)
        (verdict,) = prefill.endpoint.verdicts
        assert verdict.state is VerdictState.WIRED
        assert until(lambda: prefill.agent.peers == {decode.agent.name})  # the old one goes with the next tick
    prefill.pool.fill(7, [20])
    sender.chunk([20], 0, READY)
    sender.finish(b"")
    assert healthy.wait(30) is SUCCESS and sender.wait(30) is SUCCESS


def test_the_operators_card_alone_is_enough_to_follow(world):
    """The peer's own word may come after the operator's."""
    (prefill,), (decode,) = world.pair(timeouts=replace(TIMES, rotation=1))
    decode.endpoint._core.call(setattr, decode.endpoint._rotation, "_tell", lambda: None)
    lost = lose_a_handle(prefill, decode, 1, [4, 5])
    assert until(lambda: generation(decode) == 1)
    prefill.endpoint.apply_peers([decode.endpoint.card])
    assert until(lambda: decode.agent.name in prefill.agent.peers)
    assert until(lambda: lost.pages_releasable)  # nobody answered: at the rotation's deadline
    moves(prefill, decode, 2, [4])


def test_a_new_prefill_rank_with_the_first_card_is_wired_without_an_operator(world):
    (prefill,), (decode,) = world.pair(timeouts=TIMES)
    first_card = decode.endpoint.card
    lost = lose_a_handle(prefill, decode, 1, [4, 5])
    assert until(lambda: lost.pages_releasable)
    prefill.endpoint.close()
    again = world.rank(Role.PREFILL, incarnation="prefill-2", timeouts=TIMES)
    again.endpoint.apply_peers([first_card])
    decode.endpoint.apply_peers([again.endpoint.card])
    assert decode.endpoint.wait_wired(20) and until(lambda: again.agent.peers == {decode.agent.name})
    moves(again, decode, 2, [4, 5])


def test_the_card_with_the_new_agent_is_sealed_and_told_to_listeners(world):
    (prefill,), (decode,) = world.pair(timeouts=TIMES)
    before, seen = decode.endpoint.card, []
    decode.endpoint.on_change(lambda: seen.append(decode.endpoint.card.generation))
    lost = lose_a_handle(prefill, decode, 1, [4, 5])
    assert until(lambda: lost.pages_releasable)
    card = decode.endpoint.card
    assert 1 in seen and card.seal_broken is None
    changed = {"agent_name", "generation", "nixl_metadata", "metadata_hash"}
    assert before.model_dump(exclude=changed) == card.model_dump(exclude=changed)
    assert card.first_agent == before.agent_name


def test_over_the_cap_a_new_agent_is_taken_though_nothing_is_old(world):
    times = replace(TIMES, connect=1, quarantine=600)
    (prefill,), (decode,) = world.pair(timeouts=times, quarantine_cap=2 * PAGE_BYTES)
    two = lose_a_handle(prefill, decode, 1, [4, 5])
    time.sleep(1.5)  # more than settle + connect
    assert not two.pages_releasable and generation(decode) == 0
    one = lose_a_handle(prefill, decode, 2, [6])
    assert until(lambda: two.pages_releasable and one.pages_releasable)
    assert generation(decode) == 1


class Broken:
    """An agent factory's fault: from the second agent on it fails."""

    def __init__(self, world: World) -> None:
        self.hub = world.hub
        self.tries = 0

    def __call__(self, name: str):
        self.tries += 1
        raise AgentFailure("nixlBackendError", "injected: no agent", posted=False)


def test_an_agent_that_can_not_be_made_frees_nothing_and_over_the_cap_ends_the_endpoint_by_name(world, monkeypatch):
    monkeypatch.setattr("pdtransfer.session.rotation.RETRY", 0.2)
    (prefill,), (decode,) = world.pair(timeouts=replace(TIMES, connect=1), quarantine_cap=0)
    broken = Broken(world)
    decode.endpoint._core.make_agent = broken
    lost = lose_a_handle(prefill, decode, 1, [4, 5])
    assert until(lambda: decode.endpoint.failed is not None)
    assert "QuarantineOverflow" in str(decode.endpoint.failed) and "injected: no agent" in str(decode.endpoint.failed)
    assert broken.tries >= 1 and not lost.pages_releasable


def test_an_agent_that_can_not_be_made_is_tried_again_while_less_than_the_cap_waits(world, monkeypatch):
    monkeypatch.setattr("pdtransfer.session.rotation.RETRY", 0.2)
    (prefill,), (decode,) = world.pair(timeouts=TIMES)
    core, broken = decode.endpoint._core, Broken(world)
    make, core.make_agent = core.make_agent, broken
    lost = lose_a_handle(prefill, decode, 1, [4, 5])
    assert until(lambda: broken.tries >= 2)
    assert decode.endpoint.failed is None and not lost.pages_releasable
    assert until(lambda: decode.endpoint.counters.get("rotations{outcome=failed}", 0) >= 1)
    core.make_agent = make
    assert until(lambda: lost.pages_releasable) and generation(decode) == 1


def test_an_old_agent_that_is_not_surely_destroyed_frees_nothing(world, monkeypatch):
    monkeypatch.setattr("pdtransfer.session.rotation.RETRY", 0.2)
    (prefill,), (decode,) = world.pair(timeouts=TIMES)
    first, tries, go_on = decode.agent, [], threading.Event()
    close = first.close

    def clings() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise AgentFailure("nixlNotAllowedError", "injected: still referred to", posted=False)
        go_on.wait(30)  # until the test has looked
        close()

    first.close = clings
    lost = lose_a_handle(prefill, decode, 1, [4, 5])
    assert until(lambda: len(tries) >= 2)
    assert not lost.pages_releasable
    assert world.hub.unstall(prefill.agent.name)  # it lands, so nothing could be freed
    go_on.set()
    assert until(lambda: lost.pages_releasable) and not first.alive


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("agent_name", "somebody.1"),
        ("agent_name", "{first}.2"),
        ("metadata", "bm90IHRoYXQ="),
        ("oldest", 2),
    ],
)
def test_news_of_an_agent_that_can_not_be_true_end_the_connection_and_change_nothing(world, field, value):
    (prefill,), (decode,) = world.pair(timeouts=TIMES)
    first = decode.agent.name
    card = decode.endpoint.card.model_copy(update={"agent_name": f"{first}.1", "generation": 1}).sealed()
    news = Rotated(
        generation=1,
        oldest=0,
        agent_name=card.agent_name,
        metadata=card.nixl_metadata,
        metadata_hash=card.metadata_hash,
    ).model_copy(update={field: value.format(first=first) if isinstance(value, str) else value})
    before = prefill.endpoint.counters.get("frame_errors", 0)
    wiring = decode.endpoint._wiring
    decode.endpoint._core.call(wiring.send, wiring.known()[0], news)
    assert until(lambda: prefill.endpoint.counters.get("frame_errors", 0) == before + 1)
    assert prefill.agent.peers == {first}
    assert decode.endpoint.wait_wired(20)
    moves(prefill, decode, 1, [3])


def test_a_request_for_an_agent_that_is_not_loaded_is_refused_and_settled(world):
    (prefill,), (decode,) = world.pair(timeouts=TIMES)
    ask_for = decode.endpoint._destination._ask

    def wrong(peer, leg) -> None:
        leg.request, leg.sent = leg.request.model_copy(update={"generation": 5}), True
        ask_for(peer, leg)

    decode.endpoint._core.call(setattr, decode.endpoint._destination, "_ask", wrong)
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert receiver.wait(30) is FAILED and "generation 5" in str(receiver.error)
    assert receiver.pages_releasable and decode.pool.untouched([])


def test_a_prefill_rank_never_rotates(world):
    (prefill,), (decode,) = world.pair(timeouts=replace(TIMES, connect=1))  # too much waits, for so long
    lost = lose_a_handle(prefill, decode, 1, list(range(PAGES // 2)))
    assert until(lambda: lost.pages_releasable)
    assert generation(prefill) == 0 and len(prefill.agents) == 1


def test_closing_while_the_old_agent_drains_ends_everything(world):
    (prefill,), (decode,) = world.pair(timeouts=TIMES)
    waits = ask(decode, 7, [8])
    lost = lose_a_handle(prefill, decode, 1, [4, 5])
    assert until(lambda: generation(decode) == 1)
    decode.endpoint.close()  # which does not wait for ever
    assert not decode.endpoint._core._thread.is_alive() and decode.endpoint.failed is None
    assert waits.state is FAILED and not lost.pages_releasable
    assert [a.alive for a in decode.agents] == [False, False]
    host, _, port = decode.endpoint.card.control.rpartition(":")
    with pytest.raises(OSError):
        socket.create_connection((host, int(port)), 1)
