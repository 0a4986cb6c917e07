"""Requests between endpoints over the fake agent: what succeeds, and every fault that can be forced."""

from __future__ import annotations

import ctypes
import threading
import time

import pytest
from kv_world import BOOTSTRAP, PAGES, QUICK, READY, TOKENS, World, until

from pdtransfer.contract.base import Role
from pdtransfer.contract.layout import HeadSlice
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.errors import (
    Aborted,
    AgentError,
    DeadlineExceeded,
    Draining,
    LayoutMismatch,
    PeerNotRostered,
    PeerReplaced,
    PeerUnreachable,
)
from pdtransfer.session.api import Timeouts, TransferState
from pdtransfer.session.frames import Request

SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED


@pytest.fixture
def world():
    made = World()
    yield made
    made.close()


def ask(rank, room, pages, *, first_page=0, attempt=0):
    tokens = (first_page + len(pages)) * TOKENS - 1
    return rank.endpoint.receive(
        room=room, attempt=attempt, bootstrap=BOOTSTRAP, pages=pages, first_page=first_page, tokens=tokens
    )


def give(rank, room, pages, *, metadata=b"first token", finish=True):
    rank.pool.fill(room, pages)
    sender = rank.endpoint.send(room=room, tokens=len(pages) * TOKENS - 1)
    sender.chunk(pages[:1], 0, READY)
    sender.chunk(pages[1:], 1, READY)
    if finish:
        sender.finish(metadata)
    return sender


@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 2), (2, 1), (1, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("early", ["request", "chunks"])
def test_every_byte_arrives_and_nothing_else_changes(world, p, d, early):
    prefill, decode = world.pair(p, d)
    src, dst = [5, 1, 9], [30, 7, 2]
    if early == "request":
        receivers = [ask(r, 7, dst) for r in decode]
        senders = [give(r, 7, src) for r in prefill]
    else:
        senders = [give(r, 7, src) for r in prefill]
        time.sleep(0.05)
        receivers = [ask(r, 7, dst) for r in decode]
    for transfer in (*senders, *receivers):
        assert transfer.wait(5) is SUCCESS, transfer.error
    for rank, receiver in zip(decode, receivers, strict=True):
        assert rank.pool.holds(7, dst) and rank.pool.untouched(dst)
        assert receiver.metadata == b"first token" and receiver.pages_releasable
    assert sum(r.endpoint.inflight for r in (*prefill, *decode)) == 0


@pytest.mark.parametrize(("p", "d"), [(2, 1), (1, 2), (2, 2)])
def test_pipeline_stages_send_their_layers(world, p, d):
    def stages(role, count):
        return [world.rank(role, layers=((i,) if count == 2 else (0, 1)), stage=(i, count)) for i in range(count)]

    prefill, decode = stages(Role.PREFILL, p), stages(Role.DECODE, d)
    world.wire(prefill, decode)
    receivers = [ask(r, 3, [8, 9]) for r in decode]
    senders = [give(r, 3, [1, 2]) for r in prefill]
    for transfer in (*senders, *receivers):
        assert transfer.wait(5) is SUCCESS, transfer.error
    assert all(r.pool.holds(3, [8, 9]) and r.pool.untouched([8, 9]) for r in decode)


def test_data_parallel_prefill_ranks_are_chosen_by_room(world):
    def dp(rank: int):
        def change(card):
            at = card.layout.coordinates.model_copy(update={"dp": rank, "dp_size": 2})
            return card.model_copy(update={"layout": card.layout.model_copy(update={"coordinates": at})})

        return change

    prefill = [world.rank(Role.PREFILL, card=dp(i)) for i in range(2)]
    decode = world.rank(Role.DECODE)
    world.wire(prefill, [decode])
    receiver = ask(decode, 5, [8])  # 5 mod 2: rank 1
    sender = give(prefill[1], 5, [1])
    assert receiver.wait(3) is SUCCESS and sender.wait(1) is SUCCESS
    assert decode.pool.holds(5, [8])


def test_pages_decode_has_already_are_not_sent(world):
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4, 5], first_page=2)
    sender = give(prefill, 1, [10, 11, 12, 13])
    assert (sender.wait(5), receiver.wait(5)) == (SUCCESS, SUCCESS)
    assert decode.pool.holds(1, [4, 5], first_page=2) and decode.pool.untouched([4, 5])


