"""Rooms whose two sides do not meet: a later pipeline stage, words of another attempt or engine, and a side that gives
up before it began."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import requests
from sglang.srt.disaggregation.base.conn import KVPoll

from pdtransfer.engines.sglang import prefill as prefill_part
from pdtransfer.engines.sglang import sender as sender_part
from pdtransfer.engines.sglang import told as told_part
from pdtransfer.engines.sglang.messages import GUARD, BadMessage, GiveUp, Note, decode, encode
from pdtransfer.engines.sglang.plugin import LAUNCH
from pdtransfer.engines.sglang.receiver import tell
from pdtransfer.engines.sglang.registry import FIELD
from pdtransfer.engines.sglang.told import Told
from pdtransfer.errors import TransferError
from pdtransfer.session.api import TransferState
from tests.sglang.plugin_world import Engine, Request, World, wait_for, world
from tests.sglang.test_plugin_health import hang


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(monkeypatch) as made:
        yield made


def pair(here: World, **what: object) -> tuple[Engine, Engine]:
    return here.engine(**what), here.engine(role="decode", port=1, **what)  # type: ignore[arg-type]


def give_up(prefill: Engine, decoder: Engine, room: int, attempt: int) -> list[bytes]:
    """What a decode rank's ZMQ message holds."""
    of = {"source": prefill.incarnation, "destination": decoder.incarnation}
    return encode(GiveUp(room=room, attempt=attempt, reason="too late", **of))


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


# --- words of another attempt ------------------------------------------------------------------


@pytest.mark.parametrize("heard", ["before the next sender", "after it"])
def test_a_word_about_an_attempt_that_prefill_ended_does_not_end_the_next(
    here: World, monkeypatch: pytest.MonkeyPatch, heard: str
) -> None:
    """Decode says that it gave up when its request failed at prefill: after prefill cleared the room."""
    monkeypatch.setattr(sender_part, "GRACE_S", 0.0)  # decode asks later than that
    prefill, decoder = pair(here)
    (manager,) = prefill.managers
    first = Request(231, prefill, decoder, prompt=2).begin()
    manager.bootstrap_timeout = 0
    assert first.senders[0].poll() == KVPoll.Failed
    first.reason(first.senders[0])
    manager.bootstrap_timeout = 300
    word = give_up(prefill, decoder, 231, first.receivers[0].attempt)
    if heard == "before the next sender":
        manager.hear(word)
    second = Request(231, prefill, decoder, prompt=2).begin()
    if heard == "after it":
        manager.hear(word)
    assert second.senders[0].poll() == KVPoll.Bootstrapping
    manager.hear(word)  # another decode rank's
    assert second.senders[0].poll() == KVPoll.Bootstrapping
    second.ask()
    second.asked()
    second.send()
    second.finish()
    assert second.wrong() == []


