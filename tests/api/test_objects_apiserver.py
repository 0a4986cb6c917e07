"""Whole objects on a real API server: examples, status and columns, the chart's CRD, RBAC and pod security."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdoperator.api.status import (
    Condition,
    PDClusterStatus,
    RewriteStatus,
    RoleEngineStatus,
    RoleStatus,
    Summary,
    WiredPairs,
)

pytestmark = pytest.mark.apiserver
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
OPERATOR = "system:serviceaccount:pd:pdcluster-operator"


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_examples_are_accepted(crd_server: Any, path: Path) -> None:
    result = crd_server.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", str(path))
    assert result.returncode == 0, result.stderr


@pytest.fixture
def quickstart(crd_server: Any) -> Any:
    path = str(ROOT / "examples" / "quickstart.yaml")
    assert crd_server.kubectl("apply", "-f", path).returncode == 0
    yield "quickstart"
    crd_server.kubectl("delete", "-f", path)


def _status(ready: str = "True") -> dict[str, Any]:
    status = PDClusterStatus(
        observed_generation=1,
        conditions=(
            Condition(
                type="Ready",
                status=ready,
                observed_generation=1,
                last_transition_time="2026-11-29T15:00:00Z",
                reason="AllReady",
                message="Serving.",
            ),
        ),
        summary=Summary(prefill="1/1", decode="2/2", wired="2/2", verified="1.2 GB/s tcp"),
        wired=WiredPairs(wired=2, wanted=2),
        decode=RoleStatus(
            wanted=2,
            engine=RoleEngineStatus(
                settings={"pageSize": "64", "hicacheMemLayout": "page_first_direct"},
                observed=("pageSize",),
                rewrites=(RewriteStatus(name="pageSize", asked="16", effective="64", reason="DSA has pages of 64"),),
            ),
        ),
    )
    return {
        "apiVersion": "pdcluster.io/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "quickstart", "namespace": "default"},
        "status": status.to_dict(),
    }


def test_status_is_applied_and_shown_in_the_columns(crd_server: Any, quickstart: str) -> None:
    apply = ("apply", "--server-side", "--subresource=status", "--validate=strict", "-f", "-")
    result = crd_server.kubectl(*apply, "--field-manager=pdcluster-operator", stdin=_status())
    assert result.returncode == 0, result.stderr
    header, row = crd_server.kubectl("get", "pdc", quickstart).stdout.splitlines()
    assert header.split() == ["NAME", "READY", "REASON", "PREFILL", "DECODE", "WIRED", "VERIFIED", "AGE"]
    assert row.split()[:5] == ["quickstart", "True", "AllReady", "1/1", "2/2"]
    assert "1.2 GB/s tcp" in row
    stored = json.loads(crd_server.kubectl("get", "pdc", quickstart, "-o", "json").stdout)
    engine = stored["status"]["decode"]["engine"]
    assert engine["settings"] == {"pageSize": "64", "hicacheMemLayout": "page_first_direct"}
    assert engine["rewrites"][0]["asked"] == "16"
    described = crd_server.kubectl("describe", "pdc", quickstart).stdout
    assert "Hicache Mem Layout:" in described and "DSA has pages of 64" in described
    assert stored["metadata"]["generation"] == 1, "a status change must not look like a change of the spec"
    waited = crd_server.kubectl("wait", "--for=condition=Ready", "--timeout=60s", f"pdc/{quickstart}")
    assert waited.returncode == 0


def test_a_status_field_that_the_schema_does_not_know_is_refused(crd_server: Any, quickstart: str) -> None:
    document = _status()
    document["status"]["wiredd"] = {}
    result = crd_server.kubectl(
        "apply", "--server-side", "--subresource=status", "--validate=strict", "-f", "-", stdin=document
    )
    assert result.returncode != 0 and "wiredd" in result.stderr


@pytest.fixture(scope="module")
def chart(crd_server: Any) -> list[dict[str, Any]]:
    """The chart's objects (but the Deployment, which no controller would run here), created."""
    helm = crd_server.tool("helm")
    if helm is None:
        pytest.skip("helm not built: run `make tools` once")
    done = subprocess.run(
        [helm, "template", "pdcluster", str(ROOT / "charts" / "pdcluster"), "--namespace", "pd"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    documents = [document for document in yaml.safe_load_all(done.stdout) if document]
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": "pd", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
    }
    applied = crd_server.kubectl(
        "apply", "--server-side", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump_all([namespace, *documents])
    )
    assert applied.returncode == 0, applied.stderr
    # The authorizer sees new roles and bindings a moment later: one of each kind.
    for may in (("create", "pods", "-n", "default"), ("update", "leases.coordination.k8s.io", "-n", "pd")):
        deadline = time.monotonic() + 60
        while crd_server.kubectl("auth", "can-i", *may, f"--as={OPERATOR}").stdout.strip() != "yes":
            assert time.monotonic() < deadline, f"{may} is not granted"
            time.sleep(0.2)
    return documents


def test_the_operators_pod_is_admitted_under_restricted_pod_security(
    crd_server: Any, chart: list[dict[str, Any]]
) -> None:
    (deployment,) = [document for document in chart if document["kind"] == "Deployment"]
    template = deployment["spec"]["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "operator", "namespace": "pd"},
        "spec": template["spec"],
    }
    result = crd_server.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=pod)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("verb", "resource", "namespace", "allowed"),
    [
        ("create", "pods", "default", True),
        ("delete", "pods", "default", True),
        ("patch", "pods/status", "default", True),
        ("patch", "pdclusters.pdcluster.io/status", "default", True),
        ("update", "pdclusters.pdcluster.io", "default", False),
        ("patch", "pods", "default", False),
        ("get", "pods/exec", "default", False),
        ("get", "secrets", "default", False),
        ("list", "secrets", "default", False),
        ("list", "secrets", "pd", False),
        ("create", "secrets", "default", True),
        ("get", "secrets", "pd", True),
        ("update", "leases.coordination.k8s.io", "pd", True),
        ("update", "leases.coordination.k8s.io", "default", False),
        ("create", "clusterroles.rbac.authorization.k8s.io", "default", False),
    ],
)
def test_what_the_operator_may_do(
    crd_server: Any, chart: list[dict[str, Any]], verb: str, resource: str, namespace: str, allowed: bool
) -> None:
    name, _, subresource = resource.partition("/")
    arguments = ["auth", "can-i", verb, name, f"--as={OPERATOR}", "-n", namespace]
    if subresource:
        arguments.append(f"--subresource={subresource}")
    result = crd_server.kubectl(*arguments)
    assert result.stdout.strip() == ("yes" if allowed else "no"), result.stderr


