"""Faults of agents, peers and threads, over the fake agent: each ends by name, in time, and costs itself only."""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import replace

import pytest
from kv_world import QUICK, READY, TOKENS, World, ask, give, handled, until

from pdtransfer.agent.port import AgentFailure
from pdtransfer.contract.base import Role
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.errors import (
    AgentError,
    DeadlineExceeded,
    Draining,
    LayoutMismatch,
    PeerReplaced,
    PeerUnreachable,
)
from pdtransfer.session.api import Timeouts, TransferState

SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED
LOST_SOON = replace(QUICK, connect=1)
"""A peer without a connection is given up after a second."""


def test_a_receive_that_prefill_never_serves_ends_at_its_deadline(world):
    quick = Timeouts(waiting=0.4, transfer=60, settle=0.2, connect=60, probe=60)
    _, (decode,) = world.pair(timeouts=quick)
    began = time.monotonic()
    receiver = ask(decode, 1, [1, 2])
    assert receiver.wait(30) is FAILED
    assert time.monotonic() - began > 0.39  # and of all deadlines this one alone is shorter than the wait
    assert isinstance(receiver.error, DeadlineExceeded) and receiver.error.room == 1
    assert until(lambda: receiver.pages_releasable)


def test_a_send_that_nobody_asks_for_ends_at_its_deadline(world):
    quick = Timeouts(waiting=0.3, transfer=60, settle=0.2, connect=60, probe=60)
    (prefill,), _ = world.pair(timeouts=quick)
    sender = give(prefill, 1, [1])
    assert sender.wait(30) is FAILED and isinstance(sender.error, DeadlineExceeded)


def test_a_stalled_handle_fails_in_time_and_its_pages_stay_quarantined_until_it_lands(world):
    quick = Timeouts(waiting=20, transfer=1, settle=0.2, connect=20, probe=20)
    (prefill,), (decode,) = world.pair(timeouts=quick)
    prefill.agent.faults.stall_all = True
    receiver = ask(decode, 1, [4, 5])
    sender = give(prefill, 1, [1, 2])
    assert receiver.wait(30) is FAILED and sender.wait(30) is FAILED
    assert isinstance(receiver.error, DeadlineExceeded)
    assert prefill.agent.faults.seen  # the fault happened
    time.sleep(0.3)
    assert not receiver.pages_releasable
    assert decode.endpoint.counters["quarantined_bytes"] > 0
    with pytest.raises(LayoutMismatch, match="quarantined"):
        ask(decode, 2, [5])
    assert world.hub.unstall(prefill.agent.name) > 0  # the late writes
    assert until(lambda: receiver.pages_releasable)
    assert decode.endpoint.counters["quarantined_bytes"] == 0


def test_a_handle_that_errors_never_gives_the_pages_back_while_the_source_lives(world):
    (prefill,), (decode,) = world.pair()
    prefill.agent.faults.error.add(prefill.agent.posts + 1)
    receiver = ask(decode, 1, [4, 5])
    sender = give(prefill, 1, [1, 2])
    assert receiver.wait(30) is FAILED and sender.wait(30) is FAILED
    assert isinstance(receiver.error, AgentError) and "injected" in str(receiver.error)
    time.sleep(0.3)
    assert not receiver.pages_releasable
    assert world.hub.unstall(prefill.agent.name) > 0  # it does land late: the quarantine was right
    assert decode.pool.arrays[0, "K"][4].any()


def test_a_failed_post_is_named_and_leaves_nothing_in_quarantine(world):
    (prefill,), (decode,) = world.pair()
    prefill.agent.faults.fail_post.add(prefill.agent.posts + 1)
    receiver = ask(decode, 1, [4])
    sender = give(prefill, 1, [1])
    assert sender.wait(30) is FAILED and receiver.wait(30) is FAILED
    assert "nixlBackendError" in str(receiver.error)
    assert until(lambda: receiver.pages_releasable)
    # The connection was made anew and the next room goes through.
    assert until(lambda: decode.endpoint.verdicts[0].state is VerdictState.WIRED)
    receiver = ask(decode, 2, [4])
    give(prefill, 2, [1])
    assert receiver.wait(30) is SUCCESS and decode.pool.holds(2, [4])


def test_decode_and_prefill_that_disagree_on_the_prompt_fail_by_name(world):
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4, 5])
    sender = prefill.endpoint.send(room=1, tokens=TOKENS)
    assert receiver.wait(30) is FAILED and isinstance(receiver.error, LayoutMismatch)
    assert sender.wait(30) is FAILED and receiver.pages_releasable


