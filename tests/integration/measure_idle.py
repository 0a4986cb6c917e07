"""What a wired pod costs while it idles: CPU of every thread of engine leader, rank and sidecar. Not a test.

    python tests/integration/measure_idle.py [--seconds 20]

Two pods as in test_pd_sidecar.py (real engine and sidecar processes, NIXL over loopback, prefill TP 1,
decode TP 2), wired, one request served, then nothing for `seconds`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))

from pod_kit import ask, start_pod, wire
from reference_kit import await_healthy

from pdtransfer.engines.reference.tiny_model import make_tiny_model


def threads(pid: int) -> dict[str, float]:
    """CPU seconds by thread (name and id), from schedstat: ticks are too coarse."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        found[f"{name}/{task.name}"] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def memory(pid: int) -> str:
    """Resident and proportional MiB."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in rollup[1:] if line.startswith(("Rss", "Pss:"))}
    return ", ".join(f"{n} {v / 1024:.0f} MiB" for n, v in kib.items())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "model")
        pods = (
            start_pod("prefill", 1, folder / "p", folder / "model"),
            start_pod("decode", 2, folder / "d", folder / "model"),
        )
        try:
            for pod in pods:
                await_healthy(pod.engine)
            wire(*pods, 1)
            assert ask(*pods, list(range(3, 40)), 4).status_code == 200
            watched: list[tuple[str, int]] = []
            for pod in pods:
                watched += [(f"{pod.role} sidecar", pod.sidecar.pid), (f"{pod.role} leader", pod.engine.process.pid)]
                for i, rank in enumerate(pod.engine.info()["ranks"]):
                    watched.append((f"{pod.role} rank {i}", rank["pid"]))
            time.sleep(1)
            began = time.monotonic()
            before = {pid: threads(pid) for _, pid in watched}
            time.sleep(seconds)
            passed = time.monotonic() - began
            for label, pid in watched:
                after = threads(pid)
                spent = {t: (s - before[pid].get(t, 0.0)) * 100 / passed for t, s in after.items()}
                busiest = sorted(spent.items(), key=lambda e: -e[1])[:4]
                total = sum(spent.values())
                shown = ", ".join(f"{t} {p:.2f}" for t, p in busiest if p >= 0.005)
                print(f"{label:16} {total:5.2f} % of a core, {len(after)} threads ({shown}); {memory(pid)}")
        finally:
            for pod in pods:
                pod.stop()


if __name__ == "__main__":
    main()
