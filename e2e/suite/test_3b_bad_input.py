"""What users, nodes and strangers get wrong: each is named in `kubectl describe`, and costs nobody else anything.

All broken PDClusters run at once beside a healthy one and the quickstart, so that one that is delayed by
another's trouble shows."""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.kit import broken, install
from e2e.kit.cluster import Target
from e2e.kit.kubectl import Kubectl
from e2e.kit.shell import wait_for

HEALTHY = "small"
Manifest = dict[str, Any]


def small(target: Target, name: str) -> Manifest:
    """One prefill and one decode at TP 1, no router."""
    manifest = install.example("quickstart", target.image)
    manifest["metadata"]["name"] = name
    spec = manifest["spec"]
    spec["prefill"]["tensorParallelSize"] = 1
    spec["decode"]["replicas"] = 1
    spec["router"] = {"type": "None"}
    for role in ("prefill", "decode"):
        spec[role]["resources"] = {"requests": {"cpu": "20m", "memory": "200Mi"}}
    return manifest


def broken_ones(target: Target) -> dict[str, Manifest]:
    """Manifests that the API server takes and that can not run."""
    made = {
        name: small(target, name)
        for name in ("no-configmap", "no-model", "no-image", "too-big", "no-secret", "no-flag")
    }
    made["no-configmap"]["spec"]["model"]["volume"]["configMap"]["name"] = "not-there"
    made["no-model"]["spec"]["model"]["source"] = "/models/absent"
    made["no-image"]["spec"]["engine"]["image"] = "pdcluster.invalid/typo:dev"
    made["too-big"]["spec"]["prefill"]["resources"] = {"requests": {"cpu": "900"}}
    made["no-secret"]["spec"]["decode"]["env"] = [
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "absent", "key": "token"}}}
    ]
    made["no-flag"]["spec"]["decode"]["extraArgs"] = ["--no-such-flag"]
    return made


@pytest.fixture(scope="module")
def trouble(target: Target, kubectl: Kubectl, quickstart: str) -> Iterator[float]:
    """Everything broken is applied first, then a healthy one. Gives the seconds until that was Ready."""
    made = broken_ones(target)
    kubectl.apply(list(made.values()))
    began = time.monotonic()
    kubectl.apply(small(target, HEALTHY))
    kubectl.wait_condition("pdcluster", HEALTHY, "Ready", timeout=300)
    yield time.monotonic() - began
    kubectl("delete", "pdcluster", *made, HEALTHY, "--ignore-not-found", "--wait=false")


