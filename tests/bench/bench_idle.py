"""Idle cost of wired ranks over real NIXL. No assertion; run it by hand.

    python tests/bench/bench_idle.py [prefill ranks] [decode ranks] [seconds]

ours: each rank's process, in percent of a core. rival: a process with one NIXL agent that keeps NIXL's own progress
thread, its default. limit: a process that sleeps. Printed with ours as a ratio to the rival.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))

from nixl_ranks import Ranks

RIVAL = """
import sys
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("rival", nixl_agent_config(enable_prog_thread=True))
print("up", flush=True)
sys.stdin.read()
"""
LIMIT = "import sys; print('up', flush=True); sys.stdin.read()"


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def started(program: str) -> subprocess.Popen[str]:
    """A Python process that has said it is up, and ends with its stdin."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "NIXL_LOG_LEVEL": "ERROR"},
    )
    assert process.stdout is not None
    while (line := process.stdout.readline()) and line != "up\n":
        pass  # what NIXL's logger says
    return process


def main() -> None:
    prefill, decode = (int(a) for a in (sys.argv[1:3] or ["2", "1"]))
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 5.0
    ranks, others = Ranks(), []
    try:
        ranks.start(prefill, decode)
        others = [started(RIVAL), started(LIMIT)]
        time.sleep(2)  # probes are over
        pids = [r.process.pid for r in ranks.all] + [p.pid for p in others]
        before = [cpu_seconds(pid) for pid in pids]
        began = time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - began
        *ours, rival, limit = [100 * (cpu_seconds(p) - b) / took for p, b in zip(pids, before, strict=True)]
    finally:
        for rank in ranks.all:
            rank.end()
        for process in others:
            process.kill()
            process.wait(10)
    print(f"idle for {took:.1f} s, in percent of a core (the clock ticks {os.sysconf('SC_CLK_TCK')} times a second)")
    print(f"ours   {max(ours):6.2f} the largest of {len(ours)} ranks ({', '.join(f'{x:.2f}' for x in ours)})")
    ratio = f" = {max(ours) / rival:.3f} x rival" if rival else ""
    print(f"rival  {rival:6.2f} a NIXL agent with its progress thread; ours{ratio}")
    print(f"limit  {limit:6.2f} a process that sleeps")


if __name__ == "__main__":
    main()
