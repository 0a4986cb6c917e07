"""The comparison in parts, each with a pair of servers of its own: a part can run alone, and its result is kept
beside those of the others with the conditions it ran under."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kit_machine import TREE, environment
from kit_pair import NIXL_DRAM, PDCLUSTER, pair
from sglang_compare_faults import FABRICS, Fault, faults_on, other_fabric
from sglang_compare_pairs import Measured, Work, measure
from sglang_compare_words import exceptions

SHAPES = ((1, 1), (2, 2), (2, 1), (1, 2))
BACKENDS = {"nixl": NIXL_DRAM, "pdcluster": PDCLUSTER}
FAULTS = "faults"


@dataclass(frozen=True)
class Part:
    """`kind` is a shape ("2-1"), the faults of a running pair, or one of FABRICS."""

    short: str
    """Of the backend."""
    kind: str

    @property
    def name(self) -> str:
        """As `--only` finds it."""
        return f"{self.short} {self.kind}"

    @property
    def shape(self) -> tuple[int, int]:
        """TP of prefill and decode."""
        prefill, _, decode = self.kind.partition("-")
        return (int(prefill), int(decode)) if decode.isdigit() else (1, 1)

    def run(self, work: Work, scratch: Path, log: Callable[[str], None]) -> Result:
        """Start its pair, do what is to be done. The time to wait for the machine and to start is not counted."""
        log(self.name)
        backend, folder = BACKENDS[self.short], scratch / self.name.replace(" ", "-")
        folder.mkdir()
        result = Result(self.name)
        began, load = time.monotonic(), os.getloadavg()[0]
        fault, variables = FABRICS.get(self.kind, ("", ()))
        try:
            with pair(work.setting(backend), folder, *self.shape, variables, variables) as both:
                began, load = time.monotonic(), os.getloadavg()[0]
                if self.kind == FAULTS:
                    result.faults.extend(faults_on(work, both, backend, log))
                elif fault:
                    result.faults.append(other_fabric(work, both, backend, fault))
                else:
                    result.pairs.append(measure(work, both, backend))
        except AssertionError as error:
            why = str(error).splitlines()
            log(f"  not to its end: {why[:1]} {why[-1:]}")
            if fault:
                told = (exceptions(why) or why)[-1]
                took = time.monotonic() - began
                result.faults.append(Fault(backend, fault, took, "it does not start", told))
            elif self.kind != FAULTS:
                result.pairs.append(Measured(backend, *self.shape, failed=why[0]))
        result.conditions.update(conditions(work, time.monotonic() - began, load))
        return result


PARTS = tuple(Part(short, kind) for kind in (*(f"{p}-{d}" for p, d in SHAPES), FAULTS, *FABRICS) for short in BACKENDS)
"""Both backends at each kind in turn."""


@dataclass(frozen=True)
class Result:
    """Of one part."""

    part: str
    conditions: dict[str, Any] = field(default_factory=dict)
    pairs: list[Measured] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def conditions(work: Work, seconds: float, load: float) -> dict[str, Any]:
    """What the machine and the run were."""
    return {
        "at": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "commit": _commit(),
        **{name: _version(name) for name in ("sglang", "nixl")},
        "cores": os.cpu_count(),
        "load_before": round(load, 1),
        "load_after": round(os.getloadavg()[0], 1),
        "rounds": len(work.timed) - 1,
        "prompt_tokens": work.timed_tokens,
        "cap_seconds": work.cap,
        "seconds": round(seconds),
    }


def read(path: Path) -> dict[str, Result]:
    """What a file holds, by part; nothing where there is none yet."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return {
        one["part"]: Result(
            one["part"],
            one["conditions"],
            [Measured(**m) for m in one["pairs"]],
            [Fault(**f) for f in one["faults"]],
        )
        for one in found["parts"]
    }


def write(path: Path, results: Iterable[Result]) -> None:
    """All that there is so far."""
    path.write_text(json.dumps({"parts": [asdict(r) for r in results]}, indent=1) + "\n", encoding="utf-8")


def in_order(results: dict[str, Result]) -> list[Result]:
    """As the parts come."""
    return [results[part.name] for part in PARTS if part.name in results]


def _commit() -> str:
    done = subprocess.run(
        ["git", "-C", str(TREE), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def _version(package: str) -> str:
    folder = environment()
    found = [] if folder is None else sorted(folder.glob(f"lib/python3*/site-packages/{package}-*.dist-info"))
    return found[0].name.removeprefix(f"{package}-").removesuffix(".dist-info") if found else "unknown"
