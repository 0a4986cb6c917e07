"""Decode's arena slots: lent in turn, bounded by leg and by peer, never two at once, all of them back at the end."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtransfer.contract.base import MemoryKind
from pdtransfer.session.slots import SlotBook

DRAM, VRAM = MemoryKind.DRAM, MemoryKind.VRAM


def test_slots_go_round_peers_and_then_round_their_legs():
    book = SlotBook({DRAM: (16, 64)})
    for peer, legs in (("p", ["p1", "p2"]), ("q", ["q1"])):
        for leg in legs:
            book.want(peer, leg, DRAM, 2)
    assert [t.leg for t in book.lend()] == ["p1", "q1", "p2", "q1", "p1", "p2"]


def test_a_leg_holds_four_and_gets_the_next_when_one_is_spent():
    book = SlotBook({DRAM: (16, 64)})
    book.want("p", "leg", DRAM, 6)
    first = list(book.lend())
    assert len(first) == 4 and not list(book.lend())
    book.spend(first[0])
    assert [t.slot for t in book.lend()] == [first[0].slot]
    book.spend(first[0])  # spent once
    assert not list(book.lend())


def test_a_wish_that_is_said_again_is_one_wish():
    book = SlotBook({DRAM: (8, 64)})
    for total in (2, 2, 1):
        book.want("p", "leg", DRAM, total)
    assert len(list(book.lend())) == 2


@pytest.mark.parametrize(("slots", "most"), [(1, 1), (2, 1), (4, 2), (8, 5), (16, 10)])
def test_one_peer_never_takes_the_last_slots_of_a_larger_arena(slots, most):
    """Its first, then h + 1 <= 2 (free - 1): counted by hand for these sizes."""
    book = SlotBook({DRAM: (slots, 64)})
    for leg in range(8):
        book.want("stopped", leg, DRAM, 4)
    assert len(list(book.lend())) == most
    if slots > 1:
        book.want("other", "leg", DRAM, 1)
        assert [t.leg for t in book.lend()] == ["leg"]


def test_quarantined_slots_go_to_nobody_until_their_leg_is_released():
    book = SlotBook({DRAM: (2, 64)})
    book.want("p", "failed", DRAM, 4)
    (held,) = book.lend()
    book.quarantine("failed")
    book.want("p", "failed", DRAM, 9)  # late
    assert book.counts() == {"free": 1, "granted": 0, "quarantined": 1} and book.quarantined_bytes == 64
    assert not list(book.lend())
    book.release("failed")
    assert book.counts() == {"free": 2, "granted": 0, "quarantined": 0} and not book.quarantined_bytes
    assert book.find("failed", held.number) is None


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["want", "lend", "spend", "quarantine", "release"]),
        st.integers(0, 5),
        st.sampled_from([DRAM, VRAM]),
        st.integers(1, 6),
    ),
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(ACTIONS, st.integers(1, 12))
def test_whatever_happens_no_slot_is_lent_twice_and_all_come_back(actions, slots):
    book = SlotBook({DRAM: (slots, 64), VRAM: (3, 32)})
    out: dict[int, object] = {}
    for what, leg, arena, count in actions:
        if what == "want":
            book.want(leg % 3, leg, arena, count)
        elif what == "lend":
            for ticket in book.lend():
                assert ticket.number not in out
                assert all((t.arena, t.slot) != (ticket.arena, ticket.slot) for t in out.values())
                out[ticket.number] = ticket
        elif what == "spend":
            for ticket in book.out(leg)[:count]:
                book.spend(ticket)
                del out[ticket.number]
        elif what == "quarantine":
            book.quarantine(leg)
        else:
            book.release(leg)
            out = {n: t for n, t in out.items() if t.leg != leg}
        per_leg = Counter((t.leg, t.arena) for t in out.values())
        assert all(n <= 4 for n in per_leg.values())
        counts = book.counts()
        assert counts["granted"] + counts["quarantined"] == len(out) and sum(counts.values()) == slots + 3
    for leg in range(6):
        book.release(leg)
    assert book.counts() == {"free": slots + 3, "granted": 0, "quarantined": 0}
