"""What this rank measured, in plain numbers: cheap to record, cheap to copy, nothing outside the catalogue.

No prometheus_client here: the rank lives inside an engine's process, and the sidecar is what is scraped.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Mapping

from pdtransfer.contract.metrics import FAMILIES, OTHER, Cell, Family, Samples, Series

logger = logging.getLogger(__name__)

_BY_NAME = {**FAMILIES, **{f.stem: f for f in FAMILIES.values()}}
"""As prometheus_client: a counter may be named without its suffix."""


class Metrics:
    """Counters, gauges and histograms. Any thread may record and read.

    A record that the catalogue does not know, of another kind, or that is no number is dropped,
    logged once and counted: a slip in a rare path must not end transfers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[Series, Cell]] = {}
        self._told: set[str] = set()
        for family in FAMILIES.values():
            if family.kind != "gauge" and not family.labels:
                self._cell(family, {})  # shown as zero from the start, so that rates are right

    def count(self, name: str, amount: float = 1, **labels: object) -> None:
        """Add `amount` (not negative) to a counter."""
        family = self._family(name, "counter", amount >= 0)
        if family is not None:
            with self._lock:
                self._cell(family, labels)[0] += amount

    def gauge(self, name: str, value: float, **labels: object) -> None:
        """Set a gauge."""
        family = self._family(name, "gauge", value == value)
        if family is not None:
            with self._lock:
                self._cell(family, labels)[0] = value

    def observe(self, name: str, value: float, **labels: object) -> None:
        """Add one observation to a histogram."""
        family = self._family(name, "histogram", value == value)
        if family is not None:
            with self._lock:
                cell = self._cell(family, labels)
                cell[0] += value
                cell[1 + bisect_left(family.buckets, value)] += 1

    def _family(self, name: str, kind: str, sound: bool) -> Family | None:
        family = _BY_NAME.get(name)
        if family is not None and family.kind == kind and sound:
            return family
        if name not in self._told and len(self._told) < 100:
            self._told.add(name)
            logger.error("%s is no %s of contract/metrics.py, or its value is none: not recorded", name, kind)
        if name != "undeclared_metrics_total":
            self.count("undeclared_metrics_total")
        return None

    def _cell(self, family: Family, labels: Mapping[str, object]) -> Cell:
        series = family.series(labels)
        held = self._values.setdefault(family.name, {})
        cell = held.get(series)
        if cell is None:
            if len(held) >= family.limit:
                series = tuple(OTHER for _ in series)
            cell = held.setdefault(series, [0.0] * family.cells)
        return cell

    def snapshot(self) -> Samples:
        """A copy of everything recorded."""
        with self._lock:
            return {n: [(s, list(c)) for s, c in held.items()] for n, held in self._values.items()}

    def flat(self) -> dict[str, float]:
        """For people and tests: stem to the sum over its series, and stem{label=value,...} to each series
        that has labels; of a histogram stem_sum and stem_count."""
        found: dict[str, float] = {}
        for name, rows in self.snapshot().items():
            family = FAMILIES[name]
            if family.kind == "histogram":
                found[f"{family.stem}_sum"] = sum(cell[0] for _, cell in rows)
                found[f"{family.stem}_count"] = sum(sum(cell[1:]) for _, cell in rows)
                continue
            found[family.stem] = sum(cell[0] for _, cell in rows)
            for series, cell in rows:
                if series:
                    shown = ",".join(f"{k}={v}" for k, v in zip(family.labels, series, strict=True))
                    found[f"{family.stem}{{{shown}}}"] = cell[0]
        return found
