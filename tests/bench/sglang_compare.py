"""Real SGLang on this machine, once with its stock `nixl` backend and once with `pdcluster`: the same pairs, the same
requests, the same faults. Nothing is asserted.

    python tests/bench/sglang_compare.py [--shapes 1-1,2-1] [--backends nixl,pdcluster] [--rounds N] [--no-faults]
                                         [--cap S] [--json FILE]

A pair is one prefill and one decode server on the CPU, one pair at a time. On a CPU the KV pool is host memory, which
SGLang 0.5.23 registers as device memory; a test plugin tells its stock backend the truth (`nixl + DRAM hook`), and
changes nothing else of it. Time to first token is the client's, streamed; KV transfer time is SGLang's own metric
`kv_transfer_latency_ms`, per request. The model is a small Llama in float32; its tokens are compared with transformers.
Nothing is waited for longer than the cap, and where it cut something off the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "sglang"))
sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))

from kit_machine import environment
from kit_model import make_model
from kit_pair import NIXL_DRAM, PDCLUSTER, Pair
from reference_kit import Truth
from sglang_compare_faults import Fault, faults_on, other_fabric
from sglang_compare_pairs import Measured, Work, measure
from sglang_compare_report import fault_table, shape_table

SHAPES = ((1, 1), (2, 2), (2, 1), (1, 2))
BACKENDS = {"nixl": NIXL_DRAM, "pdcluster": PDCLUSTER}


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="tests/bench/sglang_compare.py", description="Real SGLang, two KV backends")
    parser.add_argument("--shapes", default=",".join(f"{p}-{d}" for p, d in SHAPES), help="prefill TP - decode TP")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="nixl, pdcluster")
    parser.add_argument("--rounds", type=int, default=5, help="timed requests of each pair (5)")
    parser.add_argument("--cap", type=float, default=60.0, help="seconds after which a wait is cut off (60)")
    parser.add_argument("--no-faults", action="store_true", help="leave the faults out")
    parser.add_argument("--json", default="", metavar="FILE", help="write what was measured there")
    return parser.parse_args()


def main() -> int:
    """Run, print, write."""
    asked = arguments()
    if environment() is None:
        print("SGLang's environment is missing: run make sglang-env", file=sys.stderr)
        return 2
    shapes = [(int(p), int(d)) for p, _, d in (text.partition("-") for text in asked.shapes.split(",") if text)]
    backends = [BACKENDS[name] for name in asked.backends.split(",")]

    def log(text: str) -> None:
        print(f"  {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sglang-compare-") as name:
        scratch = Path(name)
        model = make_model(scratch / "model", layers=8, kv_heads=4)
        log("the model's own tokens")
        work = Work.of(Truth(model), model, asked.rounds, asked.cap)
        measured: list[Measured] = []
        faults: list[Fault] = []

        def provoke(both: Pair) -> None:
            faults.extend(faults_on(both, work, log))

        for shape in shapes:
            for backend in backends:
                log(f"{backend}, TP {shape[0]} -> {shape[1]}")
                also = provoke if shape == (1, 1) and not asked.no_faults else None
                measured.append(measure(work, scratch, backend, shape, also))
                write(asked.json, work, measured, faults)
        for backend in () if asked.no_faults else backends:
            log(f"{backend}, fault: the fabric")
            faults.append(other_fabric(work, scratch, backend))
            write(asked.json, work, measured, faults)
    for line in (*shape_table(measured, work), "", *fault_table(faults, asked.cap)):
        print(line)
    print(f"\n{time.monotonic() - began:.0f} s on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end.")
    return 0


def write(path: str, work: Work, measured: list[Measured], faults: list[Fault]) -> None:
    """What there is so far: a run takes long, and may be stopped."""
    if path:
        found = {
            "cores": os.cpu_count(),
            "cap_seconds": work.cap,
            "prompt_tokens": work.timed_tokens,
            "pairs": [asdict(m) for m in measured],
            "faults": [asdict(f) for f in faults],
        }
        Path(path).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
