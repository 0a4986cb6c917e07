"""An abort in every state of a request, and SGLang's calls in orders and with values that nobody expects: nothing is
raised in a scheduler, pages come back by the ledger's word only, and the room serves again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.base.conn import KVPoll

from pdtransfer.engines.sglang.receiver import PdclusterKVReceiver
from tests.sglang.plugin_request import Request, land, stuck
from tests.sglang.plugin_world import World, pair, wait_for

OVER = (KVPoll.Success, KVPoll.Failed)
STATES = ("new", "met", "asked", "begun", "posted", "done")


def driven(here: World, request: Request, state: str) -> Request:
    """Made, met (decode knows prefill), asked, begun (prefill computes), its bytes posted, or over."""
    if state == "posted":
        return stuck(request, here)
    if state == "new":
        request.senders = request.prefill.senders(request.room)
        request.receivers = [
            PdclusterKVReceiver(m, request.prefill.address, request.room) for m in request.decode.managers
        ]
        return request
    request.begin()
    if state == "met":
        return request
    request.ask()
    if state == "asked":
        request.reach(request.senders, KVPoll.WaitingForInput)
        return request
    request.asked()
    if state == "done":
        request.send()
        request.finish()
    return request


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_in_any_state_ends_both_sides_and_the_room_serves_again(here: World, side: str, state: str) -> None:
    prefill, decode = pair(here)
    request = driven(here, Request(401, prefill, decode, prompt=3), state)
    (sender,), (receiver,) = request.senders, request.receivers
    mine, other = (sender, receiver) if side == "prefill" else (receiver, sender)
    mine.abort()
    mine.abort()  # SGLang may abort a request by its name and all requests after that
    assert mine.poll() == KVPoll.Failed
    (manager,) = decode.managers
    if state == "posted":
        assert not manager.is_abort_release_safe(401, 0), "what prefill has posted may still land"
        land(request, here)
    if state in ("met", "asked", "begun", "posted"):
        if side == "prefill" and state == "met":
            request.ask()  # decode hears of it once it asks
        wait_for(lambda: other.poll() in OVER, "the other side's end")
        if other.poll() == KVPoll.Failed:
            assert "Aborted by AbortReq." in request.reason(other)
        else:  # all had landed before prefill heard of it
            assert (side, state) == ("decode", "posted")
    if state != "done":
        assert "Aborted by AbortReq." in request.reason(mine)
    for one in (sender, receiver):
        one.clear()
        one.clear()
    wait_for(lambda: manager.is_abort_release_safe(401, 0), "the pages")
    manager.clear_deferred_abort_state(401)
    for held in (
        manager.request_status,
        prefill.managers[0].request_status,
        prefill.managers[0].senders,
        manager._held,
    ):
        assert held == {}
    again = Request(401, prefill, decode, prompt=4)
    again.run()
    assert again.wrong() == []


def test_a_prompt_that_decode_has_whole_moves_metadata_only(here: World) -> None:
    """Decode's radix cache may hold every page: SGLang then sends one last chunk without pages."""
    prefill, decode = pair(here)
    request = Request(402, prefill, decode, prompt=3, prefix=3)
    request.run(token=99)
    assert decode.pools[0].row(1) == (99, 402)
    assert not any(a.any() for a in decode.pools[0].parts.values()), "a page was written"


def test_a_last_chunk_without_pages_ends_the_request(here: World) -> None:
    """prefill.py: `should_send_kv_chunk` lets an empty last chunk pass; the pages went in chunks before it."""
    prefill, decode = pair(here)
    request = Request(403, prefill, decode, prompt=3).begin()
    request.ask()
    request.asked()
    (sender,), (pool,) = request.senders, prefill.pools
    pool.fill(403, request.source)
    pool.set_row(1, 403, 7)
    manager = sender.kv_mgr
    manager.add_transfer_request(403, np.array(request.source, dtype=np.int32), slice(0, 3), False)
    assert request.receivers[0].poll() != KVPoll.Success
    manager.add_transfer_request(403, np.array([], dtype=np.int32), slice(3, 3), True, 1)
    request.finish()
    assert request.wrong() == [] and decode.pools[0].row(1) == (7, 403)


