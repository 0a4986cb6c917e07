"""What the engine rewrites by itself, as findings of the rules that speak of it."""

from __future__ import annotations

from pdtransfer.contract.compat.report import Finding, Status
from pdtransfer.contract.compat.rule import Outcome, Rule
from pdtransfer.contract.effective import Effective, Rewrite


def with_rewrites(rule: Rule, finding: Finding | None, prefill: Effective, decode: Effective) -> Finding | None:
    """`finding` with what this rule's rewrites say. A value that somebody set and the engine changes is a Warn; a
    choice that was left to the engine is told in a Pass. A finding that fails, warns or misses a fact says enough."""
    told = [(e.facts.role.value, r) for e in (prefill, decode) for r in e.rewrites if r.rule == rule.id]
    if not told or (finding is not None and finding.status is not Status.PASS):
        return finding
    overridden = any(rewrite.overrides for _, rewrite in told)
    return Finding(
        rule=rule.id,
        status=Status.WARN if overridden else Status.PASS,
        title=rule.title,
        message=". ".join(sentence(role, rewrite) for role, rewrite in told) + ".",
        action=rule.change if overridden else "",
        severity=Outcome.NORM.value if overridden else "",
    )


def sentence(role: str, rewrite: Rewrite) -> str:
    """`decode: page size is set to 32, and will be 64 (DSA has pages of 64 x 1)`."""
    name = rewrite.field.replace("_", " ")
    default = not rewrite.overrides and rewrite.asked not in (None, "auto")
    asked = f"is {'by default ' if default else 'set to '}{_text(rewrite.asked)}"
    before = "is not set" if rewrite.asked in (None, "auto") else asked
    after = "what it will be is not known yet" if rewrite.effective is None else f"will be {_text(rewrite.effective)}"
    return f"{role}: {name} {before}, and {after}" + (f" ({rewrite.why})" if rewrite.why else "")


def _text(value: object) -> str:
    return "none" if value == "" else str(value)