def test_a_chunk_is_not_sent_before_its_ready_event(world):
    (prefill,), (decode,) = world.pair()
    ready = threading.Event()
    receiver = ask(decode, 1, [4])
    sender = prefill.endpoint.send(room=1, tokens=TOKENS - 1)
    sender.chunk([3], 0, ready)
    sender.finish(b"")
    assert receiver.wait(0.2) is TransferState.WAITING
    prefill.pool.fill(1, [3])
    ready.set()
    assert receiver.wait(5) is SUCCESS
    assert decode.pool.holds(1, [4])


def test_emulated_vram_moves_and_is_labelled(world):
    emulate = {"card": lambda c: c.model_copy(update={"layout": c.layout.model_copy(update={"emulated_vram": True})})}
    (prefill,), (decode,) = world.pair(memory="VRAM", **emulate)
    receiver = ask(decode, 1, [4, 5])
    give(prefill, 1, [1, 2])
    assert receiver.wait(5) is SUCCESS and decode.pool.holds(1, [4, 5])
    (verdict,) = decode.endpoint.verdicts
    assert verdict.emulated_vram and "emulated" in verdict.evidence


def test_an_unrostered_bootstrap_is_refused_at_once(world):
    _, (decode,) = world.pair()
    with pytest.raises(PeerNotRostered):
        decode.endpoint.receive(room=1, attempt=0, bootstrap="10.0.0.1:1", pages=[1], tokens=1)


def test_a_missing_prefill_rank_is_refused_at_once(world):
    prefill, (decode,) = world.pair(2, 1)
    decode.endpoint.apply_peers([prefill[0].endpoint.card])
    with pytest.raises(PeerNotRostered, match="2 of 4 KV heads"):
        ask(decode, 1, [1])


def test_a_receive_that_prefill_never_serves_ends_at_its_deadline(world):
    quick = Timeouts(waiting=0.4, transfer=1, settle=0.2, connect=1, probe=5)
    _, (decode,) = world.pair(timeouts=quick)
    began = time.monotonic()
    receiver = ask(decode, 1, [1, 2])
    assert receiver.wait(3) is FAILED
    assert 0.3 < time.monotonic() - began < 1.4
    assert isinstance(receiver.error, DeadlineExceeded) and receiver.error.room == 1
    assert until(lambda: receiver.pages_releasable)


def test_a_send_that_nobody_asks_for_ends_at_its_deadline(world):
    quick = Timeouts(waiting=0.3, transfer=1, settle=0.2, connect=1, probe=5)
    (prefill,), _ = world.pair(timeouts=quick)
    sender = give(prefill, 1, [1])
    assert sender.wait(2) is FAILED and isinstance(sender.error, DeadlineExceeded)


def test_a_stalled_handle_fails_in_time_and_its_pages_stay_quarantined_until_it_lands(world):
    quick = Timeouts(waiting=2, transfer=0.4, settle=0.2, connect=2, probe=5)
    (prefill,), (decode,) = world.pair(timeouts=quick)
    prefill.agent.faults.stall_all = True
    receiver = ask(decode, 1, [4, 5])
    sender = give(prefill, 1, [1, 2])
    assert receiver.wait(3) is FAILED and sender.wait(3) is FAILED
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
    assert receiver.wait(3) is FAILED and sender.wait(3) is FAILED
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
    assert sender.wait(3) is FAILED and receiver.wait(3) is FAILED
    assert "nixlBackendError" in str(receiver.error)
    assert until(lambda: receiver.pages_releasable)
    # The connection was made anew and the next room goes through.
    assert until(lambda: decode.endpoint.verdicts[0].state is VerdictState.WIRED)
    receiver = ask(decode, 2, [4])
    give(prefill, 2, [1])
    assert receiver.wait(5) is SUCCESS and decode.pool.holds(2, [4])


