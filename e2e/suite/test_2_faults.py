"""What breaks in a running PDCluster, and that no client gets a wrong token for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from e2e.kit import install, requests
from e2e.kit.cluster import Target
from e2e.kit.kubectl import Kubectl
from e2e.kit.shell import wait_for
from e2e.kit.watching import load
from e2e.suite.conftest import Model

KILL_A_RANK = """
import os, signal
def rss(p):
    try:
        return int(open(f'/proc/{p}/statm').read().split()[1])
    except OSError:
        return 0
ranks = [p for p in map(int, filter(str.isdigit, os.listdir('/proc'))) if p not in (1, os.getpid())]
os.kill(max(ranks, key=rss), signal.SIGKILL)
"""


def _pods(kubectl: Kubectl, name: str, role: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kubectl.get("pods", selector=f"pdcluster.io/cluster={name},pdcluster.io/role={role}")
    return [p for p in found if not p["metadata"].get("deletionTimestamp")]


def _ready(pod: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))


def _exact(kubectl: Kubectl, name: str, model: Model) -> None:
    with kubectl.forward(f"service/{name}-router", 30000) as port:
        assert requests.wrong(requests.compare(f"http://127.0.0.1:{port}", model.cases)) == []


def _settled(picture: Callable[[], dict[str, Any]], seconds: float = 10) -> dict[str, Any]:
    """What `picture` gives once it stood for so long: the end of what a test before has changed."""
    last, since = picture(), time.monotonic()

    def stood() -> bool:
        nonlocal last, since
        if (now := picture()) != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since >= seconds

    wait_for("nothing changes any more", stood, timeout=120, every=1, context=lambda: str(last))
    return last


def test_a_deleted_decode_pod_is_replaced_without_a_wrong_token(
    kubectl: Kubectl, quickstart: str, model: Model
) -> None:
    gone = _pods(kubectl, quickstart, "decode")[0]["metadata"]

    def replaced() -> bool:
        pods = _pods(kubectl, quickstart, "decode")
        return len(pods) == 2 and all(_ready(p) and p["metadata"]["uid"] != gone["uid"] for p in pods)

    with (
        kubectl.forward(f"service/{quickstart}-router", 30000) as port,
        load(f"http://127.0.0.1:{port}", model.cases) as history,
    ):
        wait_for("traffic before the fault", lambda: history.succeeded >= 4, timeout=120)
        kubectl("delete", "pod", gone["name"], "--wait=false")
        wait_for("a wired replacement", replaced, timeout=300, every=0.5)
        before = history.succeeded
        wait_for("traffic after the fault", lambda: history.succeeded >= before + 6, timeout=120)
    assert history.wrong_tokens == []
    assert history.slowest < 90
    kubectl.wait_condition("pdcluster", quickstart, "Ready", timeout=120)
    _exact(kubectl, quickstart, model)


def test_a_killed_rank_comes_back_as_a_new_incarnation_of_the_same_pod(
    kubectl: Kubectl, quickstart: str, model: Model
) -> None:
    pod = _pods(kubectl, quickstart, "prefill")[0]
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]

    def restarts() -> int:
        found = kubectl.get("pod", name)
        assert found["metadata"]["uid"] == uid
        return int(sum(c["restartCount"] for c in found["status"]["containerStatuses"] if c["name"] == "engine"))

    before = restarts()
    kubectl("exec", name, "-c", "engine", "--", "python3", "-c", KILL_A_RANK)
    wait_for("the engine container restarted", lambda: restarts() > before, timeout=180)
    wait_for("the pod is wired again", lambda: _ready(kubectl.get("pod", name)), timeout=240)
    kubectl.wait_condition("pdcluster", quickstart, "Ready", timeout=120)

    def told() -> bool:
        events = kubectl.get("events")
        return any(e["reason"] == "PeerReplaced" and e["involvedObject"]["name"] == quickstart for e in events)

    wait_for("an event tells of the new incarnation", told, timeout=30, every=1)
    _exact(kubectl, quickstart, model)


def test_restarting_the_operator_moves_nothing(target: Target, kubectl: Kubectl, quickstart: str, model: Model) -> None:
    def picture() -> dict[str, Any]:
        status = kubectl.get("pdcluster", quickstart)["status"]
        pods = kubectl.get("pods", selector=f"pdcluster.io/cluster={quickstart}")
        return {
            "conditions": {c["type"]: (c["status"], c["lastTransitionTime"]) for c in status["conditions"]},
            "pods": sorted(
                (
                    p["metadata"]["uid"],
                    tuple(c["restartCount"] for c in p["status"]["containerStatuses"]),
                    tuple(
                        sorted((c["type"], c["status"], c["lastTransitionTime"]) for c in p["status"]["conditions"])
                    ),
                )
                for p in pods
            ),
            "services": sorted((s["metadata"]["uid"], s["metadata"].get("generation", 0))
                               for s in kubectl.get("services")),
            "roster": status.get("rosterKey"),
        }  # fmt: skip

    before = _settled(picture)
    system = target.kubectl.into(install.SYSTEM)
    old = {p["metadata"]["uid"] for p in system.get("pods")}
    system("rollout", "restart", "deployment/pdcluster-operator")
    system("rollout", "status", "deployment/pdcluster-operator", "--timeout=240s", timeout=270)
    wait_for(
        "the old operator is gone",
        lambda: not old & {p["metadata"]["uid"] for p in system.get("pods")},
        timeout=120,
    )
    wait_for("the new operator leads", lambda: "event=acquired" in install.operator_logs(target, 1000), timeout=120)
    time.sleep(15)  # long enough for a few reconciles of the new operator
    assert picture() == before
    _exact(kubectl, quickstart, model)
