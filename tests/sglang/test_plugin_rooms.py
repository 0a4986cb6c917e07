"""Rooms whose two sides do not meet: a later pipeline stage, and a side that gives up before it began."""

from __future__ import annotations

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll

from pdtransfer.engines.sglang import sender as sender_part
from pdtransfer.engines.sglang.messages import Note, encode
from pdtransfer.errors import TransferError
from pdtransfer.session.api import TransferState
from tests.sglang.plugin_request import Request
from tests.sglang.plugin_world import World, hang, pair, wait_for

# --- pipeline stages ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_later_pipeline_stage_hears_decode_though_sglang_asks_the_first_one_only(here: World, kind: str) -> None:
    """utils.py:112 (poll_and_all_reduce_prefill_pp) polls on stage 0, by poll_pp_consensus()."""
    decoder = here.engine(role="decode", port=1, kind=kind)
    prefill = here.engine(pp=2, kind=kind)
    request = Request(201, prefill, decoder, prompt=4, prefix=1)
    request.begin()
    first, later = request.senders
    assert first.poll_pp_consensus() == KVPoll.Bootstrapping
    request.ask()
    wait_for(lambda: first.poll_pp_consensus() == KVPoll.WaitingForInput, "both stages' readiness")
    assert [s.pop_decode_prefix_len() for s in (first, later)] == [4, 4]  # one page of four tokens
    for one in (first, later):
        one.init(3, request.row)
    request.send()
    request.finish()
    assert request.wrong() == []


def test_a_later_stage_hears_that_decode_gave_up(here: World) -> None:
    decoder = here.engine(role="decode", port=1)
    prefill = here.engine(pp=2)
    request = Request(202, prefill, decoder, prompt=2).begin()
    request.receivers[0].abort()
    later = prefill.managers[1]
    wait_for(lambda: later.request_status.get(202) == KVPoll.Failed, "the later stage's end")
    assert "decode gave up" in later.failure_records[202]


def test_a_cleared_room_of_a_later_stage_stays_forgotten(here: World) -> None:
    """WaitingForInput would make a room anew."""
    decoder = here.engine(role="decode", port=1)
    prefill = here.engine(pp=2)
    request = Request(203, prefill, decoder, prompt=2).begin()
    later, manager = request.senders[1], prefill.managers[1]
    manager.rank.endpoint.drain()  # nothing is begun any more, so no transfer stands for the room's end
    later.clear()
    assert later._transfer is None
    note = Note(room=203, attempt=1, first_page=0, source=prefill.incarnation, destination=decoder.incarnation)
    manager.hear(encode(note))
    later.advance()
    assert later.poll() == KVPoll.Failed
    assert 203 not in manager.request_status
    assert manager.told.take_note(203) == note, "nobody took it"


# --- reasons -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["x" * 5000, "\udcff"])
def test_a_reason_of_any_kind_ends_the_room_and_nothing_else(here: World, reason: str) -> None:
    prefill, decoder = pair(here)
    request = Request(211, prefill, decoder, prompt=2).begin()
    (one,) = request.receivers
    request.ask()
    one._transfer.cell.move(TransferState.FAILED, TransferError(reason))
    assert one.poll() == KVPoll.Failed
    heard = wait_for(lambda: prefill.managers[0].told.given_up(211, 0.0), "the word at prefill")
    assert heard.reason == f"TransferError: {reason}"[:4096].replace("\udcff", "?")


