"""Judges a run against the project's bars. Pure; nothing here ends a test."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from measure import BULK, NATURAL, OURS, SGLANG, Measured
from shape import BULK as BULK_TOKENS
from shape import SMALL, Setup

KIB64 = 64 << 10
NEAR = 1.10
"""A choice within 10 % of the fastest is right."""


@dataclass(frozen=True)
class Bar:
    """One demand. `reached` is None where nothing was measured for it."""

    name: str
    wanted: str
    found: str
    reached: bool | None
    detail: str = ""


@dataclass(frozen=True)
class Pick:
    """The cost rule in one cell: what was chosen, what was fastest of the forced ones, seconds of both."""

    label: str
    chosen: str
    fastest: str
    loss: float
    """Chosen over fastest, as forced and measured in the same rounds."""

    @property
    def right(self) -> bool:
        """Fastest, or within 10 % of it."""
        return self.loss <= NEAR


def chosen(measured: Measured) -> str:
    """How the bytes went, from prefill's counters: legs of one request may choose differently."""
    names = {
        key.split("strategy=")[1].split(",")[0].rstrip("}")
        for counters in measured.prefill
        for key, value in counters.items()
        if key.startswith("bytes{") and "strategy=" in key and value > 0
    }
    return "+".join(sorted(names)) or "?"


def pick(measured: Measured) -> Pick | None:
    """None where strategies were not forced. A mixed choice is judged by its own time."""
    times = {s: t for s in measured.cell.setup.strategies if (t := measured.median(s)) is not None}
    name = chosen(measured)
    if len(times) < 2 or measured.median(OURS) is None:
        return None
    fastest = min(times, key=lambda s: times[s])
    variant = name if name in times else OURS
    loss = 1.0 if name == fastest else 1 / (measured.ratio(variant, fastest) or 1.0)
    return Pick(measured.cell.label, name, fastest, max(1.0, loss))


def _ratios(found: Sequence[Measured], keep: Callable[[Measured], bool], other: str) -> dict[str, float]:
    ratios = {m.cell.label: m.ratio(OURS, other) for m in found if keep(m) and not m.cell.printed_only}
    return {label: ratio for label, ratio in ratios.items() if ratio is not None}


def _least(name: str, wanted: float, ratios: dict[str, float], most: bool = False) -> Bar:
    """Every cell's ratio of rates is at least `wanted` (`most`: the ratio of times is at most that)."""
    sign = "<=" if most else ">="
    if not ratios:
        return Bar(name, f"{sign} {wanted:g}", "not measured", None)
    values = {k: 1 / v if most else v for k, v in ratios.items()}
    good = {k: v <= wanted if most else v >= wanted for k, v in values.items()}
    worst = max(values.values()) if most else min(values.values())
    detail = ", ".join(f"{k} {v:.2f}{'' if good[k] else ' (no)'}" for k, v in values.items())
    found = f"{sum(good.values())} of {len(good)} cells, worst {worst:.2f}"
    return Bar(name, f"{sign} {wanted:g}", found, all(good.values()), detail)


def rate_bars(found: Sequence[Measured]) -> list[Bar]:
    """Bars on time."""

    def where(unequal: bool, tokens: int, transport: str = "") -> Callable[[Measured], bool]:
        return lambda m: (
            m.cell.setup.unequal is unequal
            and m.cell.load.tokens == tokens
            and m.cell.load.concurrent == 1
            and (not transport or m.cell.setup.transport == transport)
        )

    equal, unequal = where(False, BULK_TOKENS), where(True, BULK_TOKENS, "tcp")
    small, shared = where(True, SMALL), where(True, BULK_TOKENS, "shm")
    few = where(False, SMALL)
    return [
        _least("equal TP, 4096 tokens: rate over raw NIXL, same pieces", 0.95, _ratios(found, equal, NATURAL)),
        _least("unequal TP, shm: rate over SGLang's slices (guard removed)", 4, _ratios(found, shared, SGLANG)),
        _least("unequal TP, tcp: rate over raw NIXL, 1 MiB pieces", 0.55, _ratios(found, unequal, BULK)),
        _least("unequal TP, 64 tokens: rate over raw NIXL, same pieces", 1, _ratios(found, small, NATURAL)),
        _least("unequal TP, 64 tokens: time over raw NIXL, 1 MiB pieces", 3, _ratios(found, small, BULK), most=True),
        _least("equal TP, 64 tokens: time over raw NIXL, same pieces", 1.2, _ratios(found, few, NATURAL), most=True),
    ]


