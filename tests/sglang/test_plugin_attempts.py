"""A room is used again: rows and words of an earlier attempt, of another engine or of nobody are not its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll

from pdtransfer.engines.sglang import sender as sender_part
from pdtransfer.engines.sglang import told as told_part
from pdtransfer.engines.sglang.messages import GUARD, BadMessage, GiveUp, Note, decode, encode
from pdtransfer.engines.sglang.told import Told
from tests.sglang.plugin_request import Request
from tests.sglang.plugin_world import Engine, World, pair, wait_for


def test_a_retracted_request_comes_back_with_its_room(here: World) -> None:
    prefill, decode = pair(here, tp=2)
    first = Request(31, prefill, decode, prompt=3)
    first.run(token=1)
    first.clear()
    second = Request(31, prefill, decode, prompt=4, source=(5, 6, 7, 8), target=(9, 10, 11, 12))
    second.run(token=2)
    assert second.wrong() == []
    assert decode.pools[0].row(1) == (2, 31)
    assert [r.attempt for r in (*first.receivers, *second.receivers)] == [1, 1, 2, 2]


def test_a_room_that_prefill_aborted_can_be_used_again(here: World) -> None:
    prefill, decode = pair(here)
    first = Request(32, prefill, decode, prompt=2)
    first.begin()
    first.senders[0].abort()
    first.senders[0].clear()
    first.receivers[0].abort()
    first.receivers[0].clear()
    second = Request(32, prefill, decode, prompt=2)
    second.run()
    assert second.wrong() == []


def test_a_late_word_about_an_earlier_attempt_does_not_end_the_next(here: World) -> None:
    prefill, decode = pair(here)
    (manager,) = prefill.managers
    first = Request(33, prefill, decode, prompt=2).begin()
    first.receivers[0].abort()
    wait_for(lambda: first.senders[0].poll() == KVPoll.Failed, "the first attempt's end")
    first.clear()
    second = Request(33, prefill, decode, prompt=2)
    second.begin()
    second.ask()
    of = {"source": prefill.incarnation, "destination": decode.incarnation}
    manager.hear(encode(GiveUp(room=33, attempt=1, reason="late", **of)))
    second.asked()
    second.send()
    second.finish()
    assert second.wrong() == []


def test_rows_of_another_attempt_are_never_written(here: World) -> None:
    """SGLang's gate compares the room only."""
    prefill, decode = pair(here)
    request = Request(34, prefill, decode, prompt=2)
    request.begin()
    request.ask()
    request.asked()
    request.receivers[0].attempt += 1
    request.send()
    wait_for(lambda: request.receivers[0].poll() == KVPoll.Failed, "decode's refusal")
    assert "the metadata is of" in request.reason(request.receivers[0])
    assert decode.pools[0].row(1) == (0, 0)


def give_up(prefill: Engine, decoder: Engine, room: int, attempt: int) -> list[bytes]:
    """What a decode rank's ZMQ message holds."""
    of = {"source": prefill.incarnation, "destination": decoder.incarnation}
    return encode(GiveUp(room=room, attempt=attempt, reason="too late", **of))


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
