"""Measures cells: every variant once a round, in shuffled order, so that rounds are paired."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from group import Group, RankFailed, Result
from machine import Memcpy
from rival_sglang import Sglang, SglangFailed
from shape import Cell, Load, Setup

OURS, NATURAL, BULK, SGLANG, MEMCPY = "ours", "raw-natural", "raw-bulk", "sglang", "memcpy"
SLOW = 4.0
"""Seconds of one variant in one cell, after which it is left out of further rounds (but not before the third, unless
one run took that long)."""


@dataclass
class Measured:
    """One cell's samples by variant and round, and what our endpoints counted in the last round."""

    cell: Cell
    samples: dict[str, dict[int, float]] = field(default_factory=dict)
    prefill: list[dict[str, float]] = field(default_factory=list)
    decode: list[dict[str, float]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Variants that could not be measured, and why."""
    predicted: dict[str, float] = field(default_factory=dict)
    """Seconds by strategy that the cost rule expected."""

    def median(self, variant: str) -> float | None:
        """Seconds."""
        found = self.samples.get(variant)
        return statistics.median(found.values()) if found else None

    def spread(self, variant: str) -> tuple[float, float]:
        """Least and most."""
        found = self.samples[variant].values()
        return min(found), max(found)

    def ratio(self, variant: str, other: str) -> float | None:
        """Median of `other`/`variant` over common rounds: how many times as fast `variant` is."""
        ours, theirs = self.samples.get(variant, {}), self.samples.get(other, {})
        both = [theirs[r] / ours[r] for r in ours if r in theirs]
        return statistics.median(both) if both else None

    def counted(self, side: str, name: str) -> float:
        """A counter over all ranks of a side, in the last round of ours. Labelled series of it are summed."""
        total = 0.0
        for counters in self.prefill if side == "prefill" else self.decode:
            total += counters.get(name, 0.0)
        return total


class Bench:
    """Serves one setup after the other."""

    def __init__(
        self, start: Callable[[Setup, tuple[str, ...]], Group], sglang: Sglang | None, log: Callable[[str], None]
    ) -> None:
        self._start = start
        self._sglang = sglang
        self._log = log
        self._memcpy = Memcpy()
        self._random = random.Random(5)

    def setup(self, setup: Setup, cells: list[Cell]) -> list[Measured]:
        """All cells of a setup; a group that fails is told in `missing`, not raised."""
        strategies = setup.strategies if any(c.forced for c in cells) else ()
        found = [Measured(cell) for cell in cells]
        try:
            group = self._start(setup, strategies)
        except RankFailed as error:
            for measured in found:
                measured.missing["all"] = str(error).strip().splitlines()[-1]
            return found
        rival = self._open_sglang(setup, found)
        try:
            for measured in found:
                self._cell(group, measured, rival)
        finally:
            group.close()
            if rival is not None:
                rival.close_ranks()
        return found

    def _open_sglang(self, setup: Setup, found: list[Measured]) -> Sglang | None:
        wanted = [m for m in found if m.cell.sglang]
        if self._sglang is None or not wanted:
            return None
        try:
            self._sglang.open(setup)
            return self._sglang
        except SglangFailed as error:
            for measured in wanted:
                measured.missing[SGLANG] = str(error)
            return None

    def _cell(self, group: Group, measured: Measured, rival: Sglang | None) -> None:
        cell = measured.cell
        runs = self._variants(group, measured, rival)
        for variant in list(runs):
            if not self._warm(group, measured, variant, rival):
                del runs[variant]
        for number in range(cell.rounds):
            order = list(runs)
            self._random.shuffle(order)
            for variant in order:
                held = measured.samples.setdefault(variant, {})
                if (len(held) >= 3 and sum(held.values()) > SLOW) or max(held.values(), default=0.0) > SLOW:
                    continue
                try:
                    held[number] = runs[variant]()
                except (RankFailed, SglangFailed) as error:
                    measured.missing[variant] = str(error).strip().splitlines()[-1]
                    del runs[variant]
        measured.predicted = group.predicted(cell.load)
        ours = measured.median(OURS)
        told = f"{ours * 1e3:.1f} ms" if ours is not None else "; ".join(measured.missing.values())
        self._log(f"{cell.label}: {told}")

    def _variants(self, group: Group, measured: Measured, rival: Sglang | None) -> dict[str, Callable[[], float]]:
        cell = measured.cell

        def ours() -> float:
            result: Result = group.run(group.job("auto", cell.load))
            measured.prefill, measured.decode = result.prefill, result.decode
            return result.seconds

        def run(kind: str) -> Callable[[], float]:
            return lambda: group.run(group.job(kind, cell.load)).seconds

        runs: dict[str, Callable[[], float]] = {OURS: ours, NATURAL: run(NATURAL), BULK: run(BULK)}
        if cell.forced:
            runs |= {strategy: run(strategy) for strategy in cell.setup.strategies}
        runs[MEMCPY] = lambda: self._memcpy.seconds(cell.load.nbytes(cell.setup))
        if rival is not None and cell.sglang:
            runs[SGLANG] = lambda: rival.run(cell.setup, cell.load)
        return runs

    def _warm(self, group: Group, measured: Measured, variant: str, rival: Sglang | None) -> bool:
        """Once unmeasured, with its bytes compared where they are in a layout."""
        cell = measured.cell
        one = Load(cell.load.tokens)
        try:
            if variant == SGLANG and rival is not None:
                rival.run(cell.setup, one, verify=True)
            elif variant == MEMCPY:
                self._memcpy.seconds(one.nbytes(cell.setup))
            elif variant == BULK:
                group.run(group.job(variant, one))
            else:
                group.verified("auto" if variant == OURS else variant, one)
            if variant == OURS and cell.load.concurrent > 1:
                group.run(group.job("auto", cell.load))
        except (RankFailed, SglangFailed) as error:
            measured.missing[variant] = str(error).strip().splitlines()[-1]
            return False
        return True

    def fairness(self, setup: Setup, load: Load, rounds: int) -> list[list[float]]:
        """Seconds until each of two decode engines had its half of the requests, a round."""
        group = self._start(setup, ())
        try:
            found = []
            for number in range(rounds + 1):
                result = group.run(group.job("auto", load), pods=range(setup.decode_pods))
                if number:
                    found.append(result.by_pod)
            return found
        finally:
            group.close()