class Broken:
    """A CUDA event of a device that is gone."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


PAGES = np.array([1, 2], dtype=np.int32)


@pytest.mark.parametrize(
    ("handed", "told"),
    [
        ((None, slice(0, 2), False), "TypeError"),
        ((np.array([1, 99], dtype=np.int32), slice(0, 2), False), "99"),
        ((PAGES, slice(0, 2), True, None), "without a metadata row"),
        ((PAGES, slice(0, 2), True, 10**6), "metadata row 1000000"),
        ((PAGES, slice(0, 2), True, 1, [PAGES]), "ValueError"),
    ],
    ids=["no pages", "a page beyond the pool", "no row", "a row beyond", "unknown state"],
)
def test_what_can_not_be_handed_over_fails_its_room_by_name(here: World, handed: tuple[Any, ...], told: str) -> None:
    prefill, decode = pair(here)
    request = Request(404, prefill, decode, prompt=2).begin()
    request.ask()
    request.asked()
    (sender,) = request.senders
    sender.kv_mgr.add_transfer_request(404, *handed)
    for end in (sender, *request.receivers):
        wait_for(lambda end=end: end.poll() == KVPoll.Failed, "both ends")
        assert told in request.reason(end)
    again = Request(405, prefill, decode, prompt=2)
    again.run()
    assert again.wrong() == []


def test_an_event_that_breaks_fails_its_room_by_name(here: World) -> None:
    prefill, decode = pair(here)
    request = Request(406, prefill, decode, prompt=2).begin()
    request.ask()
    request.asked()
    (sender,) = request.senders
    sender._early_send_wait_event = Broken()
    request.send()
    for end in (sender, *request.receivers):
        wait_for(lambda end=end: end.poll() == KVPoll.Failed, "both ends")
        assert "illegal memory access" in request.reason(end)
    assert prefill.managers[0].problem == ""
    again = Request(407, prefill, decode, prompt=2)
    again.run()
    assert again.wrong() == []


def test_calls_in_an_order_of_their_own_raise_nothing(here: World) -> None:
    prefill, decode = pair(here)
    (source,), (target,) = prefill.managers, decode.managers
    source.add_transfer_request(999, PAGES, slice(0, 2), True, 1)  # a room that nobody has
    (early,) = prefill.senders(411)
    assert early.pop_decode_prefix_len() == 0
    early.init(2, 1)  # decode has not asked
    early.send(PAGES, None, 8)
    wait_for(lambda: early.poll() == KVPoll.Failed, "prefill's end")
    for call in (early.abort, early.clear, early.abort, lambda: early.send(PAGES, None, 8), early.advance):
        call()
    assert early.poll() == KVPoll.Failed

    late = PdclusterKVReceiver(target, prefill.address, 412)
    late.ensure_abort_notified(force_arm=True)
    assert late.abort_notified is False and late.is_abort_release_safe()
    late.send_metadata(PAGES, 1)  # before init()
    assert late.poll() == KVPoll.Failed
    for call in (lambda: late.init(0), lambda: late.send_metadata(PAGES, 1), late.abort, late.clear, late.abort):
        call()
    assert late.poll() == KVPoll.Failed

    twice = Request(413, prefill, decode, prompt=2).begin()
    twice.ask()
    twice.receivers[0].send_metadata(None, 1)  # again, and without pages
    assert twice.receivers[0].poll() == KVPoll.Failed
    twice.receivers[0].ensure_abort_notified(force_arm=True)  # as SGLang does after a failure
    assert twice.receivers[0].abort_notified
    wait_for(lambda: target.is_abort_release_safe(413, 0), "the pages")
    for address in ("", "nobody", "127.0.0.1:x", "[::1"):
        assert target.try_ensure_parallel_info(address) is False
    target.clear_deferred_abort_state(999)
    assert target.is_abort_release_safe(999, 1)
    again = Request(414, prefill, decode, prompt=2)
    again.run()
    assert again.wrong() == []
