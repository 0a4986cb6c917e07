"""Does it fit? From the spec before a pod is launched, and from the ranks' cards before anything is wired."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.facts import spec_facts
from pdoperator.domain.finding import Finding as Finding
from pdoperator.domain.finding import fail
from pdoperator.domain.spec_checks import spec_findings
from pdtransfer.contract import compat
from pdtransfer.contract.geometry import ModelGeometry

SAME_ENGINE = "V1"
"""Rule about one engine and version on both sides."""


@dataclass(frozen=True)
class Preflight:
    """All findings, and what they add up to."""

    findings: tuple[Finding, ...]

    def of(self, status: str) -> tuple[Finding, ...]:
        """Findings of one status."""
        return tuple(f for f in self.findings if f.status == status)

    @property
    def verdict(self) -> str:
        """Fail when anything fails, else Unknown when a fact is missing, else Pass (warnings pass)."""
        if self.of("Fail"):
            return "Fail"
        return "Unknown" if self.of("Unknown") else "Pass"


def preflight(
    spec: PDClusterSpec, geometry: ModelGeometry | None = None, plugins: frozenset[str] | None = None
) -> Preflight:
    """Everything that can be said before a pod exists. `plugins` are those that NIXL finds in the engine's image, where
    somebody has looked."""
    found = spec_findings(spec)
    try:
        prefill, decode = spec_facts(spec, geometry)
    except ValueError as e:
        found.append(fail("Facts", f"the spec's values do not make a model: {e}", "Correct spec.model.geometry."))
        return Preflight(tuple(found))
    prefill, decode = (f.model_copy(update={"nixl_plugins": plugins}) for f in (prefill, decode))
    report = compat.check(prefill, decode, spec.transfer.backend)
    for f in from_report(report.findings):
        if f.rule == SAME_ENGINE and f.status == "Unknown":
            # One object names one image for both roles: whatever version it holds, it is the same one.
            f = Finding(f.rule, "Pass", f"both roles run {spec.engine.image}")
        found.append(f)
    return Preflight(tuple(found))


def from_report(findings: Iterable[compat.Finding]) -> list[Finding]:
    """Findings of the contract's rules in the operator's form."""
    return [Finding(f.rule, f.status.value, f.message or f.title, f.action) for f in findings]