def test_helm_uninstall_keeps_the_crd_and_the_clusters_and_helm_can_come_back(crd_server: Any, quickstart: str) -> None:
    program = crd_server.tool("helm")
    if program is None:
        pytest.skip("helm not built: run `make tools` once")

    def helm(*arguments: str) -> str:
        done = subprocess.run(
            [program, "--kubeconfig", str(crd_server.kubeconfig), "--namespace", "lifecycle", *arguments],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    chart = str(ROOT / "charts" / "pdcluster")
    # This CRD came from kubectl (as crd.install=false users have it), so Helm has to take it over once.
    notes = helm("upgrade", "--install", "pdcluster", chart, "--create-namespace", "--take-ownership")
    assert "kubectl explain pdc.spec" in notes and "deployment/pdcluster-operator" in notes
    helm("uninstall", "pdcluster")
    assert crd_server.kubectl("get", "crd", "pdclusters.pdcluster.io").returncode == 0
    assert crd_server.kubectl("get", "pdc", quickstart).returncode == 0
    left = crd_server.kubectl("get", "deployment,serviceaccount,role", "-n", "lifecycle", "-o", "name").stdout.split()
    assert [name for name in left if "pdcluster" in name] == []
    helm("upgrade", "--install", "pdcluster", chart)
    helm("uninstall", "pdcluster")
