"""The API client, the Lease, the real decide() and the whole process against a real API server."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from runtime_world import pdcluster

from free_ports import free_port
from pdoperator.domain.actions import Decision, Memory
from pdoperator.domain.decide import decide
from pdoperator.domain.observed import Observed
from pdoperator.domain.settings import DecideSettings
from pdoperator.kube import client
from pdoperator.kube.kinds import PDCLUSTER_API
from pdoperator.kube.port import KubeError
from pdoperator.runtime import credentials
from pdoperator.runtime.lease import Lease, LeaseLost, LeaseTimes
from pdoperator.runtime.operator import Operator
from pdoperator.runtime.supervisor import Pace
from pdoperator.settings import OperatorSettings

pytestmark = pytest.mark.apiserver


def namespace(server: Any, name: str) -> str:
    server.kubectl("create", "namespace", name)
    # Pods need their namespace's default account, which no controller makes here.
    return name


@pytest.fixture
async def kube(crd_server: Any) -> AsyncIterator[client.KubeClient]:
    made = await client.connect(kubeconfig=str(crd_server.kubeconfig))
    yield made
    await made.close()


async def until(what: Callable[[], Any], timeout: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = what()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        await asyncio.sleep(0.1)
    raise AssertionError("it did not happen in time")


def config_map(ns: str, name: str, **data: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": ns, "labels": {"t": "x"}},
        "data": data,
    }


async def test_create_get_apply_replace_list_delete_and_their_errors(crd_server: Any, kube: client.KubeClient) -> None:
    ns = namespace(crd_server, "client")
    assert await kube.get("v1", "ConfigMap", ns, "a") is None
    made = await kube.create(config_map(ns, "a", k="1"))
    with pytest.raises(KubeError) as error:
        await kube.create(config_map(ns, "a"))
    assert (error.value.status, error.value.reason) == (409, "AlreadyExists")
    applied = await kube.apply(config_map(ns, "a", k="2"))
    assert applied["data"] == {"k": "2"}
    with pytest.raises(KubeError) as error:
        await kube.replace(made)  # an old resourceVersion
    assert (error.value.status, error.value.reason) == (409, "Conflict")
    replaced = await kube.replace({**applied, "data": {"k": "3"}})
    assert replaced["data"] == {"k": "3"}
    with pytest.raises(KubeError) as error:
        await kube.delete("v1", "ConfigMap", ns, "a", uid="00000000-0000-0000-0000-000000000000")
    assert error.value.status == 409
    await kube.delete("v1", "ConfigMap", ns, "a", uid=made["metadata"]["uid"])
    await kube.delete("v1", "ConfigMap", ns, "a")  # gone already
    with pytest.raises(KubeError) as error:
        await kube.create(config_map(ns, "NotAName"))
    assert (error.value.status, error.value.reason) == (422, "Invalid")


async def test_strict_dry_run_finds_typos_and_stores_nothing(crd_server: Any, kube: client.KubeClient) -> None:
    ns = namespace(crd_server, "strict")
    typo = {**config_map(ns, "a"), "dta": {}}
    with pytest.raises(KubeError) as error:
        await kube.create(typo, dry_run=True, strict=True)
    assert error.value.status == 400 and "dta" in error.value.message
    await kube.create(config_map(ns, "a"), dry_run=True)
    assert await kube.get("v1", "ConfigMap", ns, "a") is None


async def test_a_list_of_more_than_one_page_is_whole(crd_server: Any, kube: client.KubeClient) -> None:
    ns = namespace(crd_server, "pages")
    client._PAGE, kept = 7, client._PAGE
    try:
        await asyncio.gather(*(kube.create(config_map(ns, f"c{i}")) for i in range(30)))
        found = await kube.list("v1", "ConfigMap", ns, "t=x")
    finally:
        client._PAGE = kept
    assert {o["metadata"]["name"] for o in found} == {f"c{i}" for i in range(30)}
    assert {o["kind"] for o in found} == {"ConfigMap"}


async def test_a_server_that_is_not_there_is_an_error_without_status(tmp_path: Path, crd_server: Any) -> None:
    text = await asyncio.to_thread(Path(crd_server.kubeconfig).read_text)
    port = text.split("https://127.0.0.1:")[1].split("\n")[0]
    path = tmp_path / "kubeconfig"
    path.write_text(text.replace(f":{port}", ":1"))
    nobody = await client.connect(kubeconfig=str(path))
    with pytest.raises(KubeError) as error:
        await nobody.list("v1", "ConfigMap", "default")
    assert error.value.status == 0
    await nobody.close()


async def test_a_status_goes_only_to_the_version_that_was_read(crd_server: Any, kube: client.KubeClient) -> None:
    ns = namespace(crd_server, "versions")
    obj = await kube.create(pdcluster("a", ns))
    meta = {"name": "a", "namespace": ns, "resourceVersion": obj["metadata"]["resourceVersion"]}
    body = {"apiVersion": PDCLUSTER_API, "kind": "PDCluster", "metadata": meta, "status": {"observedGeneration": 1}}
    stored = await kube.apply(body, subresource="status")
    assert stored["status"] == {"observedGeneration": 1}
    assert stored["metadata"]["generation"] == obj["metadata"]["generation"]
    with pytest.raises(KubeError) as error:
        await kube.apply({**body, "status": {"observedGeneration": 2}}, subresource="status")
    assert error.value.status == 409
    await kube.delete(PDCLUSTER_API, "PDCluster", ns, "a")
    with pytest.raises(KubeError) as error:
        await kube.apply(body, subresource="status")
    assert error.value.status in (404, 409)
    await kube.create(pdcluster("a", ns))  # a namesake
    with pytest.raises(KubeError) as error:
        await kube.apply(body, subresource="status")
    assert error.value.status == 409


async def test_a_gate_meant_for_another_pod_of_that_name_is_refused(crd_server: Any, kube: client.KubeClient) -> None:
    ns = namespace(crd_server, "gates")
    spec = {"containers": [{"name": "c", "image": "x"}]}
    made = await kube.create(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": ns}, "spec": spec}
    )

    def gate(uid: str) -> dict[str, Any]:
        condition = {"type": "pdcluster.io/kv-wired", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        meta = {"name": "p", "namespace": ns, "uid": uid}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": {"conditions": [condition]}}

    with pytest.raises(KubeError) as error:
        await kube.apply(gate("00000000-0000-0000-0000-000000000000"), subresource="status")
    assert (error.value.status, "metadata.uid" in error.value.message) == (422, True), error.value
    stored = await kube.apply(gate(made["metadata"]["uid"]), subresource="status")
    assert [c["type"] for c in stored["status"]["conditions"]] == ["pdcluster.io/kv-wired"]


async def test_two_operators_contend_for_a_real_lease(crd_server: Any, kube: client.KubeClient) -> None:
    ns = namespace(crd_server, "lease")
    times = LeaseTimes(duration=6.0, renew=0.5, retry=0.1, margin=0.5)
    one, two = Lease(kube, ns, "one", times), Lease(kube, ns, "two", times)
    assert await one.acquire() == 1
    keeper = asyncio.create_task(one.keep())
    waiter = asyncio.create_task(two.acquire())
    await asyncio.sleep(6.5)  # without a renewal it would be lost
    assert one.held() and not waiter.done()
    keeper.cancel()  # it hangs; nobody releases
    assert await asyncio.wait_for(waiter, 60.0) == 2
    assert not one.held()
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(one.keep(), 60.0)
    await two.release()
    assert await asyncio.wait_for(Lease(kube, ns, "three", times).acquire(), 5.9) == 3  # before any lease ends


async def test_the_ca_secret_and_a_certificate_secret_are_real_objects(
    crd_server: Any, kube: client.KubeClient
) -> None:
    ns = namespace(crd_server, "ca")
    first, second = await credentials.load(kube, ns), await credentials.load(kube, ns)
    assert first.ca_fingerprint == second.ca_fingerprint


async def test_the_real_decide_launches_and_a_restarted_operator_changes_nothing(
    crd_server: Any, kube: client.KubeClient
) -> None:
    ns, ops = namespace(crd_server, "whole"), namespace(crd_server, "whole-ops")
    settings = OperatorSettings(operator_namespace=ops, pod_name="test", watch_namespaces=(ns,))
    times = LeaseTimes(duration=15.0, renew=1.0, retry=0.1, margin=1.0)
    looks: list[Decision] = []

    def looking(seen: Observed, memory: Memory, held: DecideSettings) -> Decision:
        looks.append(decide(seen, memory, held))
        return looks[-1]

    async def run(check: Callable[[], Any]) -> None:
        """An operator until `check`; `looks` are its decisions."""
        looks.clear()
        operator = Operator(kube, settings, looking, pace=Pace(resync=1.0), times=times)
        task = asyncio.create_task(operator.run())
        try:
            await until(check)
        finally:
            task.cancel()
            await asyncio.wait({task})
            await operator.stop()

    await kube.create(pdcluster("a", ns, replicas=2))

    async def all_there() -> bool:
        pods = await kube.list("v1", "Pod", ns)
        obj = await kube.get(PDCLUSTER_API, "PDCluster", ns, "a")
        status = (obj or {}).get("status") or {}
        return len(pods) == 3 and bool(status.get("conditions")) and bool(status.get("certificates"))

    def settled() -> bool:
        """The last looks wanted nothing, and what the ones before wanted was done by then."""
        return len(looks) >= 3 and not any(d.actions or d.status is not None for d in looks[-3:])

    await run(all_there)
    await run(settled)
    secret = json.loads(crd_server.kubectl("get", "secret", "-n", ns, "a-pdtransfer-tls", "-o", "json").stdout)
    assert b"BEGIN CERTIFICATE" in base64.b64decode(secret["data"]["ca.crt"])

    async def versions() -> dict[str, str]:
        found = {}
        for api, kind in (
            ("v1", "Pod"), ("v1", "Service"), ("v1", "Secret"), ("apps/v1", "Deployment"),
            ("networking.k8s.io/v1", "NetworkPolicy"), ("policy/v1", "PodDisruptionBudget"),
            (PDCLUSTER_API, "PDCluster"),
        ):  # fmt: skip
            for o in await kube.list(api, kind, ns):
                found[f"{kind}/{o['metadata']['name']}"] = o["metadata"]["resourceVersion"]
        return found

    before = await versions()
    assert {k.partition("/")[0] for k in before} == {
        "Pod", "Service", "Secret", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "PDCluster",
    }  # fmt: skip
    await run(lambda: len(looks) >= 4)
    after = await versions()
    stored = await kube.get(PDCLUSTER_API, "PDCluster", ns, "a")
    assert after == before, stored
    events = json.loads(crd_server.kubectl("get", "events", "-n", ns, "-o", "json").stdout)["items"]
    assert {e["involvedObject"]["name"] for e in events} <= {"a"}


@pytest.fixture
def process(crd_server: Any, tmp_path: Path) -> Any:
    """The console script, as the chart runs it, but with a kubeconfig."""
    ops = namespace(crd_server, "process-ops")
    health = free_port()
    log = (tmp_path / "operator.log").open("wb")
    env = {
        **os.environ, "OPERATOR_NAMESPACE": ops, "OPERATOR_POD_NAME": "op-1", "KUBECONFIG": str(crd_server.kubeconfig),
        "WATCH_NAMESPACES": "process", "HEALTH_ADDRESS": f"127.0.0.1:{health}", "METRICS_PORT": str(free_port()),
    }  # fmt: skip
    made = subprocess.Popen([sys.executable, "-m", "pdoperator.main"], env=env, stdout=log, stderr=subprocess.STDOUT)
    yield made, health, tmp_path / "operator.log"
    if made.poll() is None:
        made.kill()
        made.wait(60)
    log.close()


async def test_the_process_reconciles_without_leaving_finalizers_and_ends_cleanly(
    crd_server: Any, kube: client.KubeClient, process: Any
) -> None:
    ns = namespace(crd_server, "process")
    running, health, log = process

    def healthy() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{health}/healthz", timeout=20) as answer:
                return "term 1" in json.loads(answer.read())["operator"]
        except OSError:
            return False

    await until(healthy)
    created = time.monotonic()
    await kube.create(pdcluster("a", ns))

    async def pods() -> list[Any]:
        return await kube.list("v1", "Pod", ns)

    await until(pods)
    seconds = time.monotonic() - created
    assert seconds < 20.0  # by the watch event: the next resync comes after 27 s or more
    obj = await kube.get(PDCLUSTER_API, "PDCluster", ns, "a")
    assert obj is not None
    assert not obj["metadata"].get("finalizers") and not obj["metadata"].get("annotations")
    # A pod that vanishes is missed by its watch event.
    first = (await pods())[0]
    await kube.delete("v1", "Pod", ns, first["metadata"]["name"], grace_seconds=0)
    uid = first["metadata"]["uid"]

    async def replaced() -> bool:
        found = await pods()
        return len(found) >= 2 and uid not in {p["metadata"]["uid"] for p in found}

    await until(replaced)
    await kube.delete(PDCLUSTER_API, "PDCluster", ns, "a")
    assert await kube.get(PDCLUSTER_API, "PDCluster", ns, "a") is None
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 0, log.read_text()[-3000:]
    lease = await kube.get("coordination.k8s.io/v1", "Lease", "process-ops", "pdcluster-operator")
    assert lease is not None and not lease["spec"].get("holderIdentity")
    text = log.read_text()
    assert "PRIVATE KEY" not in text and "Traceback" not in text, text[-3000:]


async def test_a_process_that_loses_its_lease_ends_with_1(
    crd_server: Any, kube: client.KubeClient, process: Any
) -> None:
    namespace(crd_server, "process")
    running, _, log = process

    async def holder() -> dict[str, Any] | None:
        found = await kube.get("coordination.k8s.io/v1", "Lease", "process-ops", "pdcluster-operator")
        return found if found is not None and str(found["spec"].get("holderIdentity", "")).startswith("op-1_") else None

    async def steal() -> bool:
        found = await holder()
        if found is None:
            return False
        spec = {**found["spec"], "holderIdentity": "thief", "leaseTransitions": found["spec"]["leaseTransitions"] + 1}
        try:
            await kube.replace({**found, "spec": spec})
        except KubeError:
            return False  # it renewed in between
        return True

    await until(steal)
    await until(lambda: running.poll() is not None)
    assert running.returncode == 1, log.read_text()[-3000:]
