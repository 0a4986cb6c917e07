"""What `pdcluster preflight` prints, for people and as JSON."""

from __future__ import annotations

from typing import Any

from pdoperator.domain.preflight import Preflight
from pdoperator.domain.preflight_outside import Outside

FITS, DOES_NOT_FIT, UNREADABLE = 0, 1, 2


class Unreadable(Exception):
    """The input can not be read; the message says what and why."""


def as_text(name: str, result: Preflight) -> str:
    """For people: the verdict, then every finding that is not Pass."""
    passed = len(result.of("Pass"))
    lines = [f"{name}: {result.verdict}, {passed} rules pass"]
    for status in ("Fail", "Unknown", "Warn"):
        for f in result.of(status):
            lines.append(f"  {f.status:7} {f.rule:12} {f.message}")
            if f.action:
                lines.append(f"          {'':12} -> {f.action}")
    return "\n".join(lines)


def as_dict(results: list[tuple[str, Preflight]]) -> dict[str, Any]:
    """{"verdict", "findings"}; with several PDClusters the worst verdict and all findings, each
    message led by the name."""
    if len(results) == 1:
        only = results[0][1]
        return {"verdict": only.verdict, "findings": [f.to_dict() for f in only.findings]}
    verdicts = {r.verdict for _, r in results}
    worst = next(v for v in ("Fail", "Unknown", "Pass") if v in verdicts)
    findings = [
        f.to_dict() | {"message": f"{name}: {f.message}".rstrip(": ")} for name, r in results for f in r.findings
    ]
    return {"verdict": worst, "findings": findings}


def outside_text(outside: Outside) -> str:
    """The verdict and findings, then what was assumed and what no rule reads."""
    lines = [as_text("pair", outside.result)]
    for side in outside.sides:
        lines.append(f"  {side.role.value}: {side.source}, backend {side.facts.backend.value}")
        if side.assumed:
            lines.append(f"    assumed: {'; '.join(side.assumed)}")
        if side.not_checked:
            lines.append(f"    no rule of fit reads: {' '.join(side.not_checked)}")
    return "\n".join(lines)


def outside_dict(outside: Outside) -> dict[str, Any]:
    """As `as_dict`, and per role where its facts are from, what they are, and what was not checked."""
    sides = {side.role.value: side.to_dict() for side in outside.sides}
    return as_dict([("", outside.result)]) | sides


def exit_code(results: list[Preflight]) -> int:
    """0 where nothing fails, else 1."""
    return DOES_NOT_FIT if any(r.verdict == "Fail" for r in results) else FITS
