"""Settings of a pair in the rules' tables, and the word of one rule about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdtransfer.contract.base import Backend
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.compat import Report, Status, check
from pdtransfer.contract.facts import RoleFacts

Pair = Callable[..., tuple[RoleFacts, RoleFacts]]
"""The fixture `pair`."""
Cards = Callable[..., list[RankCard]]
"""The fixture `engine_cards`."""
LETTER = {Status.PASS: "P", Status.WARN: "W", Status.FAIL: "F", Status.UNKNOWN: "U"}
TP, PP, CP, DCP, ADP = (
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "dcp_size",
    "attention_data_parallel",
)


def sides(p: dict[str, Any], d: dict[str, Any], **both: Any) -> dict[str, Any]:
    """What each side says, and both."""
    return {"prefill": p, "decode": d, **both}


def prefill(**facts: Any) -> dict[str, Any]:
    """What only prefill says."""
    return {"prefill": facts}


def decode(**facts: Any) -> dict[str, Any]:
    """What only decode says."""
    return {"decode": facts}


def unknown(*names: str, **facts: Any) -> dict[str, Any]:
    """Settings in which nothing tells these facts (a command line that is not known whole)."""
    return {"forget": names, **facts}


def tp(p: int, d: int, **both: Any) -> dict[str, Any]:
    """Tensor parallelism of prefill and of decode."""
    return sides({TP: p}, {TP: d}, **both)


def failed(report: Report) -> list[str]:
    """The rules that fail."""
    return [f.rule for f in report.of(Status.FAIL)]


def decided(
    pair: Pair, rule: str, model: str | None, settings: dict[str, Any], backend: Backend, *, rewritten: bool
) -> tuple[str, str]:
    """(letter, severity) of one rule. `rewritten`: on what the engine makes of the settings; else on these alone."""
    settings = dict(settings)
    forget = settings.pop("forget", ())
    p, d = pair(model, **settings, backend=backend) if rewritten else pair(model, **settings)
    if forget or not rewritten:
        lost = {"whole_command": False} | dict.fromkeys(forget)
        p, d = p.model_copy(update=lost), d.model_copy(update=lost)
    finding = (check(p, d) if rewritten else check(p, d, backend)).finding(rule)
    return ("-", "") if finding is None else (LETTER[finding.status], finding.severity)
