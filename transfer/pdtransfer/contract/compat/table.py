"""The rules as a Markdown table, for the documentation: `python -m pdtransfer.contract.compat`."""

from __future__ import annotations

from pdtransfer.contract.base import Backend
from pdtransfer.contract.compat.checker import RULES
from pdtransfer.contract.compat.layouts import LAYOUT_RULES
from pdtransfer.contract.compat.rule import CONSEQUENCE, READ_FROM, Outcome


def rules_table() -> str:
    """One row per rule: id, title, what each backend makes of it, engines, facts, what to change."""
    head = ["Rule", "Title", *(b.value for b in Backend), "Engines", "Versions", "Facts", "What to change"]
    rows = [
        [
            rule.id,
            rule.title,
            *(rule.outcome(b).value for b in Backend),
            ", ".join(sorted(e.value for e in rule.engines)),
            _versions(rule.since, rule.until),
            ", ".join(rule.needs),
            rule.change or "nothing",
        ]
        for rule in RULES
    ]
    rows += [
        [r.id, r.title, *(r.outcome.value for _ in Backend), "Reference, SGLang", "all", "cards", r.change]
        for r in LAYOUT_RULES
    ]
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)
    words = "\n".join(
        f"- `{o.value}` ({'Warn' if o.tolerable else 'Fail'}): {CONSEQUENCE[o]}" for o in Outcome if CONSEQUENCE[o]
    )
    return f"Rules of fit, read from SGLang {READ_FROM}. `fine` is no limit.\n\n{table}\n\n{words}\n"


def _versions(since: str, until: str) -> str:
    if not since and not until:
        return "all"
    return " ".join(part for part in (f">={since}" if since else "", f"<{until}" if until else "") if part)