@pytest.mark.parametrize("when", ["before request", "before chunks", "mid transfer"])
def test_an_abort_by_prefill_reaches_decode_at_once(world, when):
    (prefill,), (decode,) = world.pair()
    if when == "before request":
        sender = prefill.endpoint.send(room=1, tokens=TOKENS - 1)
        sender.abort("cancelled")
        assert sender.wait(2) is FAILED
        receiver = ask(decode, 1, [4])
    elif when == "before chunks":
        receiver = ask(decode, 1, [4])
        sender = prefill.endpoint.send(room=1, tokens=TOKENS - 1)
        sender.abort("cancelled")
    else:
        prefill.agent.faults.delay_polls = 2000
        receiver = ask(decode, 1, [4])
        sender = give(prefill, 1, [1], finish=False)
        assert until(lambda: receiver.state is TransferState.TRANSFERRING)
        sender.abort("cancelled")
    began = time.monotonic()
    assert receiver.wait(2) is FAILED
    assert time.monotonic() - began < 0.5
    assert isinstance(receiver.error, Aborted) and "cancelled" in str(receiver.error)
    assert sender.wait(2) is FAILED
    assert until(lambda: receiver.pages_releasable)


@pytest.mark.parametrize("when", ["before send", "before chunks", "mid transfer", "after success"])
def test_an_abort_by_decode_is_acknowledged_after_the_drain(world, when):
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4])
    sender = None
    if when == "before chunks":
        sender = prefill.endpoint.send(room=1, tokens=TOKENS - 1)
        time.sleep(0.05)
    elif when == "mid transfer":
        prefill.agent.faults.stall_all = True
        sender = give(prefill, 1, [1])
        assert until(lambda: receiver.state is TransferState.TRANSFERRING)
        assert until(lambda: prefill.agent.faults.seen)
    elif when == "after success":
        sender = give(prefill, 1, [1])
        assert receiver.wait(2) is SUCCESS
    receiver.abort("retracted")
    if when == "after success":
        assert receiver.wait(0.1) is SUCCESS
        return
    assert receiver.wait(2) is FAILED and isinstance(receiver.error, Aborted)
    if when == "mid transfer":
        time.sleep(0.2)
        assert not receiver.pages_releasable
        world.hub.unstall(prefill.agent.name)
    assert until(lambda: receiver.pages_releasable)
    if sender is not None:
        assert (sender.wait(2) is FAILED and "retracted" in str(sender.error)) or isinstance(sender.error, Aborted)


@pytest.mark.parametrize("sent", ["before the request", "before the abort", "after the abort", "after the retry"])
def test_a_retracted_room_comes_back_as_a_new_attempt(world, sent):
    (prefill,), (decode,) = world.pair()
    prefill.agent.faults.delay_polls = 20
    senders = []
    if sent == "before the request":
        senders.append(give(prefill, 1, [1]))
    first = ask(decode, 1, [4])
    if sent == "before the abort":
        senders.append(give(prefill, 1, [1]))
    first.abort("retracted")
    if sent == "after the abort":
        senders.append(give(prefill, 1, [1]))
    if first.wait(2) is SUCCESS:
        assert sent == "before the request"  # it may have been faster
        return
    second = ask(decode, 1, [6], attempt=1)
    if sent == "after the retry":
        senders.append(give(prefill, 1, [1]))
    elif until(lambda: senders[0].state is SUCCESS or second.state is SUCCESS) and second.state is not SUCCESS:
        give(prefill, 1, [1])  # the first attempt was served before its abort came: prefill runs again
    assert second.wait(3) is SUCCESS, second.error
    assert decode.pool.holds(1, [6]) and decode.pool.untouched([4, 6])
    assert until(lambda: first.pages_releasable)


