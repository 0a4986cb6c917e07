"""SGLang with this project's backend: an unmodified image, the plugin beside it, a sidecar, and what both are told."""

from __future__ import annotations

from typing import Any

import pytest
from domain_makers import UID, quickstart

from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.children import router_deployment
from pdoperator.domain.container_env import OWN_ENV
from pdoperator.domain.observed import ClusterObject
from pdoperator.domain.pods import Slot, engine_pod
from pdoperator.domain.settings import DecideSettings
from pdtransfer.contract.base import Role

SGLANG = {"type": "SGLang", "image": "lmsysorg/sglang:v0.5.23"}
FOLDER = "/opt/pdtransfer"
LAUNCHER = "/opt/pdtransfer/plugin/pdtransfer_launch.py"


def pod(role: Role = Role.DECODE, **changes: Any) -> dict[str, Any]:
    raw = quickstart(engine=SGLANG, **changes)
    obj = ClusterObject("a", "ns", UID, 1, raw, PDClusterSpec.model_validate(raw))
    assert obj.spec is not None
    return engine_pod(obj, obj.spec, Slot(role, 0), "abcd1234", 0, DecideSettings())


def engine(role: Role = Role.DECODE, **changes: Any) -> dict[str, Any]:
    (container,) = pod(role, **changes)["spec"]["containers"]
    return dict(container)


def env(container: dict[str, Any]) -> dict[str, Any]:
    """Variables in the order in which Kubernetes sets them; the same name twice is an error."""
    names = [e["name"] for e in container["env"]]
    assert len(names) == len(set(names))
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container["env"]}


def test_the_engines_image_is_the_users_and_ours_only_copies_into_a_volume() -> None:
    spec = pod()["spec"]
    assert spec["containers"][0]["image"] == "lmsysorg/sglang:v0.5.23"
    sidecar, installer = spec["initContainers"]
    assert (sidecar["name"], installer["name"]) == ("pdtransfer", "pdtransfer-plugin")
    assert sidecar["image"] == installer["image"] == "pd:1"
    assert installer["command"] == ["python3", "-m", "pdtransfer.install", "/opt/pdtransfer/plugin"]
    assert "restartPolicy" not in installer  # it ends before the engine begins
    assert installer["volumeMounts"] == [{"name": "pdtransfer-plugin", "mountPath": FOLDER}]
    assert {"name": "pdtransfer-plugin", "emptyDir": {"sizeLimit": "64Mi"}} in spec["volumes"]


def test_the_installer_takes_the_operators_image_where_the_spec_names_none() -> None:
    transfer = {"backend": "PDCluster", "fabric": {"type": "TCP"}}
    assert [c["image"] for c in pod(transfer=transfer)["spec"]["initContainers"]] == ["pdcluster/transfer:latest"] * 2


def test_the_engine_can_not_change_the_plugin_and_starts_through_its_launcher() -> None:
    container = engine()
    assert container["command"] == ["python3", LAUNCHER, "-m", "sglang.launch_server"]
    assert {"name": "pdtransfer-plugin", "mountPath": FOLDER, "readOnly": True} in container["volumeMounts"]


def test_the_images_own_python_path_is_left_alone() -> None:
    assert "PYTHONPATH" not in env(engine())
    assert env(engine(decode__env=[{"name": "PYTHONPATH", "value": "/mine"}]))["PYTHONPATH"] == "/mine"


def test_ranks_and_sidecar_meet_in_the_same_folder_with_the_same_identity() -> None:
    spec = pod()["spec"]
    sidecar, container = spec["initContainers"][0], spec["containers"][0]
    for each in (sidecar, container):
        mounts = {m["mountPath"]: m["name"] for m in each["volumeMounts"]}
        assert mounts["/run/pdtransfer"] == "pdtransfer-socket"
        assert mounts["/etc/pdtransfer/tls"] == "pdtransfer-tls"
        assert env(each)["PDTRANSFER_SOCKET"] == "/run/pdtransfer/sidecar.sock"
        assert env(each)["PDTRANSFER_TLS_DIR"] == "/etc/pdtransfer/tls"
        assert env(each)["POD_UID"] == {"fieldRef": {"fieldPath": "metadata.uid"}}
        assert env(each)["PDCLUSTER_UID"] == {"fieldRef": {"fieldPath": "metadata.labels['pdcluster.io/cluster-uid']"}}
    assert {v["name"] for v in spec["volumes"]} >= {"pdtransfer-socket", "pdtransfer-tls"}
    assert spec["readinessGates"] == [{"conditionType": "pdcluster.io/kv-wired"}]
    assert "--wiring" not in sidecar["args"]


def test_the_plugin_is_told_what_the_reference_engine_gets_as_flags() -> None:
    told = env(engine())
    assert told["PDTRANSFER_TRANSFER_TIMEOUT"] == "60"
    assert "PDTRANSFER_NET_DEVICES" not in told and "SGLANG_DISAGGREGATION_WAITING_TIMEOUT" not in told
    told = env(
        engine(
            transfer__timeouts={"waitingSeconds": 7, "transferSeconds": 8},
            transfer__fabric={"type": "TCP", "devices": ["eth0", "eth1"]},
        )
    )
    assert (told["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"], told["PDTRANSFER_TRANSFER_TIMEOUT"]) == ("7", "8")
    assert told["PDTRANSFER_NET_DEVICES"] == "eth0,eth1"


