"""Writes that were refused: each waits for its own next try."""

from __future__ import annotations

from pdoperator.api.conditions import Reason
from pdoperator.kube.observe import Problem
from pdoperator.runtime.refused import Refused

QUOTA = Problem(Reason.API_FORBIDDEN, "exceeded quota")
ENDS = Problem(Reason.NAMESPACE_TERMINATING, "it is being terminated")


def test_the_second_try_comes_with_the_next_look_and_then_they_spread_up_to_a_minute() -> None:
    refused, now, tries = Refused(), 0.0, []
    while now < 400.0:
        refused.look(1, ["create Pod a"], now)
        if refused.due("create Pod a", now):
            tries.append(now)
            refused.tried("create Pod a", QUOTA, now)
        now += 1.0
    assert tries == [0, 1, 2, 4, 8, 16, 32, 64, 124, 184, 244, 304, 364]
    assert refused.due("create Pod b", now) and refused.problem == QUOTA


def test_success_and_what_is_not_wanted_any_more_are_forgotten() -> None:
    refused = Refused()
    refused.look(1, ["a", "b"], 0.0)
    refused.tried("a", QUOTA, 0.0)
    refused.tried("b", QUOTA, 0.0)
    refused.tried("a", None, 1.0)
    assert refused.problem == QUOTA
    refused.look(1, ["a"], 2.0)
    assert refused.problem is None


def test_that_the_namespace_ends_is_remembered_though_nothing_is_wanted_then() -> None:
    refused = Refused()
    refused.look(1, ["create Pod a"], 0.0)
    refused.tried("create Pod a", ENDS, 0.0)
    refused.look(1, [], 1.0)
    assert refused.problem == ENDS and not refused.due("create Pod a", 29.0)
    refused.look(1, [], 31.0)
    assert refused.problem is None