def test_a_retry_is_served_while_the_first_attempt_is_still_in_flight(world):
    (prefill,), (decode,) = world.pair()
    prefill.agent.faults.stall.add(prefill.agent.posts + 1)
    first = ask(decode, 1, [4])
    sender = give(prefill, 1, [1])
    assert until(lambda: prefill.agent.faults.seen)
    first.abort("retracted")
    assert first.wait(2) is FAILED
    second = ask(decode, 1, [6], attempt=1)
    assert second.wait(3) is SUCCESS and sender.wait(1) is SUCCESS
    assert decode.pool.holds(1, [6]) and decode.pool.untouched([6])
    assert not first.pages_releasable
    world.hub.unstall(prefill.agent.name)  # lands in page 4, which is quarantined
    assert until(lambda: first.pages_releasable)
    assert decode.pool.untouched([4, 6]) and decode.pool.holds(1, [4])


def test_a_duplicated_request_moves_no_byte_twice_and_one_with_other_pages_moves_none(world):
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert receiver.wait(3) is SUCCESS
    posts = prefill.agent.posts
    wiring = decode.endpoint._wiring
    (peer,) = wiring._peers.values()
    request = Request(
        room=1,
        attempt=0,
        source="prefill-1",
        destination="decode-1",
        pages=(4,),
        first_page=0,
        tokens=TOKENS - 1,
        required=1,
    )
    before = decode.endpoint.counters.get("stray_frames", 0)
    for frame in (request, request.model_copy(update={"pages": (20,)}), request.model_copy(update={"source": "old"})):
        decode.endpoint._core.call(wiring.send, peer, frame)
    assert until(lambda: decode.endpoint.counters.get("stray_frames", 0) == before + 3)
    assert prefill.agent.posts == posts
    assert decode.pool.untouched([4])


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
    request = Request(
        room=1,
        attempt=0,
        source="prefill-1",
        destination="decode-1",
        pages=(4,),
        first_page=0,
        tokens=TOKENS - 1,
        required=1,
    ).model_copy(update=change)
    decode.endpoint._core.call(wiring.send, peer, request)
    assert until(lambda: prefill.endpoint.counters.get("requests_refused", 0) == 1)
    sender = give(prefill, 1, [1])
    assert sender.wait(0.2) is TransferState.WAITING
    assert prefill.agent.posts == posts


def test_decode_and_prefill_that_disagree_on_the_prompt_fail_by_name(world):
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4, 5])
    sender = prefill.endpoint.send(room=1, tokens=TOKENS)
    assert receiver.wait(2) is FAILED and isinstance(receiver.error, LayoutMismatch)
    assert sender.wait(2) is FAILED and receiver.pages_releasable


def test_prefill_that_hands_over_too_few_pages_fails_by_name(world):
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4, 5])
    sender = prefill.endpoint.send(room=1, tokens=2 * TOKENS - 1)
    sender.chunk([1], 0, READY)
    sender.finish(b"")
    assert receiver.wait(2) is FAILED and "1 of 2 pages" in str(receiver.error)


def test_a_replaced_prefill_fails_its_transfers_and_the_new_incarnation_serves(world):
    _, (decode,) = world.pair()
    receiver = ask(decode, 1, [4])
    time.sleep(0.05)
    again = world.rank(Role.PREFILL, incarnation="prefill-2")
    world.wire([again], [decode])
    assert receiver.wait(2) is FAILED and isinstance(receiver.error, PeerReplaced)
    # The old one is alive and acknowledges: nothing was in flight.
    assert until(lambda: receiver.pages_releasable)
    receiver = ask(decode, 2, [4])
    give(again, 2, [1])
    assert receiver.wait(3) is SUCCESS and decode.pool.holds(2, [4])
    assert [v.peer_incarnation for v in decode.endpoint.verdicts] == ["prefill-2"]


def test_a_replaced_source_with_a_write_in_flight_keeps_the_pages_until_it_settles(world):
    (prefill,), (decode,) = world.pair()
    prefill.agent.faults.stall_all = True
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert until(lambda: prefill.agent.faults.seen)
    again = world.rank(Role.PREFILL, incarnation="prefill-2")
    world.wire([again], [decode])
    assert receiver.wait(2) is FAILED
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
        assert receiver.wait(2) is SUCCESS
    prefill.agent.faults.stall_all = False
    for rank, other in ((prefill, decode), (decode, prefill)):
        rank.endpoint.apply_peers([])
        rank.endpoint.apply_peers([other.endpoint.card])
    if in_flight:
        assert receiver.wait(2) is FAILED and isinstance(receiver.error, PeerReplaced)
    for rank in (prefill, decode):
        assert until(lambda r=rank: r.endpoint.verdicts and r.endpoint.verdicts[0].state is VerdictState.WIRED)
    again = ask(decode, 2, [6])
    give(prefill, 2, [1])
    assert again.wait(3) is SUCCESS and decode.pool.holds(2, [6])
    world.hub.unstall(prefill.agent.name)
    assert until(lambda: receiver.pages_releasable)


