"""The real session code over every path within small bounds: no write without an owner, no false success,
no answer that does not hold, and from every state a way to an end."""

from __future__ import annotations

import os

import pytest

from explore.bounds import Bounds
from explore.fair import Calm
from explore.search import explore, replay
from explore.snapshot import fingerprint
from explore.world import World

DEEPER = float(os.environ.get("PD_EXPLORE", "0.4"))
"""How many times the states below are looked at; CI and `make explore` say more."""

ONE = {"attempts": 1, "sends": 1, "pages": 1}
STAGED = {"decode_of": 2, "slots": 2, "strategy": "staged"}
WORLDS = {
    "two attempts, reordered": (Bounds(pages=1), 1000),
    "two attempts of two pages": (Bounds(), 1000),
    "lost and doubled messages": (Bounds(pages=1, losses=1, doublings=1), 1500),
    "handles that err, a prefill that gives up": (Bounds(errors=1, prefill_aborts=1, attempts=1, sends=1), 1000),
    "time": (Bounds(**ONE, jumps=3, errors=1), 1000),
    "a source that dies and comes back": (Bounds(**ONE, kills=1, jumps=1), 1000),
    "a source whose death can be looked up": (Bounds(**ONE, kills=1, jumps=1, near=True), 1000),
    "connections that break, rosters that forget": (Bounds(**ONE, breaks=1, flips=1, losses=1), 1000),
    "a roster that forgets while a handle errs": (Bounds(**ONE, flips=1, errors=1, jumps=2), 1000),
    "two sources": (Bounds(**ONE, prefill=2, losses=1), 1000),
    "staged": (Bounds(**STAGED, attempts=2, sends=1, pages=1, losses=1, doublings=1), 1500),
    "staged, two pages through one slot": (Bounds(**{**STAGED, "slots": 1}, attempts=1, sends=1, errors=1), 1000),
    "staged, connections that break": (Bounds(**STAGED, **ONE, breaks=1, doublings=1, jumps=1), 1000),
    "staged, a source that dies": (Bounds(**STAGED, **ONE, kills=1, near=True, errors=1, jumps=1), 1000),
    "staged by two sources": (Bounds(**ONE, prefill=2, slots=2, strategy="staged"), 1000),
}


def test_one_path_leads_to_one_state():
    """Or no state would be seen again, and the rest would prove little."""
    marks = set()
    for _ in range(2):
        world = replay(Bounds(**STAGED, **ONE), (("receive", "d0"), ("send", "p0")))
        marks.add(fingerprint(world))
        world.close()
    assert len(marks) == 1


@pytest.mark.parametrize("name", WORLDS)
def test_no_path_breaks_a_rule_and_every_state_has_an_exit(name):
    bounds, states = WORLDS[name]
    result = explore(bounds, states=int(states * DEEPER))
    print(f"{name}: {result}")
    assert result.path is None, f"{name}: {result}"
    assert result.transitions > 1.2 * result.states  # paths meet again
    assert {"receive", "send", "deliver", "land", "abort"} <= result.seen


def follow(bounds: Bounds, *path: str) -> World:
    """The world at the end of a path whose actions are written as one text each, words apart by `|`."""
    return replay(bounds, tuple(tuple(step.split("|")) for step in path))


def test_a_repeated_abort_is_acknowledged_when_its_first_acknowledgement_was_lost():
    """Found by this exploration: the leg that waited for the next attempt swallowed the repeat."""
    begin = ("receive|d0", "send|p0", "deliver|request.0")
    world = follow(Bounds(**ONE, losses=1), *begin, "abort|d0", "deliver|abort.0", "land|0", "lose|abort_ack.0")
    try:
        Calm(world).conclude()
    finally:
        world.close()


def test_a_handle_that_errs_after_the_settle_deadline_is_no_drained_one():
    """Found by the random walks: prefill's roster dropped decode, the settle deadline passed, the handle
    errored, decode was let go, and was told that nothing of it was in flight when it dialled again."""
    begin = ("receive|d0", "send|p0", "deliver|request.0")
    bounds = Bounds(**ONE, flips=1, errors=1, jumps=1, losses=2)
    world = follow(bounds, *begin, "roster|p0", "time", "err|0", "lose|started.0", "lose|failed.0", "connect|d0|p0/p1")
    try:
        assert not world.receipts[0].transfer.pages_releasable
        assert world.may_land(world.flights[0])
        Calm(world).conclude()
    finally:
        world.close()
