"""Idle cost of wired ranks: CPU of one core each, with real NIXL. No assertion; run it by hand.

python tests/bench/bench_idle.py [prefill ranks] [decode ranks] [seconds]
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))

from test_nixl_processes import Ranks


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    prefill, decode = (int(a) for a in (sys.argv[1:3] or ["2", "1"]))
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 5.0
    ranks = Ranks()
    try:
        ranks.start(prefill, decode)
        time.sleep(2)  # probes are over
        before = [cpu_seconds(r.process.pid) for r in ranks.all]
        began = time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - began
        cost = [100 * (cpu_seconds(r.process.pid) - b) / took for r, b in zip(ranks.all, before, strict=True)]
        print(json.dumps({"prefill": prefill, "decode": decode, "idle_percent_of_a_core": cost}))
    finally:
        for rank in ranks.all:
            rank.end()


main()
