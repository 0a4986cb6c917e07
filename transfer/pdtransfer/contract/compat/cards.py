"""The same rules on real layouts: between two engines (operator) and between two ranks (handshake)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdtransfer.contract.base import Backend
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.compat import layouts
from pdtransfer.contract.compat.checker import check
from pdtransfer.contract.compat.observed import contradiction, facts_from_cards
from pdtransfer.contract.compat.report import Finding, Report, Status
from pdtransfer.contract.facts import RoleFacts


def check_cards(
    prefill_cards: Sequence[RankCard],
    decode_cards: Sequence[RankCard],
    backend: Backend | None = None,
    *,
    prefill_spec: RoleFacts | None = None,
    decode_spec: RoleFacts | None = None,
) -> Report:
    """Whether two running engines fit: every rule on facts read from all their ranks' cards, and
    the layout rules. The specs, where given, tell what no card does."""
    if not prefill_cards or not decode_cards:
        side = "prefill" if not prefill_cards else "decode"
        return Report(
            backend=backend or (prefill_spec.backend if prefill_spec else Backend.PDCLUSTER),
            findings=(
                Finding(
                    rule="L3",
                    status=Status.UNKNOWN,
                    title=layouts.L3.title,
                    message=f"{layouts.L3.title}: no {side} rank shows a card.",
                    action="wait for the engine to start",
                    needs=f"{side}.cards",
                ),
            ),
        )
    # One spec names one model: a geometry that either side's spec states holds for both.
    stated = [spec.geometry for spec in (prefill_spec, decode_spec) if spec and spec.geometry]
    geometry = stated[0] if stated else None
    p = facts_from_cards(prefill_cards, prefill_spec, geometry)
    d = facts_from_cards(decode_cards, decode_spec, geometry)
    facts_report = check(p, d, backend)
    both = (*prefill_cards, *decode_cards)
    sides = ((prefill_cards, p), (decode_cards, d))
    pairs = [(a, b) for a in prefill_cards for b in decode_cards]
    found = (
        layouts.L1.finding(layouts.broken_seal(both)),
        layouts.L2.finding(_first(layouts.disagreement(cards) for cards, _ in sides)),
        layouts.L3.finding(_first(layouts.gap(cards, facts.geometry) for cards, facts in sides)),
        layouts.L4.finding(_first(layouts.unmapped(a, b) for a, b in pairs)),
        layouts.L5.finding(_first(layouts.wrong_size(card) for card in both)),
        layouts.L6.finding(layouts.strangers(prefill_cards[0], decode_cards[0])),
        layouts.L7.finding(layouts.other_fingerprint(prefill_cards[0], decode_cards[0])),
        layouts.L8.finding(
            _first(contradiction(geometry, cards[0]) for cards, _ in sides) if geometry is not None else None
        ),
    )
    return facts_report.model_copy(update={"findings": (*facts_report.findings, *found)})


def check_rank_pair(prefill: RankCard, decode: RankCard, backend: Backend | None = None) -> Report:
    """What one rank decides about one peer at the handshake, before a byte moves. Only what these
    two cards tell; whether the engines are complete is the operator's `check_cards`."""
    facts_report = check(facts_from_cards([prefill]), facts_from_cards([decode]), backend)
    both = (prefill, decode)
    found = (
        layouts.L1.finding(layouts.broken_seal(both)),
        layouts.L4.finding(layouts.unmapped(prefill, decode)),
        layouts.L5.finding(_first(layouts.wrong_size(card) for card in both)),
        layouts.L6.finding(layouts.strangers(prefill, decode)),
        layouts.L7.finding(layouts.other_fingerprint(prefill, decode)),
    )
    return facts_report.model_copy(update={"findings": (*facts_report.findings, *found)})


def _first(problems: Iterable[str | None]) -> str | None:
    return next((p for p in problems if p is not None), None)
