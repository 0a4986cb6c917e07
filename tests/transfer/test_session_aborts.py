"""Either side gives up, or takes a room up again, at every state."""

from __future__ import annotations

import time

import pytest
from kv_world import PAGES, READY, TOKENS, ask, first_request, give, handled, until

from pdtransfer.contract.base import MemoryKind
from pdtransfer.errors import Aborted
from pdtransfer.session.api import Timeouts, TransferState
from pdtransfer.session.frames import AbortAck, Failed, SlotGrant

SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED
RETRIED = Timeouts(waiting=20, transfer=20, settle=10, connect=5, probe=20)
"""Prefill keeps a room for its next attempt for `settle` seconds."""


def legs_of(prefill, room):
    """Of a room that prefill sends."""
    found = prefill.endpoint._source._rooms.open.get(room)
    return list(found.legs.values()) if found is not None else []


@pytest.mark.parametrize("when", ["before request", "before chunks", "mid transfer"])
def test_an_abort_by_prefill_reaches_decode_at_once(world, when):
    (prefill,), (decode,) = world.pair()
    if when == "before request":
        sender = prefill.endpoint.send(room=1, tokens=TOKENS - 1)
        sender.abort("cancelled")
        assert sender.wait(30) is FAILED
        receiver = ask(decode, 1, [4])
    elif when == "before chunks":
        receiver = ask(decode, 1, [4])
        sender = prefill.endpoint.send(room=1, tokens=TOKENS - 1)
        sender.abort("cancelled")
    else:
        prefill.agent.faults.delay_polls = 300  # given up, its handles are polled every 2 ms only
        receiver = ask(decode, 1, [4])
        sender = give(prefill, 1, [1], finish=False)
        assert until(lambda: receiver.state is TransferState.TRANSFERRING)
        sender.abort("cancelled")
    assert receiver.wait(30) is FAILED  # every deadline is longer
    assert isinstance(receiver.error, Aborted) and "cancelled" in str(receiver.error)
    assert sender.wait(30) is FAILED
    assert until(lambda: receiver.pages_releasable)


@pytest.mark.parametrize("when", ["before send", "before chunks", "mid transfer", "after success"])
def test_an_abort_by_decode_is_acknowledged_after_the_drain(world, when):
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4])
    sender = None
    if when == "before chunks":
        sender = prefill.endpoint.send(room=1, tokens=TOKENS - 1)
        assert until(lambda: legs_of(prefill, 1))
    elif when == "mid transfer":
        prefill.agent.faults.stall_all = True
        sender = give(prefill, 1, [1])
        assert until(lambda: receiver.state is TransferState.TRANSFERRING)
        assert until(lambda: prefill.agent.faults.seen)
    elif when == "after success":
        sender = give(prefill, 1, [1])
        assert receiver.wait(30) is SUCCESS
    receiver.abort("retracted")
    if when == "after success":
        handled(decode)
        assert receiver.state is SUCCESS
        return
    assert receiver.wait(30) is FAILED and isinstance(receiver.error, Aborted)
    if when == "mid transfer":
        time.sleep(0.2)
        assert not receiver.pages_releasable
        world.hub.unstall(prefill.agent.name)
    assert until(lambda: receiver.pages_releasable)
    if sender is not None:
        assert (sender.wait(30) is FAILED and "retracted" in str(sender.error)) or isinstance(sender.error, Aborted)


@pytest.mark.parametrize("sent", ["before the request", "before the abort", "after the abort", "after the retry"])
def test_a_retracted_room_comes_back_as_a_new_attempt(world, sent):
    (prefill,), (decode,) = world.pair(timeouts=RETRIED)
    prefill.agent.faults.stall_all = True  # whatever the first attempt was sent lands after its abort
    heard, hooks = [], decode.endpoint._wiring.hooks
    real = hooks.on_frame

    def on_frame(peer, frame):
        real(peer, frame)
        heard.extend([frame] * isinstance(frame, Failed | AbortAck))

    hooks.on_frame = on_frame
    senders = []
    if sent == "before the request":
        senders.append(give(prefill, 1, [1]))
    first = ask(decode, 1, [4])
    if sent == "before the abort":
        senders.append(give(prefill, 1, [1]))
    first.abort("retracted")
    if sent == "after the abort":
        senders.append(give(prefill, 1, [1]))
    assert first.wait(30) is FAILED
    assert until(lambda: heard)  # prefill has taken the abort
    second = ask(decode, 1, [6], attempt=1)
    if sent == "after the retry":
        senders.append(give(prefill, 1, [1]))
    prefill.agent.faults.stall_all = False
    world.hub.unstall(prefill.agent.name)
    assert second.wait(30) is SUCCESS, second.error
    assert decode.pool.holds(1, [6]) and decode.pool.untouched([4, 6])
    assert [sender.wait(30) for sender in senders] == [SUCCESS]
    assert until(lambda: first.pages_releasable)


