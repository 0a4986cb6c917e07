"""What the operator writes into an engine pod's environment is what SGLang's plugin reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.containers import engine_container
from pdoperator.domain.settings import DecideSettings
from pdtransfer.contract.base import Role
from pdtransfer.engines.sglang.settings import BadSetting, Settings, read_settings

FIELDS = {
    "POD_UID": "uid-1",
    "POD_NAME": "a-decode-0",
    "POD_IP": "10.0.0.7",
    "POD_NAMESPACE": "ns",
    "PDCLUSTER_UID": "cluster-1",
    "PDCLUSTER_ROLE": "decode",
    "PDCLUSTER_REVISION": "abcd1234",
}
"""What Kubernetes fills in for fieldRef."""


def environment(role: Role, **transfer: Any) -> dict[str, str]:
    """Variables of the engine's container, as its process sees them."""
    spec = PDClusterSpec.model_validate(
        {
            "model": {"source": "/mnt/models"},
            "engine": {"type": "SGLang", "image": "sg:1"},
            "transfer": {"backend": "PDCluster", "fabric": {"type": "TCP"}} | transfer,
            "prefill": {"replicas": 1, "tensorParallelSize": 1},
            "decode": {"replicas": 1, "tensorParallelSize": 1},
        }
    )
    side = spec.prefill if role is Role.PREFILL else spec.decode
    entries = engine_container(spec, role, side, DecideSettings())["env"]
    return {e["name"]: FIELDS[e["name"]] if "valueFrom" in e else e["value"] for e in entries}


def test_a_rank_knows_its_pod_its_sidecar_and_the_deadline() -> None:
    assert read_settings(environment(Role.DECODE)) == Settings(
        cluster_uid="cluster-1",
        pod_uid="uid-1",
        pod_name="a-decode-0",
        revision="abcd1234",
        socket=Path("/run/pdtransfer/sidecar.sock"),
        tls_dir=Path("/etc/pdtransfer/tls"),
        transfer_seconds=60.0,
        host="10.0.0.7",  # where routers and decode ranks reach it: the pod's address
    )


def test_every_setting_of_the_spec_arrives() -> None:
    said = environment(
        Role.DECODE,
        fabric={"type": "TCP", "devices": ["eth0", "eth1"]},
        timeouts={"transferSeconds": 90},
        strategy="Merge",
        digest=True,
        stagingSize="32Mi",
        quarantineSize="64Mi",
    )
    told = read_settings(said)
    assert (told.net_devices, told.transfer_seconds) == ("eth0,eth1", 90.0)
    assert (told.strategy, told.digest, told.staging_mib, told.quarantine_mib) == ("merge", True, 32, 64)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "1e9"])
def test_a_deadline_that_is_none_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(BadSetting, match=r"^PDTRANSFER_TRANSFER_TIMEOUT: "):
        read_settings({"PDTRANSFER_TRANSFER_TIMEOUT": text})
