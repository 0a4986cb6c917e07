"""A rank reads its part of the roster card by card, and each card once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sidecar_kit import peer, roster

from pdtransfer.contract.card import RankCard
from pdtransfer.contract.link import Drain, Peers, Probe, sidecar_messages
from pdtransfer.sidecar import rosters
from pdtransfer.sidecar.peer_lines import LONGEST, MARK, PeerLines


def line(*cards: RankCard) -> bytes:
    return rosters.parse(roster((1, 1), {0: list(cards)}).model_dump_json().encode()).lines[0]


def reader(busy: bool = True) -> tuple[PeerLines, list[float]]:
    rests: list[float] = []
    return PeerLines(lambda: busy, rests.append), rests


NAMES = st.sampled_from(["peer-1", "pärchen-\u4e2d", 'quo"te', "tab\tbed", "back\\slash", "z"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(NAMES, st.integers(0, 3)), max_size=5, unique=True))
def test_a_line_read_card_by_card_is_the_message_that_it_is_read_at_once(who: list[tuple[str, int]]) -> None:
    text = line(*(peer(rank, name) for name, rank in who))
    assert reader()[0].message(text) == sidecar_messages.validate_json(text)


def test_only_cards_that_are_new_are_read_and_rested_after() -> None:
    lines, rests = reader()
    first = lines.message(line(peer(0, "a"), peer(0, "b")))
    assert len(rests) == 2 and all(r > 0 for r in rests)
    again = lines.message(line(peer(0, "a"), peer(0, "b"), peer(0, "c")))
    assert len(rests) == 3
    assert isinstance(first, Peers) and isinstance(again, Peers)
    assert [x is y for x, y in zip(first.peers, again.peers, strict=False)] == [True, True]
    lines.message(line(peer(0, "c")))
    lines.message(line(peer(0, "a")))  # only the last roster's cards are kept
    assert len(rests) == 4


def test_a_rank_that_moves_nothing_does_not_rest() -> None:
    lines, rests = reader(busy=False)
    lines.message(line(peer(0, "a"), peer(0, "b")))
    assert rests == []


def test_the_rests_of_one_line_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    at = iter(range(10_000))
    monkeypatch.setattr("pdtransfer.sidecar.peer_lines.time.monotonic", lambda: float(next(at)))  # a second a card
    lines, rests = reader()
    lines.message(line(*(peer(0, f"p{i}") for i in range(5))))
    assert sum(rests) == LONGEST


def test_messages_without_marks_and_marks_of_others_are_read_as_ever() -> None:
    lines, _ = reader()
    assert lines.message(b'{"type":"drain"}') == Drain()
    assert lines.message(b'\t{"type":\t"probe",\t"pod_uids":["x"]}') == Probe(pod_uids=("x",))
    nobody = b'{"type":"peers","term":1,"counter":2,"roster_hash":"h","peers":[]}'
    assert lines.message(nobody) == Peers(term=1, counter=2, roster_hash="h")
    pretty = nobody.replace(b'"peers":[]', b'"peers":[\t]\t')
    assert lines.message(pretty) == Peers(term=1, counter=2, roster_hash="h")


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        MARK,
        MARK * 4,
        b'{"type":"peers","peers":[\t{}\t]}',
        line(peer(0, "a")).replace(b'"layers":1', b'"layers":"x"'),
        line(peer(0, "a")).rstrip(b"]}\n"),
        line(peer(0, "a"), peer(0, "b")).replace(b"\t,\t", b"\t;\t"),
        line(peer(0, "a")) + line(peer(0, "b")),
    ],
)
def test_a_line_that_is_no_message_is_refused(bad: bytes) -> None:
    with pytest.raises(ValidationError):
        reader()[0].message(bad)
