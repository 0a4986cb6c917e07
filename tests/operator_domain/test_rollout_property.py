"""Rollouts under edits, reverts and every budget: never fewer serving than allowed, never more pods than allowed,
and always an end at the last revision."""

from __future__ import annotations

from typing import Any

from domain_makers import quickstart
from domain_world import World
from hypothesis import given, settings
from hypothesis import strategies as st

from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.revision import role_revision
from pdtransfer.contract.base import Role


def spec(replicas: int, surge: int, unavailable: int, value: int) -> dict[str, Any]:
    return quickstart(
        prefill__replicas=1,
        decode__replicas=replicas,
        decode__env=[{"name": "A", "value": str(value)}],
        rollout={"maxSurge": surge, "maxUnavailable": unavailable},
    )


@given(
    replicas=st.integers(1, 3),
    surge=st.integers(0, 2),
    unavailable=st.integers(0, 2),
    edits=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=4),
)
@settings(max_examples=30, deadline=None)
def test_budgets_hold_through_edits_and_reverts(
    replicas: int, surge: int, unavailable: int, edits: list[tuple[int, int]]
) -> None:
    if surge == unavailable == 0:
        surge = 1
    w = World(spec(replicas, surge, unavailable, 0))
    w.run()

    def step() -> bool:
        d = w.step()
        decodes = w.side(Role.DECODE)
        routed = [p for p in decodes if f"http://{p.ip}:30000" in w.routed()]
        assert len(routed) >= replicas - unavailable
        assert len(decodes) <= replicas + surge
        return bool(d.actions) or d.status is not None

    for value, steps in edits:
        w.edit(spec(replicas, surge, unavailable, value))
        for _ in range(steps):
            step()
    for _ in range(80):
        if not step():
            break
    last = role_revision(PDClusterSpec.model_validate(w.raw), Role.DECODE)
    assert [p.revision for p in w.side(Role.DECODE)] == [last] * replicas
    assert w.condition("Ready")["status"] == "True"
    assert len(w.side(Role.PREFILL)) == 1


def test_no_budget_at_all_is_named_and_moves_nothing() -> None:
    raw = spec(2, 0, 0, 0)
    w = World(raw)
    w.run()
    pods = set(w.pods)
    w.edit(spec(2, 0, 0, 1))
    w.run()
    assert set(w.pods) == pods
    c = w.condition("Progressing")
    assert (c["status"], c["reason"]) == ("False", "Blocked")
    assert "maxSurge" in c["message"]