def test_every_variable_of_ours_is_refused_in_the_specs_env_or_gives_way_to_it() -> None:
    changes: dict[str, Any] = {
        "transfer__fabric": {"type": "TCP", "devices": ["eth0"]},
        "transfer__plugin": {"name": "LIBFABRIC", "parameters": {"a": "b"}},
        "transfer__timeouts": {"waitingSeconds": 7},
        "model__revision": "c0ffee",
    }
    ours = {name for name in env(engine(**changes)) if name.startswith(("PD", "POD"))}
    assert ours <= set(OWN_ENV)
    mine = [{"name": "SGLANG_HOST_IP", "value": "10.9.9.9"}, {"name": "UCX_NET_DEVICES", "value": "eth7"}]
    for backend in ("PDCluster", "NIXL"):
        told = env(engine(**changes, transfer__backend=backend, decode__env=mine))
        assert (told["SGLANG_HOST_IP"], told["UCX_NET_DEVICES"]) == ("10.9.9.9", "eth7")


def test_sglang_announces_the_pods_address() -> None:
    container = engine()
    names = [e["name"] for e in container["env"]]
    assert env(container)["SGLANG_HOST_IP"] == "$(POD_IP)"
    assert names.index("POD_IP") < names.index("SGLANG_HOST_IP")  # Kubernetes fills in what stands before


def test_an_engine_that_lost_a_rank_ends_at_once_unless_cuda_makes_core_dumps() -> None:
    """SGLang 0.5.23 waits 60 s for dumps (tokenizer_manager.dump_requests_before_crash), asked for or not."""
    name = "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"
    assert env(engine())[name] == "false"
    assert env(engine(decode__env=[{"name": name, "value": "true"}]))[name] == "true"
    assert name not in env(engine(decode__env=[{"name": "CUDA_ENABLE_USER_TRIGGERED_COREDUMP", "value": "1"}]))


@pytest.mark.parametrize(("fabric", "devices"), [("TCP", "eth0"), ("RDMA", None)])
def test_stock_nixl_over_tcp_uses_the_named_devices(fabric: str, devices: str | None) -> None:
    told = env(
        engine(
            transfer__backend="NIXL",
            transfer__fabric={"type": fabric, "devices": ["eth0"], "hostNetwork": fabric == "RDMA"},
        )
    )
    assert told.get("UCX_NET_DEVICES") == devices


def test_nothing_of_it_is_there_for_other_engines_and_backends() -> None:
    for changes in ({"transfer__backend": "NIXL"}, {"transfer__backend": "Mooncake"}):
        spec = pod(**changes)["spec"]
        assert "initContainers" not in spec
        assert spec["containers"][0]["command"] == ["python3", "-m", "sglang.launch_server"]
        assert not [name for name in env(spec["containers"][0]) if name.startswith("PDTRANSFER_")]
    raw = quickstart()
    obj = ClusterObject("a", "ns", UID, 1, raw, PDClusterSpec.model_validate(raw))
    reference = engine_pod(obj, PDClusterSpec.model_validate(raw), Slot(Role.DECODE, 0), "r", 0, DecideSettings())
    assert [c["name"] for c in reference["spec"]["initContainers"]] == ["pdtransfer"]
    assert "pdtransfer-plugin" not in {v["name"] for v in reference["spec"]["volumes"]}


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("/opt/pdtransfer", True),
        ("/opt//pdtransfer/", True),
        ("/opt/pdtransfer/plugin/pdtransfer", True),
        ("/opt/x/../pdtransfer/plugin", True),
        ("/opt/pdtransfer2", False),
        ("/opt", False),
    ],
)
def test_no_mount_of_a_user_lies_over_the_plugin(path: str, ours: bool) -> None:
    template = {
        "volumes": [{"name": "x", "emptyDir": {}}],
        "volumeMounts": [{"name": "x", "mountPath": path}],
    }
    mounts = [m["name"] for m in engine(decode__template=template)["volumeMounts"]]
    assert ("x" not in mounts) is ours


def router_flags(**changes: Any) -> dict[str, str]:
    raw = quickstart(**changes)
    obj = ClusterObject("a", "ns", UID, 1, raw, PDClusterSpec.model_validate(raw))
    made = router_deployment(obj, PDClusterSpec.model_validate(raw), DecideSettings())
    args = made["spec"]["template"]["spec"]["containers"][0]["args"]
    return {args[i]: args[i + 1] for i in range(len(args) - 1) if args[i].startswith("--")}


def test_a_health_answer_that_waits_for_a_prefill_chunk_takes_no_sglang_pod_away() -> None:
    patient, strict = router_flags(engine=SGLANG), router_flags()
    assert (patient["--health-check-timeout-secs"], patient["--health-failure-threshold"]) == ("10", "3")
    assert (strict["--health-check-timeout-secs"], strict["--health-failure-threshold"]) == ("2", "2")
    assert engine()["readinessProbe"]["timeoutSeconds"] == 10
