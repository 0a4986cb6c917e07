"""The operator as its own service account, with exactly the rights of kube.verbs, on a real API server."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests_operator_runtime import pdcluster

from pdoperator.domain.decide import decide
from pdoperator.kube import client
from pdoperator.kube.kinds import PDCLUSTER_API
from pdoperator.kube.port import KubeError
from pdoperator.kube.verbs import CLUSTER_RULES, OWN_NAMESPACE_RULES, Rule
from pdoperator.runtime.lease import LeaseTimes
from pdoperator.runtime.operator import Operator
from pdoperator.runtime.supervisor import Pace
from pdoperator.settings import OperatorSettings

pytestmark = pytest.mark.apiserver
OPS, USER = "rbac-ops", "rbac-user"


def rules(table: tuple[Rule, ...]) -> list[dict[str, Any]]:
    return [{"apiGroups": [r.group], "resources": [r.resource], "verbs": sorted(r.verbs)} for r in table]


def bind(kind: str, name: str, table: tuple[Rule, ...], namespace: str | None) -> list[dict[str, Any]]:
    meta = {"name": name, **({"namespace": namespace} if namespace else {})}
    api = "rbac.authorization.k8s.io/v1"
    return [
        {"apiVersion": api, "kind": kind, "metadata": meta, "rules": rules(table)},
        {
            "apiVersion": api,
            "kind": f"{kind}Binding",
            "metadata": meta,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": "op", "namespace": OPS}],
        },
    ]


@pytest.fixture
def as_operator(crd_server: Any, tmp_path: Path) -> Path:
    """kubeconfig of the service account."""
    for name in (OPS, USER):
        crd_server.kubectl("create", "namespace", name)
    crd_server.kubectl("create", "serviceaccount", "op", "-n", OPS)
    objects = bind("ClusterRole", "op", CLUSTER_RULES, None) + bind("Role", "op", OWN_NAMESPACE_RULES, OPS)
    applied = crd_server.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))
    assert applied.returncode == 0, applied.stderr
    token = crd_server.kubectl("create", "token", "op", "-n", OPS)
    assert token.returncode == 0, token.stderr
    config = yaml.safe_load(Path(crd_server.kubeconfig).read_text())
    config["users"][0]["user"] = {"token": token.stdout.strip()}
    path = tmp_path / "operator.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


async def test_the_table_of_verbs_is_enough_and_reads_no_secret_of_users(
    crd_server: Any, as_operator: Path, caplog: pytest.LogCaptureFixture
) -> None:
    admin = await client.connect(kubeconfig=str(crd_server.kubeconfig))
    kube = await client.connect(kubeconfig=str(as_operator))
    operator = Operator(
        kube,
        OperatorSettings(operator_namespace=OPS, pod_name="op"),
        decide,
        pace=Pace(resync=1.0),
        times=LeaseTimes(duration=5.0, renew=0.5, retry=0.2, margin=1.0),
    )
    running = asyncio.create_task(operator.run())
    try:
        await admin.create(pdcluster("a", USER))
        deadline = time.monotonic() + 20
        while True:
            status = ((await admin.get(PDCLUSTER_API, "PDCluster", USER, "a")) or {}).get("status") or {}
            pods = await admin.list("v1", "Pod", USER)
            if len(pods) == 3 and status.get("conditions") and status.get("certificates"):
                break
            assert time.monotonic() < deadline, status
            await asyncio.sleep(0.2)
        await admin.delete("v1", "Pod", USER, pods[0]["metadata"]["name"], grace_seconds=0)
        await asyncio.sleep(1.5)
        assert not [r.getMessage() for r in caplog.records if "403" in r.getMessage() or "orbidden" in r.getMessage()]
        for name in ("a-pdtransfer-tls", "a-router-key"):
            assert await admin.get("v1", "Secret", USER, name) is not None
            with pytest.raises(KubeError) as error:
                await kube.get("v1", "Secret", USER, name)
            assert (error.value.status, error.value.reason) == (403, "Forbidden")
    finally:
        running.cancel()
        await asyncio.wait({running})
        await operator.stop()
        await kube.close()
        await admin.close()