def test_a_connection_that_nixl_lost_is_made_anew(world):
    (prefill,), (decode,) = world.pair()
    prefill.agent.remove_peer(decode.agent.name)  # as after nixlRemoteDisconnectError
    receiver = ask(decode, 1, [4])
    sender = give(prefill, 1, [1])
    assert sender.wait(2) is FAILED and "nixlNotFoundError" in str(sender.error)
    assert receiver.wait(2) is FAILED and until(lambda: receiver.pages_releasable)
    assert until(lambda: prefill.endpoint.counters.get("peer_reloads", 0) >= 1)
    assert until(lambda: prefill.endpoint.verdicts[0].state is VerdictState.WIRED)
    receiver = ask(decode, 2, [4])
    give(prefill, 2, [1])
    assert receiver.wait(3) is SUCCESS


def test_progress_that_fails_now_and_then_ends_nothing(world):
    from pdtransfer.agent.port import AgentFailure

    (prefill,), (decode,) = world.pair()
    real, turns = prefill.agent.progress, iter(range(10**9))

    def shaky() -> object:
        if next(turns) % 3:
            raise AgentFailure("nixlRemoteDisconnectError", "injected", posted=False)
        return real()

    prefill.agent.progress = shaky  # type: ignore[method-assign]
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert receiver.wait(3) is SUCCESS and prefill.endpoint.failed is None
    assert until(lambda: prefill.endpoint.counters.get("progress_errors", 0) > 3)
    assert prefill.endpoint.failed is None


def test_a_dead_source_that_left_the_roster_fences_its_pages(world):
    (prefill,), (decode,) = world.pair()
    prefill.agent.faults.stall_all = True
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert until(lambda: receiver.state is TransferState.TRANSFERRING)
    prefill.endpoint.close()  # its connections end and its port refuses
    assert receiver.wait(3) is FAILED
    time.sleep(0.3)
    assert not receiver.pages_releasable  # still in the roster: not confirmed
    decode.endpoint.apply_peers([])
    assert until(lambda: receiver.pages_releasable, 5)
    assert decode.endpoint.counters["fenced_by_source_end"] == 1


def test_a_decode_that_vanishes_fails_the_send_and_not_the_others(world):
    (prefill,), (decode,) = world.pair()
    ask(decode, 1, [4])
    sender = give(prefill, 1, [1], finish=False)
    assert until(lambda: sender.state is TransferState.TRANSFERRING)
    world.hub.disconnect(decode.agent.name)
    decode.endpoint.close()
    assert sender.wait(4) is FAILED
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
    assert other.wait(2) is FAILED and isinstance(other.error, Draining)
    sender.finish(b"m")
    assert receiver.wait(2) is SUCCESS


def test_a_crash_of_the_endpoints_thread_fails_every_transfer_and_is_visible(world):
    _, (decode,) = world.pair()
    receiver = ask(decode, 1, [4])
    told = threading.Event()
    decode.endpoint.on_change(told.set)

    def broken() -> list[tuple[str, bytes]]:
        raise ZeroDivisionError("injected")

    told.clear()
    decode.agent.progress = broken  # type: ignore[method-assign]
    assert receiver.wait(2) is FAILED and "ZeroDivisionError" in str(receiver.error)
    assert told.wait(1) and decode.endpoint.failed is not None
    with pytest.raises(Exception, match="ZeroDivisionError"):
        ask(decode, 2, [5])


