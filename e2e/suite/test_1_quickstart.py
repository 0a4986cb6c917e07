"""apply -> fit check -> pods -> wiring -> verified KV -> equal tokens through the real router -> describe."""

from __future__ import annotations

import json

from e2e.kit import requests
from e2e.kit.kubectl import Kubectl
from e2e.suite.conftest import Model


def test_answers_equal_the_run_that_is_not_disaggregated(kubectl: Kubectl, quickstart: str, model: Model) -> None:
    with kubectl.forward(f"service/{quickstart}-router", 30000) as port:
        pairs = requests.compare(f"http://127.0.0.1:{port}", model.cases)
    assert requests.wrong(pairs) == []


def test_describe_tells_the_truth(kubectl: Kubectl, quickstart: str) -> None:
    found = kubectl.get("pdcluster", quickstart)
    conditions = {c["type"]: c for c in found["status"]["conditions"]}
    assert {t for t, c in conditions.items() if c["status"] == "True"} >= {
        "Ready", "Compatible", "PrefillReady", "DecodeReady", "PeersWired", "KVTransferVerified", "RouterReady",
    }  # fmt: skip
    assert all(c["observedGeneration"] == found["metadata"]["generation"] for c in conditions.values())
    verified = found["status"]["verification"]
    assert verified["bytes"] > 0
    assert verified["seconds"] > 0
    text = kubectl("get", "pdc", quickstart)
    header, row = text.splitlines()[:2]
    assert header.split()[:6] == ["NAME", "READY", "REASON", "PREFILL", "DECODE", "WIRED"]
    assert row.split()[1] == "True"
    assert row.split()[3:6] == ["1/1", "2/2", "2/2"]


def test_every_pod_waits_for_its_wiring(kubectl: Kubectl, quickstart: str) -> None:
    pods = kubectl.get("pods", selector=f"pdcluster.io/cluster={quickstart},pdcluster.io/role in (prefill,decode)")
    assert len(pods) == 3
    for pod in pods:
        assert {"conditionType": "pdcluster.io/kv-wired"} in pod["spec"]["readinessGates"]
        gate = [c for c in pod["status"]["conditions"] if c["type"] == "pdcluster.io/kv-wired"]
        assert [c["status"] for c in gate] == ["True"]


def test_nothing_of_ours_holds_a_finalizer(kubectl: Kubectl, quickstart: str) -> None:
    assert not kubectl.get("pdcluster", quickstart)["metadata"].get("finalizers")


def test_an_unknown_field_is_rejected_by_the_server(kubectl: Kubectl, quickstart: str) -> None:
    found = kubectl.get("pdcluster", quickstart)
    spec = {**found["spec"], "prefil": {"replicas": 1}}
    manifest = {
        "apiVersion": found["apiVersion"],
        "kind": "PDCluster",
        "metadata": {"name": "typo"},
        "spec": spec,
    }
    said = kubectl("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(manifest), check=False)
    assert 'unknown field "spec.prefil"' in said


def test_explain_describes_fields(kubectl: Kubectl, quickstart: str) -> None:
    assert "page" in kubectl("explain", "pdc.spec.kvCache.pageSize").lower()