def test_a_word_about_the_present_attempt_ends_it(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the one above."""
    monkeypatch.setattr(sender_part, "GRACE_S", 0.0)
    prefill, decoder = pair(here)
    Request(232, prefill, decoder, prompt=2).run()
    again = Request(233, prefill, decoder, prompt=2).begin()
    prefill.managers[0].hear(give_up(prefill, decoder, 233, 1))
    assert again.senders[0].poll() == KVPoll.Failed
    assert "decode gave up: too late" in again.reason(again.senders[0])


def word(attempt: int, destination: str = "d", room: int = 1) -> GiveUp:
    return GiveUp(room=room, attempt=attempt, source="s", destination=destination)


def note(attempt: int, destination: str = "d") -> Note:
    return Note(room=1, attempt=attempt, first_page=0, source="s", destination=destination)


def test_words_are_kept_for_the_attempt_that_they_are_of() -> None:
    held = Told()
    held.end(1, ("d", 2))
    held.hear(word(2))
    held.hear(note(1))
    assert held.given_up(1, 0.0) is None and held.take_note(1) is None
    held.hear(word(3))
    assert held.given_up(1, 0.0) == word(3)
    held.hear(note(3))
    assert held.take_note(1) == note(3) and held.take_note(1) is None
    held.hear(word(1, "another decode engine"))
    assert held.given_up(1, 0.0) == word(1, "another decode engine")
    assert held.given_up(2, 0.0) is None


def test_a_room_that_ended_before_decode_was_heard_of_is_owed_one_word() -> None:
    held = Told()
    held.end(1, None)
    held.hear(word(1))
    assert held.given_up(1, 0.0) is None
    held.hear(word(2))
    assert held.given_up(1, 0.0) == word(2)
    held.end(1, None)  # it ended by this word
    assert held.given_up(1, 0.0) is None
    held.hear(word(2))
    assert held.given_up(1, 0.0) is None


def test_a_word_that_came_long_before_its_sender_is_not_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(told_part, "time", SimpleNamespace(monotonic=lambda: now[0]))
    held = Told()
    held.hear(word(1))
    assert held.given_up(1, 1029.0) == word(1)
    assert held.given_up(1, 1031.0) is None


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_part, "MAX_ROOMS", 2)
    held = Told()
    for room in (1, 2, 3):
        held.hear(word(1, room=room))
    assert [held.given_up(room, 0.0) is None for room in (1, 2, 3)] == [True, False, False]


# --- strangers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [None, "", "another engine"])
def test_words_of_no_or_another_engine_change_nothing(here: World, source: str | None) -> None:
    """The port is open to anyone."""
    prefill = here.engine()
    (manager,) = prefill.managers
    mine = Note(room=241, attempt=1, first_page=0, source=prefill.incarnation, destination="d")
    manager.hear(encode(mine))
    named = "" if source is None else f',"source":"{source}"'
    for room in range(241, 244):
        manager.hear([GUARD, f'{{"type":"note","room":{room},"attempt":9,"first_page":1{named}}}'.encode()])
        manager.hear([GUARD, f'{{"type":"give_up","room":{room},"attempt":9,"reason":"x"{named}}}'.encode()])
    assert [manager.told.given_up(room, 0.0) for room in range(241, 244)] == [None] * 3
    assert [manager.told.take_note(room) for room in range(241, 244)] == [mine, None, None]


def test_a_word_without_a_source_is_no_message() -> None:
    with pytest.raises(BadMessage, match="source"):
        decode([GUARD, b'{"type":"give_up","room":1,"attempt":0}'])


# --- registration ------------------------------------------------------------------------------


def test_a_rank_that_is_not_registered_says_so_until_it_is(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bootstrap port is another server's: /health stays green in SGLang, and no decode finds it."""
    prefill, decoder = pair(here)
    (manager,) = prefill.managers
    monkeypatch.setattr(prefill_part, "REGISTER_TRIES", 1)
    monkeypatch.setattr(prefill_part, "REGISTER_PAUSE_S", 0.01)
    status = [403]
    sent: list[dict[str, object]] = []

    def put(url: str, json: dict[str, object], timeout: float) -> SimpleNamespace:
        sent.append(json)
        return SimpleNamespace(status_code=status[0], text="of another engine start")

    monkeypatch.setattr(prefill_part.requests, "put", put)
    manager._register_topology_row("http://here/route", {})
    assert manager.problem == "prefill is not registered at http://here/route: HTTP 403: of another engine start"
    (one,) = prefill.senders(251)
    assert one.poll() == KVPoll.Failed
    assert "is not registered" in Request(251, prefill, decoder, prompt=1).reason(one)
    assert not here.kills, "it may still succeed"
    status[0] = 200
    wait_for(lambda: manager.problem == "", "registration")
    assert sent[0][FIELD]["card"]["incarnation"] == prefill.incarnation  # type: ignore[index]


def test_a_server_that_can_not_be_reached_is_named(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = here.engine()
    (manager,) = prefill.managers

    def put(url: str, **what: object) -> None:
        raise requests.ConnectionError("refused")

    monkeypatch.setattr(prefill_part.requests, "put", put)
    assert manager._register("http://here/route", {}, prefill.incarnation) is False
    assert manager.problem == "prefill is not registered at http://here/route: refused"


def test_what_an_earlier_incarnation_could_not_register_says_nothing_of_the_next(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """release_memory_occupation and resume_memory_occupation, while a registration hangs."""
    prefill = here.engine()
    (manager,) = prefill.managers

    def put(url: str, **what: object) -> SimpleNamespace:
        manager.rank.close()
        manager.rank = None  # as SGLang takes the pools away
        return SimpleNamespace(status_code=500, text="no")

    monkeypatch.setattr(prefill_part.requests, "put", put)
    assert manager._register("http://here/route", {}, prefill.incarnation) is True
    assert manager.unregistered == ""


def test_a_rank_that_never_registers_ends_its_engine(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = here.engine()
    (manager,) = prefill.managers
    for name, value in {"REGISTER_TRIES": 1, "REGISTER_PAUSE_S": 0.01, "REGISTER_DEADLINE_S": 0.0}.items():
        monkeypatch.setattr(prefill_part, name, value)
    monkeypatch.setattr(prefill_part.requests, "put", lambda url, **_: SimpleNamespace(status_code=500, text="no"))
    manager._register_topology_row("http://here/route", {})
    wait_for(lambda: here.kills, "the engine's end")
    assert "is not registered at http://here/route: HTTP 500: no" in manager.rank.problem


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_registration_carries_the_start_of_the_servers_node(monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    monkeypatch.setitem(os.environ, LAUNCH, "mine")
    group = SimpleNamespace(broadcast_object=lambda value, src: f"{value} as rank {src} has it")
    monkeypatch.setattr(prefill_part, "get_parallel", lambda: SimpleNamespace(nnodes=nodes, world_group=group))
    assert prefill_part._launch() == ("mine" if nodes == 1 else "mine as rank 0 has it")


def test_the_registration_of_this_engine_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCH, "start of both")
    with world(monkeypatch) as here:
        prefill, decoder = pair(here)
        assert prefill.managers[0]._launch == "start of both" and prefill.managers[0].problem == ""
        assert tell("127.0.0.1", prefill.managers[0].rank_port, [b"noise"])
        request = Request(252, prefill, decoder, prompt=1)
        request.run()
        assert request.wrong() == []