def _each(name: str, wanted: str, values: dict[str, tuple[float, float]], show: Callable[[float], str]) -> Bar:
    """`values`: what was found and its bound, a cell."""
    if not values:
        return Bar(name, wanted, "not measured", None)
    good = {k: v <= bound for k, (v, bound) in values.items()}
    detail = ", ".join(f"{k} {show(v)}{'' if good[k] else f' (no, {show(b)})'}" for k, (v, b) in values.items())
    return Bar(name, wanted, f"{sum(good.values())} of {len(good)} cells", all(good.values()), detail)


def count_bars(found: Sequence[Measured]) -> list[Bar]:
    """Bars that hold on any hardware."""
    descriptors: dict[str, tuple[float, float]] = {}
    copied: dict[str, tuple[float, float]] = {}
    planning: dict[str, tuple[float, float]] = {}
    for m in found:
        nbytes = m.cell.load.nbytes(m.cell.setup)
        if (posted := m.counted("prefill", "descriptors")) > 0:
            regions = m.cell.setup.model.regions * m.cell.setup.parts * m.cell.load.concurrent
            descriptors[m.cell.label] = (posted, nbytes / KIB64 + regions)
        moved = m.counted("prefill", "copied_bytes") + m.counted("decode", "copied_bytes")
        if moved > 0:
            copied[m.cell.label] = (moved / nbytes, 2.0)
        ours, planned = m.median(OURS), max((c.get("plan_seconds_sum", 0.0) for c in m.prefill), default=0.0)
        if ours and planned > 0 and m.cell.load.tokens == BULK_TOKENS and m.cell.load.concurrent == 1:
            planning[m.cell.label] = (100 * planned / ours, 5.0)
    return [
        _each("descriptors of a request", "<= bytes / 64 KiB + regions a pair", descriptors, lambda v: f"{v:.0f}"),
        _each("bytes copied by staging, per byte", "<= 2", copied, lambda v: f"{v:.2f}"),
        _each("planning, % of the transfer at 4096 tokens", "<= 5", planning, lambda v: f"{v:.1f}"),
    ]


def choice_bar(picks: Iterable[Pick]) -> Bar:
    """The cost rule."""
    held = list(picks)
    if not held:
        return Bar("cost rule: fastest, or within 10 %", ">= 0.9 of cells", "not measured", None)
    right = sum(p.right for p in held)
    detail = ", ".join(f"{p.label}: {p.chosen} for {p.fastest} ({p.loss:.2f} x)" for p in held if not p.right)
    good = right >= 0.9 * len(held)
    return Bar("cost rule: fastest, or within 10 %", ">= 0.9 of cells", f"{right} of {len(held)}", good, detail)


def many_bar(found: Sequence[Measured]) -> Bar:
    """16 concurrent requests against one of the same size."""
    rates: dict[tuple[Setup, int], dict[int, float]] = {}
    for m in found:
        if (ours := m.median(OURS)) is not None:
            rates.setdefault((m.cell.setup, m.cell.load.tokens), {})[m.cell.load.concurrent] = (
                m.cell.load.nbytes(m.cell.setup) / ours
            )
    ratios = {
        f"{s.transport} {s.tp} {tokens}t x{many}": rate / by[1]
        for (s, tokens), by in rates.items()
        for many, rate in by.items()
        if many > 1 and 1 in by
    }
    return _least("concurrent requests: throughput over one's", 1, ratios)


def fair_bar(rounds: dict[str, list[list[float]]]) -> Bar:
    """Two decode engines with equal requests: the later end over the earlier."""
    values = {k: (statistics.median(max(pods) / min(pods) for pods in v), 2.0) for k, v in rounds.items() if v}
    return _each("two decode engines: later end over earlier", "<= 2", values, lambda v: f"{v:.2f}")
