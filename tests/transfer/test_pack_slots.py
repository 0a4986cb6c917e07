"""Local slots to pack in: bounded, shared, and never all held by those who are slow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtransfer.staging.slots import PackSlots


def test_one_holder_gets_no_more_than_its_bound():
    slots = PackSlots(16, most=4)
    assert [slots.take("a") is not None for _ in range(6)] == [True] * 4 + [False] * 2
    assert slots.held("a") == 4 and slots.free == 12


def test_stopped_holders_leave_something_for_others():
    """Peers that give nothing back: each later one gets less, and what comes back goes to one without."""
    slots = PackSlots(16, most=4)
    got = []
    for peer in range(8):
        while slots.take(peer) is not None:
            pass
        got.append(slots.held(peer))
    # By hand: 4 of 16, 4 of 12, 4 of 8; of the 4 left 3 (0 < 8, 1 < 6, 2 < 4, not 3 < 2); the last one; none.
    assert got == [4, 4, 4, 3, 1, 0, 0, 0]
    slots.give(0)
    assert slots.take(7) == 0


def test_the_slot_that_came_back_last_is_used_first():
    slots = PackSlots(4)
    first, second = slots.take("a"), slots.take("a")
    slots.give(first)
    assert slots.take("b") == first and second != first


def test_a_slot_is_given_back_once():
    slots = PackSlots(2)
    slot = slots.take("a")
    slots.give(slot)
    with pytest.raises(ValueError, match="held by nobody"):
        slots.give(slot)
    with pytest.raises(ValueError, match="held by nobody"):
        slots.give(5)


@settings(deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 5),
    st.lists(st.one_of(st.tuples(st.just("take"), st.integers(0, 3)), st.tuples(st.just("give"), st.integers(0, 11)))),
)
def test_no_slot_is_held_twice_or_lost(count, most, steps):
    slots, owner = PackSlots(count, most), {}
    for what, value in steps:
        if what == "take":
            slot = slots.take(value)
            if slot is None:
                mine = sum(o == value for o in owner.values())
                assert mine >= most or mine >= 2 * (count - len(owner))
            else:
                assert slot not in owner and 0 <= slot < count
                owner[slot] = value
        elif value in owner:
            slots.give(value)
            del owner[value]
        assert slots.free == count - len(owner)
        for holder in range(4):
            assert slots.held(holder) == sum(o == holder for o in owner.values()) <= most
    # Nobody waits for ever: once all is given back, anyone gets one.
    for slot in list(owner):
        slots.give(slot)
    assert slots.take("last") is not None