def test_a_prefill_rank_that_can_not_be_told_costs_nothing_else(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decoder = pair(here)
    request = Request(212, prefill, decoder, prompt=2).begin()
    tried: list[str] = []

    def fail(ip: str, port: int, message: list[bytes]) -> bool:
        tried.append(ip)
        raise ValueError("no address")

    monkeypatch.setattr("pdtransfer.engines.sglang.receiver.tell", fail)
    request.receivers[0].abort()
    assert tried and request.receivers[0].poll() == KVPoll.Failed


# --- who gives up first ------------------------------------------------------------------------


def test_decode_that_asks_after_prefill_timed_out_fails_at_once(here: World) -> None:
    """SGLang's prefill gives up after bootstrap_timeout; decode would wait for as long again."""
    prefill, decoder = pair(here)
    (manager,) = prefill.managers
    request = Request(221, prefill, decoder, prompt=2).begin()
    manager.bootstrap_timeout = 0
    (one,) = request.senders
    assert one.poll() == KVPoll.Failed
    assert "timed out" in request.reason(one)  # failure_exception() clears, as SGLang does
    assert manager.rank.endpoint._config.timeouts.waiting == 300.0  # so long it would wait
    request.ask()
    wait_for(lambda: request.receivers[0].poll() == KVPoll.Failed, "decode's end")
    told = request.reason(request.receivers[0])
    assert "prefill gave up" in told and "timed out" in told


def test_decode_that_asked_hears_that_prefill_failed_before_it_began(here: World) -> None:
    """A request of which another prefill rank failed: this one has no transfer yet."""
    prefill, decoder = pair(here)
    request = Request(222, prefill, decoder, prompt=2).begin()
    request.ask()
    request.reach(request.senders, KVPoll.WaitingForInput)
    assert "unknown reason from another rank" in request.reason(request.senders[0])
    wait_for(lambda: request.receivers[0].poll() == KVPoll.Failed, "decode's end")
    assert "prefill gave up" in request.reason(request.receivers[0])


def test_an_aborted_request_is_forgotten_though_sglang_does_not_clear_it(here: World) -> None:
    """prefill.py:600 (release_aborted_prefill_waiting_req) only calls abort()."""
    prefill, decoder = pair(here)
    (manager,) = prefill.managers
    request = Request(225, prefill, decoder, prompt=2).begin()
    request.senders[0].abort()
    assert manager.senders == {}
    request.ask()
    wait_for(lambda: request.receivers[0].poll() == KVPoll.Failed, "decode's end")
    assert "prefill gave up: Aborted by AbortReq." in request.reason(request.receivers[0])


def test_what_decode_gave_up_is_not_buried_for_its_next_attempt(here: World) -> None:
    """Its next attempt may ask before prefill has the request."""
    prefill, decoder = pair(here)
    first = Request(223, prefill, decoder, prompt=2).begin()
    first.receivers[0].abort()
    wait_for(lambda: first.senders[0].poll() == KVPoll.Failed, "prefill's end")
    first.reason(first.senders[0])
    first.clear()
    second = Request(223, prefill, decoder, prompt=2)
    second.join()
    second.ask()
    wait_for(lambda: prefill.managers[0].rank.endpoint.asked(223), "decode's request")
    second.senders = prefill.senders(223)
    second.asked()
    second.send()
    second.finish()
    assert second.wrong() == []


def test_a_second_sender_of_a_room_that_sglang_refuses_ends_nothing(here: World) -> None:
    prefill, decoder = pair(here)
    request = Request(224, prefill, decoder, prompt=2).begin()
    (owner,) = request.senders
    other = sender_part.PdclusterKVSender.__new__(sender_part.PdclusterKVSender)
    other.__dict__.update(owner.__dict__)  # as owner before SGLang called its init(), but not in the manager's table
    other._abandon("a duplicate")
    assert other._transfer is None
    request.ask()
    request.asked()
    request.send()
    request.finish()
    assert request.wrong() == []


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_rooms_of_an_endpoint_that_hangs_end_though_it_can_not_end_them(here: World, side: str) -> None:
    """All deadlines of transfers tick in the thread that hangs."""
    prefill, decoder = pair(here)
    request = Request(226, prefill, decoder, prompt=2).begin()
    request.ask()
    request.asked()
    end = request.receivers[0] if side == "decode" else request.senders[0]
    goes_on = hang(here, end.kv_mgr)
    try:
        end.kv_mgr.rank.endpoint.crash("its thread hangs")
        assert end._transfer.state not in (TransferState.SUCCESS, TransferState.FAILED)
        assert end.poll() == KVPoll.Failed
        if side == "decode":
            assert not end.releasable, "the call that hangs may still write"
        assert "its thread hangs" in request.reason(end)
    finally:
        goes_on.set()
