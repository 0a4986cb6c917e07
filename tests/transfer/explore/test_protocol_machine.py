"""Larger worlds by random walks: two prefill and two decode ranks, three rooms in a tiny pool, retraction,
peers that die and are replaced, connections that break. Every rule of `checks` holds after every step,
and at the end of each walk, once faults stop, everything comes to an end."""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from explore.actions import Action, apply, enabled
from explore.bounds import Bounds
from explore.checks import check
from explore.fair import Calm
from explore.world import World

WALKS = int(os.environ.get("PD_WALKS", "120"))
STEPS = int(os.environ.get("PD_WALK_STEPS", "50"))
FAULTS = {
    "rooms": 3,
    "pages": 2,
    "attempts": 3,
    "sends": 3,
    "losses": 3,
    "doublings": 3,
    "errors": 2,
    "lates": 2,
    "aborts": 4,
    "prefill_aborts": 1,
    "breaks": 2,
    "kills": 1,
    "decode_kills": 1,
    "flips": 1,
    "jumps": 4,
}
SHAPES = (
    Bounds(**FAULTS, prefill=2, decode=2),
    Bounds(**FAULTS, prefill=2, decode=2, near=True),
    Bounds(**FAULTS, prefill=1, decode=2, strategy="sliced"),
    Bounds(**FAULTS, prefill=1, decode=2, slots=3, strategy="staged"),
    Bounds(**FAULTS, prefill=2, decode=1, slots=2, strategy="merge"),
    Bounds(**FAULTS, prefill=1, decode=2, slots=2, strategy="split"),
    Bounds(**FAULTS, prefill=2, decode=1, slots=2, strategy="staged", near=True),
)
ENGINE = ("receive", "send", "chunk")
FAULT = ("lose", "double", "err", "land late", "break", "kill", "restart", "roster", "time", "give up", "abort")
"""Drawn evenly; one that is not possible stands for any."""


class Walk(RuleBasedStateMachine):
    """One walk. What is possible next comes from the world; Hypothesis picks."""

    happened: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.path: list[Action] = []

    @initialize(shape=st.sampled_from(range(len(SHAPES))))
    def begin(self, shape: int) -> None:
        logging.disable(logging.CRITICAL)
        self.world = World(SHAPES[shape])

    def _can(self, *names: str) -> list[Action]:
        return [a for a in enabled(self.world) if a[0] in names] if self.world is not None else []

    def _one(self, n: int, *names: str) -> None:
        possible = self._can(*names)
        action = possible[n % len(possible)]
        self.path.append(action)
        self.happened[action[0]] += 1
        self._do(action)

    def _do(self, action: Action) -> None:
        assert self.world is not None
        try:
            apply(self.world, action)
            check(self.world)
        except BaseException as error:
            error.add_note(self._told())
            raise

    def _told(self) -> str:
        assert self.world is not None
        return "\n".join([str(self.world.bounds), *map(str, self.path), "faults stop", *self.world.after])

    @precondition(lambda self: self._can(*ENGINE))
    @rule(n=st.integers(0, 20))
    def engine(self, n: int) -> None:
        self._one(n, *ENGINE)

    @precondition(lambda self: self._can("deliver"))
    @rule(n=st.integers(0, 20))
    def deliver(self, n: int) -> None:
        self._one(n, "deliver")

    @precondition(lambda self: self._can("deliver", "land", "connect"))
    @rule(most=st.integers(1, 6))
    def calm(self, most: int) -> None:
        """Some steps without faults, or a walk would seldom come far."""
        assert self.world is not None
        calm = Calm(self.world)
        for _ in range(most):
            action = calm.next()
            if action is None:
                return
            self.path.append(action)
            self.happened[action[0]] += 1
            self._do(action)

    @precondition(lambda self: self._can("land"))
    @rule(n=st.integers(0, 20))
    def land(self, n: int) -> None:
        self._one(n, "land")

    @precondition(lambda self: self._can("connect"))
    @rule(n=st.integers(0, 5))
    def connect(self, n: int) -> None:
        self._one(n, "connect")

    @precondition(lambda self: self._can(*FAULT))
    @rule(kind=st.sampled_from(FAULT), n=st.integers(0, 20))
    def fault(self, kind: str, n: int) -> None:
        self._one(n, *([kind] if self._can(kind) else FAULT))

    def teardown(self) -> None:
        if self.world is None:
            return
        try:
            Calm(self.world).conclude()
            self.happened["succeeded"] += sum(r.transfer.state.value == "Success" for r in self.world.receipts)
            self.happened["failed"] += sum(r.transfer.state.value == "Failed" for r in self.world.receipts)
        except BaseException as error:
            error.add_note(self._told())
            raise
        finally:
            self.world.close()
            logging.disable(logging.NOTSET)


def walk(walks: int, steps: int, *, shrink: bool = True) -> None:
    """Seeded: the same walks each time, unless PD_WALK_SEED=random."""
    run_state_machine_as_test(
        Walk,
        settings=settings(
            max_examples=walks,
            stateful_step_count=steps,
            derandomize=os.environ.get("PD_WALK_SEED") != "random",
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_random_walks_through_larger_worlds_break_no_rule_and_always_end():
    Walk.happened.clear()
    walk(WALKS, STEPS)
    print(dict(Walk.happened))
    for what in ("deliver", "land", "lose", "double", "err", "break", "kill", "restart", "abort", "time"):
        assert Walk.happened[what], what  # each kind of fault did happen
    assert Walk.happened["succeeded"] > 5 and Walk.happened["failed"] > 5


def test_the_walks_find_a_seeded_bug():
    """Negative control. It ends at the first walk that finds the bug; how many that takes changes with the code."""
    from explore.seeded import SEEDED
    from explore.virtual import replaced

    bug = next(b for b in SEEDED if b.name == "a deadline frees")
    with replaced(*bug.changes()), pytest.raises(AssertionError, match=r"may land|given back|does not hold"):
        walk(20 * WALKS, STEPS, shrink=False)
