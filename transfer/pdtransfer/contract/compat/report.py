"""Answer of a fit check: one finding per rule, and what they add up to."""

from __future__ import annotations

import json
from enum import StrEnum

from pdtransfer.contract.base import Backend, ContractModel


class Status(StrEnum):
    """Of one rule, and of a whole report (there Fail > Unknown > Warn > Pass)."""

    PASS = "Pass"
    WARN = "Warn"
    FAIL = "Fail"
    UNKNOWN = "Unknown"


_WORST_FIRST = (Status.FAIL, Status.UNKNOWN, Status.WARN)


class Finding(ContractModel):
    """What one rule says about this pair.

    `message` says what is wrong (with both values) and what would happen, `action` what to
    change. `severity` is the rule's outcome word (START, PDEAD ...), empty for Pass. For Unknown
    `needs` names the missing fact as role.fact."""

    rule: str
    status: Status
    title: str = ""
    message: str = ""
    action: str = ""
    severity: str = ""
    needs: str = ""
    emulated: bool = False
    """The engine is Reference and only holds itself to this backend's limits."""


class Report(ContractModel):
    """Findings in the order of the rules.

    `deferred` are rules that nothing in this check could decide: before launch those that only a
    rank's card decides, and on cards alone those that only the spec decides. They do not count
    in the verdict: each is decided by the check at the other time."""

    backend: Backend
    findings: tuple[Finding, ...] = ()
    deferred: tuple[str, ...] = ()

    @property
    def verdict(self) -> Status:
        """Fail > Unknown > Warn > Pass."""
        present = {f.status for f in self.findings}
        return next((s for s in _WORST_FIRST if s in present), Status.PASS)

    @property
    def fits(self) -> bool:
        """Nothing fails (Unknown and Warn do not stop a pair)."""
        return self.verdict is not Status.FAIL

    @property
    def first_failure(self) -> Finding | None:
        """First finding that fails, or None."""
        return next((f for f in self.findings if f.status is Status.FAIL), None)

    def of(self, status: Status) -> tuple[Finding, ...]:
        """Findings with this status."""
        return tuple(f for f in self.findings if f.status is status)

    def finding(self, rule: str) -> Finding | None:
        """First finding of rule `rule`; None when it was deferred or isn't known."""
        return next((f for f in self.findings if f.rule == rule), None)

    def to_json(self, *, indent: int | None = None) -> str:
        """JSON of the report with its verdict."""
        return json.dumps({"verdict": self.verdict.value, **self.model_dump(mode="json")}, indent=indent)
