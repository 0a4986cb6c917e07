"""Everything one look worked out, handed from decide() to status: frozen, without decisions of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.actions import DesiredWorker
from pdoperator.domain.gates import Gates
from pdoperator.domain.lifecycle import Plan
from pdoperator.domain.links import Link
from pdoperator.domain.observed import Observed, PodSeen
from pdoperator.domain.preflight import Finding, Preflight
from pdoperator.domain.realround import RealRound
from pdoperator.domain.view import View, engine_pods
from pdoperator.domain.wiring import Wiring
from pdtransfer.contract.base import Role

_TOLD_BY_CONDITIONS = frozenset({"TCPFabric"})
"""FabricReady says it: a fabric that was asked for is no surprise."""


@dataclass(frozen=True)
class Picture:
    """One observation, understood."""

    observed: Observed
    spec: PDClusterSpec | None
    managed: bool
    """The operator wires these pods (backend PDCluster)."""
    wanted: dict[Role, int]
    revisions: dict[Role, str]
    preflight: Preflight | None
    card_findings: tuple[Finding, ...]
    """Failing and warning findings on real layouts."""
    cards_decided: bool
    """Cards of both current revisions were compared."""
    view: View
    links: dict[tuple[str, str], Link]
    gates: Gates
    wiring: Wiring
    plan: Plan
    workers: tuple[DesiredWorker, ...]
    stale: dict[str, float] = field(default_factory=dict)
    real: RealRound | None = None
    """Proof by real requests, where a backend of SGLang's own moves the KV."""

    @property
    def may_launch(self) -> bool:
        """The spec parses and nothing known speaks against it."""
        return self.spec is not None and self.preflight is not None and self.preflight.verdict != "Fail"

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Warnings of specs and cards, without those that a condition of its own tells."""
        found = (*(self.preflight.of("Warn") if self.preflight else ()), *self.card_findings)
        return tuple(f for f in found if f.status == "Warn" and f.rule not in _TOLD_BY_CONDITIONS)

    @property
    def pods(self) -> tuple[PodSeen, ...]:
        """Engine pods that are neither finished nor terminating."""
        return tuple(p for p in engine_pods(self.observed) if not p.deleting)

    def side(self, role: Role) -> tuple[PodSeen, ...]:
        """Those of one role."""
        return tuple(p for p in self.pods if p.role == role.value)

    def ready(self, role: Role) -> tuple[PodSeen, ...]:
        """Pods of one role that serve: Ready, and in the ready set."""
        return tuple(
            p for p in self.side(role) if p.ready and p.uid in self.gates.ready and p.uid not in self.plan.leaving
        )

    def ready_links(self) -> list[Link]:
        """Links between pods of the ready sets."""
        return [link for key, link in sorted(self.links.items()) if set(key) <= self.gates.ready]
