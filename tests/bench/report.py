"""A run as a table for people and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bounds import STRATEGY_COPIES, copy_bound
from measure import BULK, MEMCPY, NATURAL, OURS, SGLANG, Measured
from score import Bar, Pick, chosen

HEAD = (
    "| transport, TP, page, tokens | ours (min-max) | strategy | raw, same pieces | raw, 1 MiB | SGLang* | memcpy "
    "| copy bound |",
    "|---|---|---|---|---|---|---|---|",
)


def _time(measured: Measured, variant: str, ratio: bool = True) -> str:
    median = measured.median(variant)
    if median is None:
        return "-"
    times = measured.ratio(OURS, variant) if ratio else None
    return f"{median * 1e3:.1f}" + (f" ({times:.2f}x)" if times is not None else "")


def row(measured: Measured, cores: int) -> str:
    """One line of the table. "(1.20x)" after a rival: ours is 1.2 times as fast."""
    cell = measured.cell
    label = cell.label + (" (printed only)" if cell.printed_only else "")
    if (ours := measured.median(OURS)) is None:
        return f"| {label} | {'; '.join(measured.missing.values()) or 'not measured'} | | | | | | |"
    low, high = measured.spread(OURS)
    strategy = chosen(measured)
    bound = "-"
    if (memcpy := measured.median(MEMCPY)) is not None and strategy in STRATEGY_COPIES:
        bound = f"{copy_bound(cell.setup, strategy, cell.load.nbytes(cell.setup), memcpy, cores) * 1e3:.1f}"
    columns = [
        label,
        f"**{ours * 1e3:.1f}** ({low * 1e3:.1f}-{high * 1e3:.1f})",
        strategy,
        *(_time(measured, v) for v in (NATURAL, BULK, SGLANG)),
        _time(measured, MEMCPY, ratio=False),
        bound,
    ]
    return "| " + " | ".join(columns) + " |"


def strategies(found: Sequence[Measured], picks: dict[str, Pick]) -> list[str]:
    """Forced strategies as measured and as the rule predicted them, and what it chose."""
    lines = ["| cell | measured (predicted) ms | chosen | fastest | loss |", "|---|---|---|---|---|"]
    for m in found:
        times = {s: t for s in m.cell.setup.strategies if (t := m.median(s)) is not None}
        if not times:
            continue
        told = ", ".join(f"{s} {t * 1e3:.1f} ({m.predicted.get(s, 0.0) * 1e3:.1f})" for s, t in times.items())
        held = picks.get(m.cell.label)
        if held is None:
            lines.append(f"| {m.cell.label} | {told} | {chosen(m)} | | |")
        else:
            loss = f"{held.loss:.2f}" + ("" if held.right else " (no)")
            lines.append(f"| {m.cell.label} | {told} | {held.chosen} | {held.fastest} | {loss} |")
    return lines


def bars(judged: Sequence[Bar]) -> list[str]:
    """One line a bar."""
    words = {True: "reached", False: "NOT reached", None: "-"}
    return [
        f"{words[b.reached]:11}  {b.name} {b.wanted}: {b.found}" + (f"\n             {b.detail}" if b.detail else "")
        for b in judged
    ]


def as_json(found: Sequence[Measured], picks: dict[str, Pick], judged: Sequence[Bar], **more: Any) -> dict[str, Any]:
    """Every sample, in seconds."""
    return {
        **more,
        "cells": [
            {
                "cell": m.cell.label,
                "bytes": m.cell.load.nbytes(m.cell.setup),
                "chosen": chosen(m),
                "predicted_seconds": m.predicted,
                "printed_only": m.cell.printed_only,
                "median_seconds": {v: statistics.median(s.values()) for v, s in m.samples.items() if s},
                "samples": {v: [round(t, 6) for t in s.values()] for v, s in m.samples.items()},
                "missing": m.missing,
                "counters": {"prefill": m.prefill, "decode": m.decode},
                "fastest": picks[m.cell.label].fastest if m.cell.label in picks else None,
            }
            for m in found
        ],
        "bars": [asdict(b) for b in judged],
    }