def test_corrupted_bytes_are_never_wired(world):
    prefill, decode = world.rank(Role.PREFILL), world.rank(Role.DECODE)
    prefill.agent.faults.corrupt = decode.agent.faults.corrupt = True
    prefill.endpoint.apply_peers([decode.endpoint.card])
    decode.endpoint.apply_peers([prefill.endpoint.card])
    assert until(lambda: decode.endpoint.verdicts and decode.endpoint.verdicts[0].state is VerdictState.REFUSED)
    assert decode.endpoint.verdicts[0].reason == "ChecksumMismatch"
    assert decode.agent.faults.seen
    with pytest.raises(PeerUnreachable, match="ChecksumMismatch"):
        ask(decode, 1, [1])


def broken_cards(good):
    layout = good.layout
    other = good.model.model_copy(update={"revision": "other"})
    regions = tuple(r.model_copy(update={"memory": None}) for r in layout.regions)
    return {
        "BrokenSeal": good.model_copy(update={"layout_hash": "0" * 32}),
        "FingerprintMismatch": good.model_copy(update={"model": other}).sealed(),
        "StaleRegistration": good.model_copy(
            update={"layout": layout.model_copy(update={"regions": regions})}
        ).sealed(),
        "OtherCluster": good.model_copy(update={"cluster_uid": "other"}),
        "WrongRole": good.model_copy(update={"role": Role.DECODE}),
        "LayoutMismatch": good.model_copy(
            update={"layout": layout.model_copy(update={"heads": HeadSlice(first=0, count=4, total=8)})}
        ).sealed(),
        "AgentError": good.model_copy(update={"nixl_metadata": "bm90IG1ldGFkYXRh"}),
    }


@pytest.mark.parametrize(
    "reason",
    [
        "BrokenSeal",
        "FingerprintMismatch",
        "StaleRegistration",
        "OtherCluster",
        "WrongRole",
        "LayoutMismatch",
        "AgentError",
    ],
)
def test_a_card_that_can_not_be_wired_is_refused_by_name(world, reason):
    prefill, decode = world.rank(Role.PREFILL), world.rank(Role.DECODE)
    decode.endpoint.apply_peers([broken_cards(prefill.endpoint.card)[reason]])
    assert until(lambda: decode.endpoint.verdicts)
    (verdict,) = decode.endpoint.verdicts
    assert (verdict.state, verdict.reason) == (VerdictState.REFUSED, reason), verdict.message
    assert not decode.agent.handles


def test_a_peer_whose_roster_does_not_name_us_is_not_wired_until_it_does(world):
    prefill, decode = world.rank(Role.PREFILL), world.rank(Role.DECODE)
    decode.endpoint.apply_peers([prefill.endpoint.card])
    assert until(lambda: decode.endpoint.verdicts and decode.endpoint.verdicts[0].reason == "PeerNotRostered")
    assert prefill.endpoint.counters["connections_refused"] >= 1
    prefill.endpoint.apply_peers([decode.endpoint.card])
    assert decode.endpoint.wait_wired(5)


def test_a_control_port_that_nobody_listens_on_is_unreachable(world):
    prefill, decode = world.rank(Role.PREFILL), world.rank(Role.DECODE)
    prefill.endpoint.close()
    decode.endpoint.apply_peers([prefill.endpoint.card])
    assert until(lambda: decode.endpoint.verdicts and decode.endpoint.verdicts[0].state is VerdictState.UNREACHABLE)


def test_verdicts_carry_the_proof_and_a_new_probe_renews_it(world):
    _, (decode,) = world.pair()
    (verdict,) = decode.endpoint.verdicts
    # 4 regions (2 layers x K, V), first and last page each, and the 64 KiB block:
    # K pages 4*4*8*2 = 256 bytes, V pages 512; 2 * (2 * 256 + 2 * 512) + 1 MiB.
    assert verdict.bytes_moved == 2 * (2 * 256 + 2 * 512) + 1048576
    assert verdict.checksum_ok and verdict.seconds > 0 and verdict.transport in ("TCP or shared memory", "RDMA")
    decode.endpoint.probe()
    assert until(lambda: decode.endpoint.verdicts[0].at > verdict.at)


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
    assert QUICK.waiting > 0