# What the API server refuses at once.


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prefill": {"extraArgs": ["--tp_size=4"]}}, "use tensorParallelSize"),
        ({"prefill": {"extraArgs": ["--disaggregation-m", "decode"]}}, "write flags in full"),
        ({"decode": {"nodesPerReplica": 2}}, "nodesPerReplica above 1 is not supported yet"),
        ({"decode": {"replicas": -1}}, "greater than or equal to 0"),
        ({"engine": {"type": "vLLM"}}, 'supported values: "SGLang", "Reference"'),
        ({"transfer": {"fabrik": {}}}, 'unknown field "spec.transfer.fabrik"'),
    ],
)
def test_an_invalid_manifest_is_refused_with_what_to_do(
    target: Target, kubectl: Kubectl, change: dict[str, dict[str, Any]], says: str
) -> None:
    manifest = small(target, "refused")
    for section, fields in change.items():
        manifest["spec"][section] |= fields
    said = kubectl("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(manifest), check=False)
    assert says in said


# What only the cluster finds out.


@pytest.mark.parametrize(
    ("name", "condition", "reason", "says"),
    [
        ("no-configmap", "PrefillReady", "CannotMountVolume", ['configmap "not-there" not found', "spec.model.volume"]),
        ("no-model", "PrefillReady", "Crashing", ["/models/absent is not there", "kubectl logs"]),
        ("no-image", "PrefillReady", "CannotPullImage", ["pdcluster.invalid/typo:dev", "Check the image's name"]),
        ("too-big", "PrefillReady", "CannotSchedule", ["Insufficient cpu", "Lower what the role asks for"]),
        ("no-secret", "DecodeReady", "CannotStart", ['secret "absent" not found']),
        ("no-flag", "DecodeReady", "Crashing", ["unrecognized arguments: --no-such-flag", "kubectl logs"]),
    ],
)
def test_what_can_not_run_is_named_where_one_looks_first(
    kubectl: Kubectl, trouble: float, name: str, condition: str, reason: str, says: list[str]
) -> None:
    kubectl.wait_condition("pdcluster", name, condition, "False", reason=reason, timeout=180)

    def told() -> dict[str, Any] | None:
        # Ready carries the failure itself, not that the other role waits for it.
        ready = kubectl.condition("pdcluster", name, "Ready")
        described = kubectl("describe", "pdc", name)
        named = (ready["status"], ready["reason"]) == ("False", reason)
        return ready if named and all(w in ready["message"] and w in described for w in says) else None

    ready = wait_for(
        f"Ready and describe say {says}",
        told,
        timeout=60,
        every=1,
        context=lambda: kubectl("describe", "pdc", name)[-4000:],
    )
    assert not re.search(r"\b0\.00 |\b1 (pairs|warnings|replicas are|pods)\b|None\b(?!$)", ready["message"])


def test_nobody_waits_for_the_broken_ones(trouble: float, kubectl: Kubectl, quickstart: str) -> None:
    assert trouble < 240  # of the broken ones some never end: whoever waits for them waits for ever
    assert kubectl.condition("pdcluster", quickstart, "Ready")["status"] == "True"


def test_describe_of_a_healthy_one_reads_well(kubectl: Kubectl, trouble: float) -> None:
    found = kubectl.get("pdcluster", HEALTHY)
    conditions = {c["type"]: c["message"] for c in found["status"]["conditions"]}
    assert conditions["PeersWired"] == "1 pair of pods wired, confirmed by both sides"
    assert isinstance(found["status"]["verification"]["bandwidth"], int)
    assert re.match(r"[1-9][0-9.]* [GMk]?B/s TCP", found["status"]["summary"]["verified"])
    assert "Backoff:" not in kubectl("describe", "pdc", HEALTHY)


def test_a_spec_of_a_newer_crd_is_named_and_what_runs_is_left_alone(
    target: Target, kubectl: Kubectl, trouble: float
) -> None:
    manifest = small(target, HEALTHY)
    before = {p["metadata"]["uid"] for p in kubectl.get("pods", selector=f"pdcluster.io/cluster={HEALTHY}")}
    later = copy.deepcopy(manifest)
    later["spec"]["engine"]["type"] = "Later"
    with broken.newer_crd(target, "Later"):
        dry_run = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-")
        wait_for(
            "the API server takes the new CRD",
            lambda: "serverside-applied" in kubectl(*dry_run, stdin=json.dumps(later), check=False),
            timeout=60,
        )
        kubectl.apply(later)
        told = kubectl.wait_condition("pdcluster", HEALTHY, "Compatible", "False", reason="InvalidSpec", timeout=90)
        assert "spec.engine.type" in told["message"]
        assert kubectl.condition("pdcluster", HEALTHY, "PrefillReady")["status"] == "True"
        kubectl.apply(manifest)
    kubectl.wait_condition("pdcluster", HEALTHY, "Ready", timeout=90)
    after = {p["metadata"]["uid"] for p in kubectl.get("pods", selector=f"pdcluster.io/cluster={HEALTHY}")}
    assert after == before


def _pod(kubectl: Kubectl, role: str) -> str:
    found = kubectl.get("pods", selector=f"pdcluster.io/cluster={HEALTHY},pdcluster.io/role={role}")
    (name,) = [str(p["metadata"]["name"]) for p in found if not p["metadata"].get("deletionTimestamp")]
    return name


def test_a_sidecar_that_hangs_is_named_and_costs_nobody_else(
    target: Target, kubectl: Kubectl, trouble: float, quickstart: str
) -> None:
    if not target.embedded:
        pytest.skip("only the embedded cluster's processes run on this machine")
    other = kubectl.condition("pdcluster", quickstart, "Ready")
    pod = _pod(kubectl, "decode")
    with broken.hung(pod, "pdtransfer-sidecar"):
        told = kubectl.wait_condition(
            "pdcluster", HEALTHY, "PeersWired", "Unknown", reason="OperatorCannotReachPods", timeout=90
        )
        assert pod in told["message"] and "no answer within" in told["message"]
        # Then the kubelet sees it too: the pod is not Ready, and so nothing is sent to it.
        kubectl.wait_condition(
            "pdcluster", HEALTHY, "DecodeReady", "False", reason="OperatorCannotReachPods", timeout=90
        )
    kubectl.wait_condition("pdcluster", HEALTHY, "Ready", timeout=180)
    assert kubectl.condition("pdcluster", quickstart, "Ready") == other


def test_a_certificate_of_another_authority_is_named_and_written_over(kubectl: Kubectl, trouble: float) -> None:
    foreign = broken.foreign_certificate(kubectl, HEALTHY)
    # A running pod sees the new Secret within a minute or so; a new one starts with it.
    kubectl("delete", "pod", _pod(kubectl, "decode"), "--wait=false")
    told = kubectl.wait_condition("pdcluster", HEALTHY, "PeersWired", "Unknown", reason="WrongCertificate", timeout=180)
    assert "certificate was refused" in told["message"]
    secret = f"{HEALTHY}-pdtransfer-tls"
    wait_for("the Secret is the operator's again", lambda: kubectl.get("secret", secret)["data"]["ca.crt"] != foreign,
             timeout=90)  # fmt: skip
    kubectl.wait_condition("pdcluster", HEALTHY, "Ready", timeout=300)


def test_the_operators_log_holds_no_key_and_no_traceback(target: Target, kubectl: Kubectl, trouble: float) -> None:
    log = install.operator_logs(target, lines=2000)
    assert "PRIVATE KEY" not in log
    assert "Traceback" not in log
    assert "level=INFO" in log
    lines = [line for line in log.splitlines() if f"namespace={kubectl.namespace} name=no-configmap" in line]
    # One line for each thing that happened: a PDCluster that waits for hours must not fill the log.
    assert len(lines) < 25, "\n".join(lines)
