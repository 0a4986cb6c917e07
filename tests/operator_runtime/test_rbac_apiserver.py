"""The operator as its own service account, with exactly the rights of kube.verbs, on a real API server."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from runtime_world import pdcluster

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


def refused(text: str) -> bool:
    """Whether a log tells of a missing right. Not any "403": times, versions and names hold that too."""
    return re.search(r"(?i)forbidden|\b403 [A-Z]|status.?403", text) is not None


def rules(table: tuple[Rule, ...]) -> list[dict[str, Any]]:
    return [{"apiGroups": [r.group], "resources": [r.resource], "verbs": sorted(r.verbs)} for r in table]


def bind(kind: str, name: str, table: tuple[Rule, ...], namespace: str | None, ops: str = OPS) -> list[dict[str, Any]]:
    meta = {"name": name, **({"namespace": namespace} if namespace else {})}
    api = "rbac.authorization.k8s.io/v1"
    return [
        {"apiVersion": api, "kind": kind, "metadata": meta, "rules": rules(table)},
        {
            "apiVersion": api,
            "kind": f"{kind}Binding",
            "metadata": meta,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": "op", "namespace": ops}],
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
    await_rights(crd_server, OPS, *((r, None) for r in CLUSTER_RULES), *((r, OPS) for r in OWN_NAMESPACE_RULES))
    return kubeconfig_of(crd_server, OPS, tmp_path)


def await_rights(server: Any, ops: str, *wanted: tuple[Rule, str | None]) -> None:
    """Until each rule is in force in its namespace: the API server's authorizer sees new bindings a moment later."""
    reviews = []
    for rule, namespace in wanted:
        resource, _, sub = rule.resource.partition("/")
        asked = {"group": rule.group, "resource": resource, "subresource": sub, "namespace": namespace or ""}
        attributes = {**asked, "verb": min(rule.verbs)}
        spec = {"user": f"system:serviceaccount:{ops}:op", "resourceAttributes": attributes}
        reviews.append({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec})
    deadline = time.monotonic() + 60
    while True:
        done = server.kubectl(
            "create", "-f", "-", "-o", "jsonpath={.status.allowed} ", stdin=yaml.safe_dump_all(reviews)
        )
        if done.stdout.split() == ["true"] * len(reviews):
            return
        assert time.monotonic() < deadline, done.stdout + done.stderr
        time.sleep(0.2)


def kubeconfig_of(crd_server: Any, ops: str, folder: Path) -> Path:
    token = crd_server.kubectl("create", "token", "op", "-n", ops)
    assert token.returncode == 0, token.stderr
    config = yaml.safe_load(Path(crd_server.kubeconfig).read_text())
    config["users"][0]["user"] = {"token": token.stdout.strip()}
    path = folder / "operator.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


async def test_with_roles_in_two_namespaces_the_process_serves_those_and_asks_for_nothing_else(
    crd_server: Any, tmp_path: Path
) -> None:
    """What the chart makes of watchNamespaces: no ClusterRole at all."""
    ops, mine = "scoped-ops", ("scoped-a", "scoped-b")
    objects = bind("Role", "own", OWN_NAMESPACE_RULES, ops, ops)
    for name in (ops, *mine, "scoped-other"):
        crd_server.kubectl("create", "namespace", name)
    crd_server.kubectl("create", "serviceaccount", "op", "-n", ops)
    namespaced = tuple(r for r in CLUSTER_RULES if r.resource != "nodes")
    for name in mine:
        objects += bind("Role", "op", namespaced, name, ops)
    applied = crd_server.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))
    assert applied.returncode == 0, applied.stderr
    await_rights(crd_server, ops, *((r, ops) for r in OWN_NAMESPACE_RULES), *((r, n) for n in mine for r in namespaced))
    log = tmp_path / "operator.log"
    env = {
        **os.environ, "OPERATOR_NAMESPACE": ops, "OPERATOR_POD_NAME": "op", "WATCH_NAMESPACES": ",".join(mine),
        "KUBECONFIG": str(kubeconfig_of(crd_server, ops, tmp_path)), "HEALTH_ADDRESS": "127.0.0.1:0",
        "METRICS_PORT": "0",
    }  # fmt: skip
    admin = await client.connect(kubeconfig=str(crd_server.kubeconfig))
    with log.open("wb") as out:
        command = [sys.executable, "-m", "pdoperator.main"]
        running = subprocess.Popen(command, env=env, stdout=out, stderr=out)  # noqa: ASYNC220
    try:
        deadline = time.monotonic() + 90
        while "event=acquired" not in log.read_text():
            assert time.monotonic() < deadline and running.poll() is None, log.read_text()[-3000:]
            await asyncio.sleep(0.2)
        await asyncio.sleep(2.0)  # the first resync is over: what follows is told by watch events
        for name in (*mine, "scoped-other"):
            await admin.create(pdcluster("a", name))
        while not all([len(await admin.list("v1", "Pod", name)) == 3 for name in mine]):
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            await asyncio.sleep(0.2)
        pod = (await admin.list("v1", "Pod", mine[1]))[0]["metadata"]
        await admin.delete("v1", "Pod", mine[1], pod["name"], grace_seconds=0)
        until = time.monotonic() + 60
        while (
            pod["uid"] in {p["metadata"]["uid"] for p in await admin.list("v1", "Pod", mine[1])}
            or len(await admin.list("v1", "Pod", mine[1])) < 3
        ):
            assert time.monotonic() < until, log.read_text()[-3000:]
            await asyncio.sleep(0.2)
        assert await admin.list("v1", "Pod", "scoped-other") == []
        text = log.read_text()
        assert not refused(text) and "Traceback" not in text, text[-3000:]
    finally:
        running.terminate()
        running.wait(60)
        await admin.close()


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
        times=LeaseTimes(duration=15.0, renew=0.5, retry=0.2, margin=1.0),
    )
    running = asyncio.create_task(operator.run())
    try:
        await admin.create(pdcluster("a", USER))
        deadline = time.monotonic() + 90
        while True:
            status = ((await admin.get(PDCLUSTER_API, "PDCluster", USER, "a")) or {}).get("status") or {}
            pods = await admin.list("v1", "Pod", USER)
            if len(pods) == 3 and status.get("conditions") and status.get("certificates"):
                break
            assert time.monotonic() < deadline, status
            await asyncio.sleep(0.2)
        gone = pods[0]["metadata"]
        await admin.delete("v1", "Pod", USER, gone["name"], grace_seconds=0)
        while len(pods) < 3 or gone["uid"] in {p["metadata"]["uid"] for p in pods}:
            assert time.monotonic() < deadline, "it was not made again"
            await asyncio.sleep(0.2)
            pods = await admin.list("v1", "Pod", USER)
        assert not [r.getMessage() for r in caplog.records if refused(r.getMessage())]
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
