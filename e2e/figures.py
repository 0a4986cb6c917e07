"""`.venv/bin/python -m e2e.figures`: what a PDCluster costs, measured on the embedded cluster in one run.

apply -> Ready, engine up -> wired, and what operator, sidecar, leader and ranks cost while idle. The processes
of the nodes are visible from this machine, so /proc tells their memory and CPU; a foreign cluster can't be measured so.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from e2e.kit import cluster, install
from e2e.kit.kubectl import Kubectl
from e2e.kit.processes import seen
from e2e.kit.shell import CommandFailed, wait_for

NAMESPACE = "pdcluster-figures"
NAME = "quickstart"
IDLE_SECONDS = 20.0
PROGRAMS = {
    "operator": "pdcluster-operator",
    "sidecar": "pdtransfer-sidecar",
    "engine leader": "bin/pdtransfer-reference",
    "engine rank": "pdtransfer.engines.reference.rank",
    "router (smg)": "smg::router",
}


@dataclass(frozen=True)
class Process:
    """One process of the cluster: MiB resident and proportional, seconds of CPU so far."""

    kind: str
    pid: int
    rss: float
    pss: float
    cpu: float


def processes() -> Iterator[Process]:
    """Our programs in pods of NAMESPACE (by their downward environment), and the operator."""
    ticks = os.sysconf("SC_CLK_TCK")
    for process in seen():
        kind = next((k for k, program in PROGRAMS.items() if program in process.command), "")
        ours = f"POD_NAMESPACE={NAMESPACE}" in process.environment
        if not kind or not (ours or kind in ("operator", "router (smg)")):
            continue
        folder = Path("/proc", str(process.pid))
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            memory = (folder / "smaps_rollup").read_text()
        except OSError:
            continue  # it ended meanwhile
        cpu = (int(stat[11]) + int(stat[12])) / ticks
        yield Process(kind, process.pid, _kib(memory, "Rss") / 1024, _kib(memory, "Pss") / 1024, cpu)


def _kib(text: str, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found.group(1)) if found else 0


def wiring_seconds(kubectl: Kubectl, gates: dict[str, float]) -> list[float]:
    """For each engine pod: from its last rank's card to the readiness gate. `gates` is Unix time by pod name."""
    found = []
    for pod, wired in gates.items():
        log = kubectl("logs", pod, "-c", "engine", check=False)
        shown = re.findall(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) .*card shown to the sidecar", log, re.MULTILINE)
        if shown:
            text, milli = shown[-1]
            at = datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp() + int(milli) / 1000
            found.append(wired - at)
    return found


def launch(kubectl: Kubectl, image: str) -> tuple[float, dict[str, float]]:
    """Apply the quickstart; gives the seconds to Ready and when each gate was first seen True (every 0.1 s)."""
    gates: dict[str, float] = {}
    start = time.monotonic()
    kubectl.apply(install.example(NAME, image))

    def ready() -> bool:
        for pod in kubectl.get("pods", selector=f"pdcluster.io/cluster={NAME}"):
            conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
            if conditions.get("pdcluster.io/kv-wired") == "True":
                gates.setdefault(pod["metadata"]["name"], time.time())
        return kubectl.condition("pdcluster", NAME, "Ready").get("status") == "True"

    wait_for("Ready", ready, timeout=300, every=0.1)
    return time.monotonic() - start, gates


def report(kubectl: Kubectl, image: str) -> None:
    """Measure and print."""
    seconds, gates = launch(kubectl, image)
    wiring = wiring_seconds(kubectl, gates)
    print(f"apply -> Ready            {seconds:6.1f} s   (prefill TP 2, 2 x decode TP 1, router)")
    if wiring:
        print(f"engine up -> wired        {statistics.median(wiring):6.1f} s   (median of {len(wiring)} pods)")
    time.sleep(5)  # the requests and probes of the start are over
    before = {p.pid: p for p in processes()}
    began = time.monotonic()
    time.sleep(IDLE_SECONDS)
    after = list(processes())
    span = time.monotonic() - began
    print(f"\nidle for {span:.0f} s        count   RSS MiB   PSS MiB   CPU % of a core (largest)")
    for kind in PROGRAMS:
        rows = [(p, p.cpu - before[p.pid].cpu) for p in after if p.kind == kind and p.pid in before]
        if rows:
            rss, pss = (statistics.median(getattr(p, f) for p, _ in rows) for f in ("rss", "pss"))
            cost = max(used for _, used in rows) / span * 100
            print(f"{kind:22}  {len(rows):6}  {rss:8.0f}  {pss:8.0f}   {cost:6.2f}")


def main() -> int:
    if cluster.given():
        print("figures: unset KUBECONFIG: only the embedded cluster's processes can be seen", file=sys.stderr)
        return 2
    try:
        target = cluster.up()
        install.operator(target)
        install.namespace(target, NAMESPACE)
        try:
            kubectl = target.kubectl.into(NAMESPACE)
            with install.temporary_model() as folder:
                kubectl.apply(install.model_config_map(install.make_model(Path(folder))))
            report(kubectl, target.image)
        finally:
            install.remove_namespace(target, NAMESPACE)
    except (CommandFailed, TimeoutError) as failed:
        print(f"figures: {failed}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