def test_prefill_that_hands_over_too_few_pages_fails_by_name(world):
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4, 5])
    sender = prefill.endpoint.send(room=1, tokens=2 * TOKENS - 1)
    sender.chunk([1], 0, READY)
    sender.finish(b"")
    assert receiver.wait(30) is FAILED and "1 of 2 pages" in str(receiver.error)


def test_a_replaced_prefill_fails_its_transfers_and_the_new_incarnation_serves(world):
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4])
    assert until(lambda: prefill.endpoint.inflight == 1)
    again = world.rank(Role.PREFILL, incarnation="prefill-2")
    world.wire([again], [decode])
    assert receiver.wait(30) is FAILED and isinstance(receiver.error, PeerReplaced)
    # The old one is alive and acknowledges: nothing was in flight.
    assert until(lambda: receiver.pages_releasable)
    receiver = ask(decode, 2, [4])
    give(again, 2, [1])
    assert receiver.wait(30) is SUCCESS and decode.pool.holds(2, [4])
    assert [v.peer_incarnation for v in decode.endpoint.verdicts] == ["prefill-2"]


def test_a_replaced_source_with_a_write_in_flight_keeps_the_pages_until_it_settles(world):
    (prefill,), (decode,) = world.pair()
    prefill.agent.faults.stall_all = True
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert until(lambda: prefill.agent.faults.seen)
    again = world.rank(Role.PREFILL, incarnation="prefill-2")
    world.wire([again], [decode])
    assert receiver.wait(30) is FAILED
    time.sleep(0.5)
    assert not receiver.pages_releasable  # a roster entry that is gone is no death
    world.hub.unstall(prefill.agent.name)
    assert until(lambda: receiver.pages_releasable)


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_peer_that_leaves_the_roster_and_comes_back_is_wired_again(world, in_flight):
    (prefill,), (decode,) = world.pair()
    prefill.agent.faults.stall_all = in_flight
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    if in_flight:
        assert until(lambda: prefill.agent.faults.seen)
    else:
        assert receiver.wait(30) is SUCCESS
    prefill.agent.faults.stall_all = False
    for rank, other in ((decode, prefill), (prefill, decode)):
        rank.endpoint.apply_peers([])
        rank.endpoint.apply_peers([other.endpoint.card])
        handled(rank)  # decode first: prefill's word that it ended the request would be another reason
    if in_flight:
        assert receiver.wait(30) is FAILED and isinstance(receiver.error, PeerReplaced)
    for rank in (prefill, decode):
        assert until(lambda r=rank: r.endpoint.verdicts and r.endpoint.verdicts[0].state is VerdictState.WIRED)
    again = ask(decode, 2, [6])
    give(prefill, 2, [1])
    assert again.wait(30) is SUCCESS and decode.pool.holds(2, [6])
    world.hub.unstall(prefill.agent.name)
    assert until(lambda: receiver.pages_releasable)


def test_a_connection_that_nixl_lost_is_made_anew(world):
    (prefill,), (decode,) = world.pair()
    prefill.agent.remove_peer(decode.agent.name)  # as after nixlRemoteDisconnectError
    receiver = ask(decode, 1, [4])
    sender = give(prefill, 1, [1])
    assert sender.wait(30) is FAILED and "nixlNotFoundError" in str(sender.error)
    assert receiver.wait(30) is FAILED and until(lambda: receiver.pages_releasable)
    assert until(lambda: prefill.endpoint.counters.get("peer_reloads", 0) >= 1)
    assert until(lambda: prefill.endpoint.verdicts[0].state is VerdictState.WIRED)
    receiver = ask(decode, 2, [4])
    give(prefill, 2, [1])
    assert receiver.wait(30) is SUCCESS


def test_progress_that_fails_now_and_then_ends_nothing(world):

    (prefill,), (decode,) = world.pair()
    real, turns = prefill.agent.progress, iter(range(10**9))

    def shaky() -> object:
        if next(turns) % 3:
            raise AgentFailure("nixlRemoteDisconnectError", "injected", posted=False)
        return real()

    prefill.agent.progress = shaky  # type: ignore[method-assign]
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert receiver.wait(30) is SUCCESS and prefill.endpoint.failed is None
    assert until(lambda: prefill.endpoint.counters.get("progress_errors", 0) > 3)
    assert prefill.endpoint.failed is None


