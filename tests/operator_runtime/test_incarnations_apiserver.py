"""status.incarnations at a real API server: kept as it was written, and a pod that is gone leaves it."""

from __future__ import annotations

from typing import Any

import pytest
from runtime_world import pdcluster

from pdoperator.domain.incarnations import told
from pdoperator.kube import client
from pdoperator.kube.kinds import PDCLUSTER_API

pytestmark = pytest.mark.apiserver


@pytest.mark.parametrize("after", [{"u1": "i2"}, {}])
async def test_what_was_seen_last_outlives_the_operator(crd_server: Any, after: dict[str, str]) -> None:
    kube = await client.connect(kubeconfig=str(crd_server.kubeconfig))
    ns = f"incarnations-{len(after)}"
    crd_server.kubectl("create", "namespace", ns)
    try:
        await kube.create(pdcluster(namespace=ns))
        for status in ({"u1": "i1", "u2": "i1"}, after):
            body: dict[str, Any] = {
                "apiVersion": PDCLUSTER_API,
                "kind": "PDCluster",
                "metadata": {"name": "a", "namespace": ns},
                "status": {"observedGeneration": 1} | ({"incarnations": status} if status else {}),
            }
            await kube.apply(body, subresource="status")
            found = await kube.get(PDCLUSTER_API, "PDCluster", ns, "a")
            assert found is not None
            assert told(found["status"]) == status
    finally:
        await kube.close()
