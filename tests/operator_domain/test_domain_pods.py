"""Manifests: names, probes, gates, flags, overrides, and what RDMA adds."""

from __future__ import annotations

from typing import Any

import pytest
from domain_makers import UID, quickstart

from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.children import network_policy, router_deployment, wanted_children
from pdoperator.domain.observed import ClusterObject
from pdoperator.domain.pods import Slot, engine_pod, pod_name
from pdoperator.domain.revision import role_revision
from pdoperator.domain.settings import DecideSettings
from pdtransfer.contract.base import Role

SETTINGS = DecideSettings()


def cluster(raw: dict[str, Any], name: str = "a") -> tuple[ClusterObject, PDClusterSpec]:
    spec = PDClusterSpec.model_validate(raw)
    return ClusterObject(name, "ns", UID, 1, raw, spec), spec


def pod(raw: dict[str, Any], role: Role = Role.DECODE) -> dict[str, Any]:
    obj, spec = cluster(raw)
    return engine_pod(obj, spec, Slot(role, 0), "abcd1234", 0, SETTINGS)


def flag(p: dict[str, Any], name: str) -> str:
    args = p["spec"]["containers"][0]["args"]
    return args[args.index(name) + 1]


@pytest.mark.parametrize("length", [1, 20, 40, 63])
def test_names_say_the_role_and_fit_a_hostname(length: int) -> None:
    name = pod_name("c" * length, Slot(Role.PREFILL, 1023), "0123abcd", 9999)
    assert "prefill" in name
    assert len(name) <= 63
    assert name != pod_name("c" * (length - 1) + "d", Slot(Role.PREFILL, 1023), "0123abcd", 9999)


def test_dots_in_a_cluster_name_do_not_reach_the_hostname() -> None:
    assert pod_name("a.b", Slot(Role.DECODE, 0), "01234567", 0) == "a-b-decode-0-0-01234567-0"


def test_sidecar_is_native_and_probed_for_readiness_only() -> None:
    p = pod(quickstart())
    (sidecar,) = p["spec"]["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": 9441}
    for c in (sidecar, p["spec"]["containers"][0]):
        assert "startupProbe" not in c and "livenessProbe" not in c


def test_the_gate_is_there_for_our_backend_only() -> None:
    assert pod(quickstart())["spec"]["readinessGates"] == [{"conditionType": "pdcluster.io/kv-wired"}]
    assert "readinessGates" not in pod(quickstart(transfer__backend="NIXL"))["spec"]


