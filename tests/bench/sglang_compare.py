"""Real SGLang on this machine, once with its stock `nixl` backend and once with `pdcluster`: the same pairs, the same
requests, the same faults. Nothing is asserted.

    python tests/bench/sglang_compare.py [--only TEXT,...] [--rounds N] [--cap S] [--json FILE] [--show]

Parts run one after another, each with one prefill and one decode server on the CPU: "nixl 1-1" (prefill TP - decode
TP), "pdcluster faults", "nixl no-rdma" and so on. With --json a part's result goes into the file beside those of the
parts that ran before, and the tables show all of them; --show runs nothing.

On a CPU the KV pool is host memory, which SGLang 0.5.23 registers as device memory; a test plugin tells its stock
backend the truth (`nixl + DRAM hook`), and changes nothing else of it. Time to first token is the client's, streamed;
KV transfer time is SGLang's own metric `kv_transfer_latency_ms`, per request. The model is a small Llama in float32;
its tokens are compared with transformers. Nothing is waited for longer than the cap, and where it cut something off
the table says so.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "sglang"))
sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))

from kit_machine import environment
from kit_model import make_model
from reference_kit import Truth
from sglang_compare_pairs import Work
from sglang_compare_parts import PARTS, in_order, read, write
from sglang_compare_report import condition_lines, fault_table, shape_table


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="tests/bench/sglang_compare.py", description="Real SGLang, two KV backends")
    parser.add_argument(
        "--only", default="", help="parts whose name holds one of these texts, in this order: '2-1,faults'"
    )
    parser.add_argument("--rounds", type=int, default=9, help="timed requests of each pair (9)")
    parser.add_argument("--cap", type=float, default=60.0, help="seconds after which a wait is cut off (60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the parts' results there")
    parser.add_argument("--show", action="store_true", help="only print what the file holds")
    asked = parser.parse_args()
    if asked.show and asked.json is None:
        parser.error("--show needs --json FILE")
    return asked


def main() -> int:
    """Run, print, write."""
    asked = arguments()
    found = {} if asked.json is None else read(asked.json)
    if not asked.show:
        if environment() is None:
            print("SGLang's environment is missing: run make sglang-env", file=sys.stderr)
            return 2
        texts = [text.strip() for text in asked.only.split(",")]
        parts = list(dict.fromkeys(part for text in texts for part in PARTS if text in part.name))
        if not parts:
            print(f"--only {asked.only}: the parts are {', '.join(p.name for p in PARTS)}", file=sys.stderr)
            return 2
        with tempfile.TemporaryDirectory(prefix="sglang-compare-") as name:
            scratch = Path(name)
            model = make_model(scratch / "model", layers=8, kv_heads=4)
            log("the model's own tokens")
            work = Work.of(Truth(model), model, asked.rounds, asked.cap)
            for part in parts:
                ran = part.run(work, scratch, log)
                # Another run may have put parts of its own there meanwhile.
                found = {**(found if asked.json is None else read(asked.json)), part.name: ran}
                if asked.json is not None:
                    write(asked.json, in_order(found))
    results = in_order(found)
    for line in (*shape_table(results), "", *fault_table(results), "", *condition_lines(results)):
        print(line)
    return 0


def log(text: str) -> None:
    """Progress."""
    print(f"  {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
