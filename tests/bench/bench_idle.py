"""Idle cost of wired ranks over real NIXL. No assertion; run it by hand.

    python tests/bench/bench_idle.py [--prefill 2] [--decode 1] [--seconds 5]
    python tests/bench/bench_idle.py --many 64 [--seconds 5]     # one prefill rank wired to 64 decode ranks

ours: each rank's process, in percent of a core. rival: a process with one NIXL agent that keeps NIXL's own progress
thread, its default. limit: a process that sleeps. Printed with ours as a ratio to the rival. With --many the 64 ranks
share one process, which is not measured; threads, file descriptors and memory of the measured rank are printed too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))

from nixl_ranks import RankProcess, Ranks

RIVAL = """
import sys
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("rival", nixl_agent_config(enable_prog_thread=True))
print("up", flush=True)
sys.stdin.read()
"""
LIMIT = "import sys; print('up', flush=True); sys.stdin.read()"


def cpu_seconds(pid: int) -> float:
    """Time on a core of all threads, from schedstat: ticks are too coarse."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((t / "schedstat").read_text().split()[0]) for t in tasks) / 1e9


def started(*command: str) -> subprocess.Popen[str]:
    """A Python process that has said it is up, and ends with its stdin."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "NIXL_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    while (line := process.stdout.readline()) and line != "up\n":
        pass  # what NIXL's logger says
    return process


def shares(pids: Sequence[int], seconds: float) -> list[float]:
    """Percent of a core that each process takes meanwhile."""
    before, began = [cpu_seconds(p) for p in pids], time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    return [100 * (cpu_seconds(p) - b) / took for p, b in zip(pids, before, strict=True)]


def held(pid: int) -> str:
    """Threads, file descriptors and memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return f"{fields['Threads'].strip()} threads, {fds} fds, {int(fields['VmRSS'].split()[0]) >> 10} MiB resident"


def host(count: int) -> None:
    """Many decode ranks in this process, each a pod of its own; says their cards, is told its peer."""
    from kv_world import Pool, template

    from pdtransfer.contract.base import Role
    from pdtransfer.contract.card import RankCard
    from pdtransfer.session.api import EndpointConfig
    from pdtransfer.session.endpoint import RankEndpoint

    config = EndpointConfig(listen_host="127.0.0.1", net_devices="lo", staging_bytes=0)
    ranks = []
    for i in range(count):
        pool = Pool(0, 1)
        ranks.append((RankEndpoint(template(Role.DECODE, pool, "1", pod=f"pod-{i}"), pool.regions, config), pool))
    print("up", flush=True)
    print(json.dumps([r.card.model_dump_json() for r, _ in ranks]), flush=True)
    peer = RankCard.model_validate_json(sys.stdin.readline())
    for rank, _ in ranks:
        rank.apply_peers([peer])
    sys.stdin.read()


def many(count: int, seconds: float) -> None:
    """One prefill rank and `count` decode ranks."""
    one = RankProcess("prefill", 0, 1, "1", "DRAM", "", "")
    others = started(__file__, "--host", str(count))
    assert others.stdin is not None and others.stdout is not None
    try:
        card = one.answer()["card"]
        print(f"before it has peers: {held(one.process.pid)}")
        cards = json.loads(others.stdout.readline())
        others.stdin.write(card + "\n")
        others.stdin.flush()
        began = time.monotonic()
        one.tell("peers", cards=cards)
        while not one.answer(60)["wired"] and time.monotonic() - began < 300:
            one.tell("peers", cards=cards)
        print(f"{count} peers wired after {time.monotonic() - began:.1f} s")
        time.sleep(5)  # their own probes are over, too
        (share,) = shares([one.process.pid], seconds)
        print(f"ours   {share:6.2f} percent of a core, idle with {count} wired peers: {held(one.process.pid)}")
    finally:
        one.end()
        others.kill()
        others.wait(10)


def few(prefill: int, decode: int, seconds: float) -> None:
    """Ranks in a process each, beside the rival and the limit."""
    ranks, others = Ranks(), []
    try:
        ranks.start(prefill, decode)
        others = [started("-c", RIVAL), started("-c", LIMIT)]
        time.sleep(2)  # probes are over
        *ours, rival, limit = shares([r.process.pid for r in ranks.all] + [p.pid for p in others], seconds)
        print(f"idle for {seconds:.1f} s, in percent of a core")
        print(f"ours   {max(ours):6.2f} the largest of {len(ours)} ranks ({', '.join(f'{x:.2f}' for x in ours)})")
        print(f"       {held(ranks.all[0].process.pid)}")
    finally:
        for rank in ranks.all:
            rank.end()
        for process in others:
            process.kill()
            process.wait(10)
    ratio = f" = {max(ours) / rival:.3f} x rival" if rival else ""
    print(f"rival  {rival:6.2f} a NIXL agent with its progress thread; ours{ratio}")
    print(f"limit  {limit:6.2f} a process that sleeps")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--many", type=int, default=0)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    a = parser.parse_args()
    if a.host:
        host(a.host)
    elif a.many:
        many(a.many, a.seconds)
    else:
        few(a.prefill, a.decode, a.seconds)


if __name__ == "__main__":
    main()