def test_sglang_with_its_own_backend_has_no_sidecar_and_the_owned_flags() -> None:
    raw = quickstart(
        transfer__backend="NIXL",
        engine={"type": "SGLang", "image": "sg:1"},
        decode__extraArgs=["--mem-fraction-static=0.8"],
    )
    p = pod(raw)
    assert "initContainers" not in p["spec"]
    assert [v["name"] for v in p["spec"]["volumes"]] == ["dshm", "model"]
    assert p["spec"]["containers"][0]["command"] == ["python3", "-m", "sglang.launch_server"]
    assert flag(p, "--host") == "0.0.0.0"
    assert flag(p, "--disaggregation-transfer-backend") == "nixl"
    assert flag(p, "--disaggregation-mode") == "decode"
    assert p["spec"]["containers"][0]["args"][-1] == "--mem-fraction-static=0.8"
    assert p["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/health"


def test_hierarchical_cache_on_decode_brings_the_flag_that_makes_it_legal() -> None:
    raw = quickstart(
        transfer__backend="NIXL",
        engine={"type": "SGLang", "image": "sg:1"},
        decode__hierarchicalCache={"ratio": 2, "writePolicy": "write_back"},
    )
    args = pod(raw)["spec"]["containers"][0]["args"]
    assert "--enable-hierarchical-cache" in args and "--disaggregation-decode-enable-radix-cache" in args
    assert flag(pod(raw), "--hicache-write-policy") == "write_back"
    prefill = pod(raw, Role.PREFILL)["spec"]["containers"][0]["args"]
    assert "--enable-hierarchical-cache" not in prefill


def test_host_receive_puts_decode_kv_into_host_memory() -> None:
    assert flag(pod(quickstart(decode__hostKV={"mode": "HostReceive"})), "--kv-memory-kind") == "dram"
    assert flag(pod(quickstart()), "--kv-memory-kind") == "vram-emulated"


def test_rdma_brings_resources_capability_networks_and_annotations_and_tcp_does_not() -> None:
    fabric = {
        "type": "RDMA",
        "resources": [{"name": "rdma/hca", "count": 2}],
        "networks": ["roce-a", "ns/roce-b"],
        "annotations": {"x.io/y": "z"},
        "hostNetwork": True,
    }
    p = pod(quickstart(transfer__fabric=fabric))
    engine = p["spec"]["containers"][0]
    assert engine["resources"]["limits"]["rdma/hca"] == "2" == engine["resources"]["requests"]["rdma/hca"]
    assert engine["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert p["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "roce-a, ns/roce-b"
    assert p["metadata"]["annotations"]["x.io/y"] == "z"
    assert p["spec"]["hostNetwork"] is True
    tcp = pod(quickstart())
    assert "securityContext" not in tcp["spec"]["containers"][0]
    assert "hostNetwork" not in tcp["spec"]


def test_one_claim_per_rank_from_a_template() -> None:
    fabric = {"type": "RDMA", "resourceClaimTemplate": "gpu-nic"}
    p = pod(quickstart(transfer__fabric=fabric), Role.PREFILL)
    assert [c["name"] for c in p["spec"]["resourceClaims"]] == ["r0", "r1"]
    assert p["spec"]["containers"][0]["resources"]["claims"] == [{"name": "r0"}, {"name": "r1"}]


def test_template_adds_and_does_not_take_ours_away() -> None:
    template = {
        "labels": {"team": "x"},
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "volumes": [{"name": "cache", "emptyDir": {}}],
        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
        "terminationGracePeriodSeconds": 300,
        "schedulerName": "volcano",
    }
    p = pod(quickstart(decode__template=template))
    assert p["metadata"]["labels"]["team"] == "x"
    assert p["metadata"]["labels"]["pdcluster.io/role"] == "decode"
    assert p["spec"]["nodeSelector"] == {"gpu": "h200"}
    assert {"cache", "model", "pdtransfer-socket"} <= {v["name"] for v in p["spec"]["volumes"]}
    assert p["spec"]["terminationGracePeriodSeconds"] == 300
    assert p["spec"]["schedulerName"] == "volcano"


def test_no_mount_or_variable_of_a_user_takes_the_place_of_ours() -> None:
    bad = ["/run/pdtransfer/", "/run//pdtransfer", "run/pdtransfer", "/run/pdtransfer/sidecar.sock", "/mnt/models/"]
    bad += ["/run/x/../pdtransfer", "/etc/pdtransfer/tls/ca.crt", "/dev/shm/."]
    good = ["/cache", "/run/pdtransferred", "/mnt/models/lora", "/etc/pdtransfer2"]
    template = {
        "volumes": [{"name": "x", "emptyDir": {}}],
        "volumeMounts": [{"name": "x", "mountPath": path} for path in (*bad, *good)],
    }
    p = pod(quickstart(decode__template=template))
    mounts = [m["mountPath"] for m in p["spec"]["containers"][0]["volumeMounts"] if m["name"] == "x"]
    assert mounts == good
    assert [m["mountPath"] for m in p["spec"]["initContainers"][0]["volumeMounts"]] == [
        "/run/pdtransfer",
        "/etc/pdtransfer/tls",
    ]
    raw = quickstart(decode__env=[{"name": "POD_UID", "value": "mine"}, {"name": "PYTHONPATH", "value": "/mine"}])
    env = [e for e in pod(raw)["spec"]["containers"][0]["env"] if e["name"] in ("POD_UID", "PYTHONPATH")]
    assert env == [
        {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "PYTHONPATH", "value": "/mine"},
    ]


def test_every_child_is_owned_without_blocking_deletion() -> None:
    obj, spec = cluster(quickstart())
    manifests = [*wanted_children(obj, spec, SETTINGS), pod(quickstart())]
    for m in manifests:
        (owner,) = m["metadata"]["ownerReferences"]
        assert owner["uid"] == UID and owner["controller"] is True and owner["blockOwnerDeletion"] is False


def test_router_takes_its_key_from_the_secret_and_never_has_it_in_its_arguments() -> None:
    obj, spec = cluster(quickstart(router={"type": "SMG", "policies": {"prefill": "cache_aware"}}))
    c = router_deployment(obj, spec, SETTINGS)["spec"]["template"]["spec"]["containers"][0]
    assert "pdcluster:pdcluster-operator:admin:$(ROUTER_KEY)" in c["args"]
    assert c["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "a-router-key", "key": "key"}
    assert c["args"][c["args"].index("--prefill-policy") + 1] == "cache_aware"


def test_control_port_is_open_to_the_operators_namespace_and_own_pods_only() -> None:
    obj, _ = cluster(quickstart())
    rules = network_policy(obj, SETTINGS)["spec"]["ingress"]
    open_ports = {p["port"] for r in rules if "from" not in r for p in r["ports"]}
    assert open_ports == {30000, 9441}


def test_revision_ignores_replicas_router_rollout_and_verification_and_the_other_role() -> None:
    base = PDClusterSpec.model_validate(quickstart())
    same = PDClusterSpec.model_validate(
        quickstart(
            decode__replicas=7,
            router={"type": "None"},
            rollout={"maxUnavailable": 2},
            transfer__verification={"minBandwidth": "1G", "intervalSeconds": 10},
            prefill__tensorParallelSize=1,
        )
    )
    assert role_revision(base, Role.DECODE) == role_revision(same, Role.DECODE)
    assert role_revision(base, Role.PREFILL) != role_revision(same, Role.PREFILL)
    for change in (
        {"kvCache__pageSize": 32},
        {"engine__image": "pd:2"},
        {"decode__env": [{"name": "A", "value": "1"}]},
    ):
        other = PDClusterSpec.model_validate(quickstart(**change))
        assert role_revision(base, Role.DECODE) != role_revision(other, Role.DECODE), change


def test_defaults_spelled_out_do_not_change_the_revision() -> None:
    base = PDClusterSpec.model_validate(quickstart())
    spelled = PDClusterSpec.model_validate(quickstart(decode__hostKV={"mode": "Off"}, transfer__plugin={"name": "UCX"}))
    assert role_revision(base, Role.DECODE) == role_revision(spelled, Role.DECODE)


def test_with_isolation_by_revision_and_with_foreign_backends_both_roles_share_one_revision() -> None:
    for raw in (quickstart(rollout={"isolation": "Revision"}), quickstart(transfer__backend="NIXL")):
        spec = PDClusterSpec.model_validate(raw)
        assert role_revision(spec, Role.PREFILL) == role_revision(spec, Role.DECODE)


def test_reference_takes_the_command_line_that_the_operator_writes() -> None:
    options = pytest.importorskip("pdtransfer.engines.reference.options")
    for role in Role:
        for raw in (
            quickstart(),
            quickstart(transfer__backend="NIXL"),
            quickstart(decode__hostKV={"mode": "HostReceive"}),
            quickstart(transfer__fabric={"type": "TCP", "devices": ["eth0", "eth1"]}),
        ):
            args = pod(raw, role)["spec"]["containers"][0]["args"]
            told = options.parse_options([a.replace("$(POD_IP)", "10.0.0.1") for a in args])
            assert told.mode == role.value
            assert told.page_size == 16
            assert told.net_devices == (",".join(raw["transfer"]["fabric"].get("devices", ())) or None)
            assert told.tp_size == (2 if role is Role.PREFILL else 1)


def test_the_sidecar_takes_the_command_line_that_the_operator_writes() -> None:
    config = pytest.importorskip("pdtransfer.sidecar.config")
    env = {"PDCLUSTER_UID": UID, "POD_UID": "u", "PDCLUSTER_ROLE": "decode"}
    told = config.parse(pod(quickstart())["spec"]["initContainers"][0]["args"], env)
    assert (str(told.socket), told.control_port, told.health_port, told.wiring) == (
        "/run/pdtransfer/sidecar.sock", 9440, 9441, True,
    )  # fmt: skip
    foreign = pod(quickstart(transfer__backend="NIXL"))["spec"]["initContainers"][0]["args"]
    assert config.parse(foreign, env).wiring is False