def test_a_dead_source_that_left_the_roster_fences_its_pages(world):
    (prefill,), (decode,) = world.pair(timeouts=LOST_SOON)
    prefill.agent.faults.stall_all = True
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert until(lambda: receiver.state is TransferState.TRANSFERRING)
    prefill.endpoint.close()  # its connections end and its port refuses
    assert receiver.wait(30) is FAILED
    time.sleep(0.3)
    assert not receiver.pages_releasable  # still in the roster: not confirmed
    decode.endpoint.apply_peers([])
    assert until(lambda: receiver.pages_releasable)
    assert until(lambda: decode.endpoint.counters.get("quarantine_released{fence=source_end}") == 1)


def test_a_decode_that_vanishes_fails_the_send_and_not_the_others(world):
    (prefill,), (decode,) = world.pair(timeouts=LOST_SOON)
    ask(decode, 1, [4])
    sender = give(prefill, 1, [1], finish=False)
    assert until(lambda: sender.state is TransferState.TRANSFERRING)
    assert until(lambda: decode.pool.holds(1, [4]))  # nothing is left to post to it
    world.hub.disconnect(decode.agent.name)
    decode.endpoint.close()
    assert sender.wait(30) is FAILED
    assert isinstance(sender.error, PeerUnreachable)


def test_draining_refuses_new_work_and_finishes_old(world):
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4])
    sender = give(prefill, 1, [1], finish=False)
    assert until(lambda: receiver.state is TransferState.TRANSFERRING)
    prefill.endpoint.drain()
    with pytest.raises(Draining):
        prefill.endpoint.send(room=2, tokens=1)
    other = ask(decode, 2, [6])
    assert other.wait(30) is FAILED and isinstance(other.error, Draining)
    sender.finish(b"m")
    assert receiver.wait(30) is SUCCESS


@pytest.mark.parametrize("way", ["sent", "aborted"])
def test_draining_sends_or_ends_what_was_asked_for_before(world, way):
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4])
    assert until(lambda: prefill.endpoint.asked(1))
    prefill.endpoint.drain()
    if way == "sent":
        give(prefill, 1, [1])
        assert receiver.wait(30) is SUCCESS and decode.pool.holds(1, [4])
    else:
        prefill.endpoint.send(room=1, tokens=3).abort("no more")
        assert receiver.wait(30) is FAILED and "no more" in str(receiver.error)
    assert until(lambda: prefill.endpoint.inflight == 0)


def test_a_crash_of_the_endpoints_thread_fails_every_transfer_and_is_visible(world):
    _, (decode,) = world.pair()
    receiver = ask(decode, 1, [4])
    told = threading.Event()
    decode.endpoint.on_change(told.set)

    def broken() -> list[tuple[str, bytes]]:
        raise ZeroDivisionError("injected")

    told.clear()
    decode.agent.progress = broken  # type: ignore[method-assign]
    assert receiver.wait(30) is FAILED and "ZeroDivisionError" in str(receiver.error)
    assert told.wait(30) and decode.endpoint.failed is not None
    with pytest.raises(Exception, match="ZeroDivisionError"):
        ask(decode, 2, [5])


def test_a_late_write_after_release_can_be_forced_with_the_double():
    """Negative control of the double itself: releasing a handle does not stop it."""
    world = World()
    agent = world.hub.agent("a")
    import numpy as np

    from pdtransfer.contract.base import MemoryKind

    memory = np.zeros(64, dtype=np.uint8)
    memory[:8] = 7
    agent.register(np.array([[memory.ctypes.data, 64, 0]], dtype=np.uint64), MemoryKind.DRAM)
    agent.peers.add("a")
    agent.faults.stall.add(1)
    rows = [np.array([[memory.ctypes.data + at, 8, 0]], dtype=np.uint64) for at in (0, 32)]
    local, remote = agent.prepare(None, rows[0], MemoryKind.DRAM), agent.prepare("a", rows[1], MemoryKind.DRAM)
    one = np.zeros(1, dtype=np.int32)
    handle = agent.post("WRITE", local, one, remote, one)
    agent.release(handle)
    assert not memory[32:40].any()
    world.hub.unstall("a")
    assert memory[32:40].tolist() == [7] * 8
    assert ctypes.string_at(memory.ctypes.data + 32, 1) == b"\x07"
