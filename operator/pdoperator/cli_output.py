"""What `pdcluster preflight` prints, for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdoperator.domain.preflight import Preflight
from pdoperator.domain.preflight_outside import Outside, Side

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


def outside_text(pairs: Sequence[Outside]) -> str:
    """The verdict and findings of each pair, then what was assumed and what no rule reads."""
    lines = [as_text(name, pair.result) for name, pair in _named(pairs)]
    for side in _sides(pairs):
        lines.append(f"  {side.role.value}: {side.source}, backend {side.facts.backend.value}")
        if side.assumed:
            lines.append(f"    assumed: {'; '.join(side.assumed)}")
        if side.not_checked:
            lines.append(f"    no rule of fit reads: {' '.join(side.not_checked)}")
    return "\n".join(lines)


def outside_dict(pairs: Sequence[Outside]) -> dict[str, Any]:
    """As `as_dict`, and per role where its facts are from, what they are, and what was not checked. With several
    decode groups `decode` is a list of them."""
    if len(pairs) == 1:
        return as_dict([("", pairs[0].result)]) | {side.role.value: side.to_dict() for side in pairs[0].sides}
    prefill, *decodes = _sides(pairs)
    found = as_dict([(name, pair.result) for name, pair in _named(pairs)])
    return found | {"prefill": prefill.to_dict(), "decode": [side.to_dict() for side in decodes]}


def _named(pairs: Sequence[Outside]) -> list[tuple[str, Outside]]:
    if len(pairs) == 1:
        return [("pair", pairs[0])]
    return [(f"pair with decode {number}", pair) for number, pair in enumerate(pairs, 1)]


def _sides(pairs: Sequence[Outside]) -> list[Side]:
    """Prefill once, and every decode."""
    return [pairs[0].sides[0], *(pair.sides[1] for pair in pairs)]


def exit_code(results: list[Preflight]) -> int:
    """0 where nothing fails, else 1."""
    return DOES_NOT_FIT if any(r.verdict == "Fail" for r in results) else FITS