def test_a_retry_is_served_while_the_first_attempt_is_still_in_flight(world):
    (prefill,), (decode,) = world.pair(timeouts=RETRIED)
    prefill.agent.faults.stall |= {prefill.agent.posts + 1, prefill.agent.posts + 2}  # K's handle and V's
    first = ask(decode, 1, [4])
    sender = give(prefill, 1, [1])
    assert until(lambda: len(prefill.agent.faults.seen) == 2)
    first.abort("retracted")
    assert first.wait(30) is FAILED
    second = ask(decode, 1, [6], attempt=1)
    assert second.wait(30) is SUCCESS and sender.wait(30) is SUCCESS
    assert decode.pool.holds(1, [6]) and decode.pool.untouched([6])
    assert not first.pages_releasable
    world.hub.unstall(prefill.agent.name)  # lands in page 4, which is quarantined
    assert until(lambda: first.pages_releasable)
    assert decode.pool.untouched([4, 6]) and decode.pool.holds(1, [4])


def test_a_duplicated_request_moves_no_byte_twice_and_one_with_other_pages_moves_none(world):
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert receiver.wait(30) is SUCCESS
    posts = prefill.agent.posts
    wiring = decode.endpoint._wiring
    (peer,) = wiring._peers.values()
    request = first_request()
    before = decode.endpoint.counters.get("stray_frames", 0)
    for frame in (request, request.model_copy(update={"pages": (20,)}), request.model_copy(update={"source": "old"})):
        decode.endpoint._core.call(wiring.send, peer, frame)
    assert until(lambda: decode.endpoint.counters.get("stray_frames", 0) == before + 3)
    assert prefill.agent.posts == posts
    assert decode.pool.untouched([4])


def test_one_decode_rank_that_gave_up_ends_the_send_although_the_other_asks_later(world):
    (prefill,), decode = world.pair(1, 2)
    first = ask(decode[1], 1, [4])
    sender = prefill.endpoint.send(room=1, tokens=TOKENS - 1)
    assert until(lambda: legs_of(prefill, 1))
    (leg,) = legs_of(prefill, 1)
    first.abort("retracted")
    assert first.wait(30) is FAILED
    assert until(lambda: leg.error)  # or it would be served before its abort comes
    ask(decode[0], 1, [4])
    prefill.pool.fill(1, [1])
    sender.chunk([1], 0, READY)
    sender.finish(b"m")
    assert sender.wait(30) is FAILED and "retracted" in str(sender.error)
    assert until(lambda: prefill.endpoint.inflight == 0)


@pytest.mark.parametrize("when", ["the roster dropped decode", "its tombstone is gone"])
def test_a_request_that_comes_twice_is_never_answered_as_settled_while_its_writes_fly(world, when):
    quick = Timeouts(waiting=20, transfer=0.3, settle=0.1, connect=5, probe=20)
    (prefill,), (decode,) = world.pair(timeouts=quick)
    prefill.agent.faults.stall_all = True
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert until(lambda: prefill.agent.faults.seen)
    wiring = decode.endpoint._wiring
    (peer,) = wiring._peers.values()
    ((_, leg),) = decode.endpoint._destination._legs_of(peer)
    if when.startswith("the roster"):
        prefill.endpoint.apply_peers([])
    assert receiver.wait(30) is FAILED
    if when.startswith("its tomb"):
        assert until(lambda: prefill.endpoint._source._rooms.draining)  # its settle deadline has passed
        tombs = prefill.endpoint._source.askers._tombs
        prefill.endpoint._core.call(tombs.expire, time.monotonic() + 1000)
        handled(prefill)
        assert not tombs._held
    decode.endpoint._core.call(wiring.send, peer, leg.request)
    strays = prefill.endpoint.counters["stray_frames"]
    nobodys = SlotGrant(**{**leg.request.ids, "attempt": 9}, arena=MemoryKind.DRAM, slot=0, ticket=1)
    decode.endpoint._core.call(wiring.send, peer, nobodys)
    assert until(lambda: prefill.endpoint.counters["stray_frames"] == strays + 1)  # what came before it was handled
    assert not prefill.endpoint._source._rooms.pending  # it waits for no engine, and for no deadline
    time.sleep(0.2)
    assert not receiver.pages_releasable
    assert world.hub.unstall(prefill.agent.name) > 0
    assert until(lambda: receiver.pages_releasable)


@pytest.mark.parametrize(
    "change",
    [
        {"pages": (PAGES + 5,)},
        {"tokens": 500},
        {"source": "another-incarnation"},
        {"destination": "another-incarnation"},
    ],
)
def test_a_forged_request_is_refused_and_moves_nothing(world, change):
    (prefill,), (decode,) = world.pair()
    posts = prefill.agent.posts
    wiring = decode.endpoint._wiring
    (peer,) = wiring._peers.values()
    request = first_request(**change)
    decode.endpoint._core.call(wiring.send, peer, request)
    assert until(lambda: prefill.endpoint.counters.get("requests_refused", 0) == 1)
    sender = give(prefill, 1, [1])
    assert sender.wait(0.2) is TransferState.WAITING
    assert prefill.agent.posts == posts
