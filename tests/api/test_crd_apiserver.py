"""The generated CRD on a real API server: what it accepts, what it refuses, and what it says."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import pytest

from pdoperator.api.validation import manifest_problems

pytestmark = pytest.mark.apiserver

GOOD: dict[str, Any] = {
    "apiVersion": "pdcluster.io/v1alpha1",
    "kind": "PDCluster",
    "metadata": {"name": "good", "namespace": "default"},
    "spec": {
        "model": {"source": "org/model"},
        "engine": {"image": "engine:1"},
        "transfer": {"fabric": {"type": "TCP"}},
    },
}


def manifest(**changes: Any) -> dict[str, Any]:
    """GOOD with values at dotted paths below spec; '__' stands for a dot."""
    document = copy.deepcopy(GOOD)
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = document["spec"]
        for step in parents:
            node = node.setdefault(step, {})
        node[last] = value
    return document


def offline(document: dict[str, Any]) -> list[str]:
    """What `pdcluster preflight` says to the same manifest."""
    return manifest_problems(document)


def apply(server: Any, document: dict[str, Any]) -> Any:
    return server.kubectl("apply", "--dry-run=server", "-f", "-", stdin=document)


def test_a_minimal_cluster_is_accepted_and_gets_its_defaults(crd_server: Any) -> None:
    result = crd_server.kubectl("apply", "--dry-run=server", "-o", "json", "-f", "-", stdin=GOOD)
    assert result.returncode == 0, result.stderr
    spec = json.loads(result.stdout)["spec"]
    assert spec["prefill"]["replicas"] == 1 and spec["decode"]["tensorParallelSize"] == 1
    assert spec["transfer"]["backend"] == "PDCluster"
    assert spec["router"] == {"type": "SMG", "replicas": 1}
    # Numbers that a later operator may tune are not frozen into stored objects.
    assert "verification" not in spec["transfer"]


@pytest.mark.parametrize(
    "path",
    [
        "prefil",
        "model__sorce",
        "kvCache__pagesize",
        "transfer__fabric__gpudirect",
        "decode__hostKV__mod",
        "prefill__template__nodeSelecter",
        "prefill__resources__limit",
        "router__policy",
    ],
)
def test_a_typo_in_a_field_name_is_refused(crd_server: Any, path: str) -> None:
    result = apply(crd_server, manifest(**{path: {}}))
    assert result.returncode != 0
    assert "unknown field" in result.stderr
    assert path.replace("__", ".") in result.stderr
    assert offline(manifest(**{path: {}})) == [f"spec.{path.replace('__', '.')}: unknown field"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prefill__nodesPerReplica": 2}, "nodesPerReplica above 1 is not supported yet"),
    ({"transfer__fabric__type": "RDMA"}, "fabric RDMA needs a way to the NICs"),
    ({"transfer__fabric__gpuDirect": "Required"}, "gpuDirect Required needs fabric type RDMA"),
    ({"prefill__tensorParallelSize": 3, "decode__tensorParallelSize": 2}, "must divide one another (A3)"),
    ({"prefill__tensorParallelSize": 3, "prefill__attentionDataParallelSize": 2}, "(A2)"),
    (
        {
            "transfer__backend": "NIXL",
            "prefill__pipelineParallelSize": 4,
            "decode__pipelineParallelSize": 2,
        },
        "(A8)",
    ),
    ({"decode__hostKV__size": "1Gi"}, "hostKV.size has no effect while hostKV.mode is Off"),
    ({"prefill__hierarchicalCache": {"ratio": 2, "size": 10}}, "not both"),
    ({"model": {"servedName": "m"}}, "set model.source"),
    (
        {"model__geometry": {"attention": "MLA", "layers": 2, "kvHeads": 1, "headDim": 64}},
        "need kvLoraRank and qkRopeHeadDim",
    ),
    (
        {"model__geometry": {"layers": 2, "kvHeads": 1, "headDim": 64, "slidingWindowLayers": [2]}},
        "ids from 0 to layers - 1",
    ),
    ({"rollout": {"maxSurge": "0%", "maxUnavailable": 0}}, "can't both be 0"),
    ({"prefill__extraArgs": ["--tp-size=4"]}, "use tensorParallelSize"),
    ({"decode__extraArgs": ["--page_size", "16"]}, "use spec.kvCache.pageSize"),
    ({"decode__extraArgs": ["--kv-cache-d", "fp8_e4m3"]}, "abbreviates a flag"),
    ({"decode__extraArgs": ["--enable-hisparse"]}, "use spec.decode.hostKV"),
    ({"decode__extraArgs": ["--kv-staging-mib=0"]}, "use spec.transfer.stagingSize"),
    ({"transfer__stagingSize": "512Ki"}, "stagingSize is a size from 1Mi to 1Ti, or 0 for none"),
    ({"transfer__stagingSize": "-1"}, "stagingSize is a size"),
    ({"transfer__quarantineSize": "0"}, "quarantineSize is a size from 1Mi to 1Ti"),
    ({"transfer__quarantineSize": "2Ti"}, "quarantineSize is a size from 1Mi to 1Ti"),
    ({"decode__hostKV": {"mode": "HostReceive", "size": "999M"}}, "hostKV.size is a size from 1G to 1Ti"),
    ({"decode__hostKV": {"mode": "HostReceive", "size": "1G", "ratio": 2}}, "set hostKV.ratio or .size, not both"),
    ({"decode__hostKV": {"mode": "HiSparse", "threshold": 0.5}}, "settings of mode HostReceive"),
    ({"decode__hostKV": {"mode": "HostReceive", "hiSparse": {}}}, "hostKV.hiSparse has no effect"),
    ({"decode__hostKV": {"ratio": 2}}, "hostKV.ratio has no effect while hostKV.mode is Off"),
    (
        {"decode__hostKV": {"mode": "HiSparse", "hiSparse": {"topK": 4096, "deviceBufferSize": 2048}}},
        "must be at least topK",
    ),
    ({"decode__hostKV": {"mode": "HiSparse"}, "decode__radixCache": True}, "(E3)"),
    ({"decode__hostKV": {"mode": "HiSparse"}, "decode__hierarchicalCache": {}}, "(E3)"),
    ({"decode__hierarchicalCache": {"mode": "Offload"}}, "(E4)"),
    (
        {
            "decode__hierarchicalCache": {"mode": "Offload", "storageBackend": "file"},
            "decode__retractionBackup": "host_pool",
        },
        "(E4)",
    ),
    (
        {
            "decode__hierarchicalCache": {"mode": "Offload", "storageBackend": "file"},
            "decode__hostKV": {"mode": "HostReceive"},
        },
        "both build decode's host pool",
    ),
    (
        {"decode__hostKV": {"mode": "HostReceive"}, "decode__retractionBackup": "cpu_tensor"},
        "leave retractionBackup out",
    ),
    (
        {"decode__hostKV": {"mode": "HostReceive", "size": "8G"}, "decode__hierarchicalCache": {"ratio": 2}},
        "share one host pool",
    ),
    (
        {"decode__hierarchicalCache": {"hostMemoryMode": "buffer_only", "storageBackend": "file"}},
        "buffer_only is for prefill",
    ),
    ({"prefill__hierarchicalCache": {"hostMemoryMode": "buffer_only"}}, "set storageBackend"),
    ({"prefill__hierarchicalCache": {"hostMemoryFraction": 0.5, "ratio": 2}}, "with ratio or size it has no effect"),
    ({"prefill__hierarchicalCache": {"storagePrefetchPolicy": "timeout"}}, "settings of a store"),
    ({"prefill__template__labels": {"pdcluster.io/role": "decode"}}, "belong to the operator"),
    ({"prefill__template__volumes": [{"name": "model", "emptyDir": {}}]}, "choose another name"),
    ({"prefill__template__volumeMounts": [{"name": "x", "mountPath": "/mnt/models"}]}, "choose another path"),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED, ids=[str(index) for index in range(len(REFUSED))])
def test_what_one_object_can_decide_is_refused_at_apply(crd_server: Any, changes: dict[str, Any], says: str) -> None:
    result = apply(crd_server, manifest(**changes))
    assert result.returncode != 0, "accepted"
    assert says in result.stderr
    assert any(says in line for line in offline(manifest(**changes))), "said otherwise without an API server"


REFUSED_BY_SCHEMA: list[tuple[dict[str, Any], str]] = [
    ({"prefill__env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}, "Duplicate value"),
    ({"prefill__replicas": -1}, "greater than or equal to 0"),
    ({"prefill__replicas": "2"}, "must be of type integer"),
    ({"transfer__verification__minBandwidth": "fast"}, "should match"),
    ({"engine__type": "VLLM"}, "Unsupported value"),
    ({"model": {"volume": {"emptyDir": {}, "configMap": {}}}}, "must have at most 1 item"),
    ({"prefill__extraArgs": ["x"] * 129}, "must have at most 128 items"),
    ({"rollout__maxSurge": 1.5}, "must be of type integer"),
    ({"transfer__strategy": "Fast"}, "Unsupported value"),
    ({"transfer__stagingSize": "lots"}, "should match"),
    ({"prefill__hierarchicalCache": {"writePolicy": "write_never"}}, "Unsupported value"),
    ({"prefill__hierarchicalCache": {"mode": "Offload"}}, "unknown field"),
    ({"decode__hostKV": {"mode": "HostReceive", "threshold": 1}}, "less than 1"),
    ({"decode__retractionBackup": "disk"}, "Unsupported value"),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED_BY_SCHEMA)
def test_values_outside_the_schema_are_refused(crd_server: Any, changes: dict[str, Any], says: str) -> None:
    result = apply(crd_server, manifest(**changes))
    assert result.returncode != 0, "accepted"
    assert says in result.stderr
    assert offline(manifest(**changes)), "accepted without an API server"


@pytest.mark.parametrize(
    "changes",
    [
        {"transfer__fabric": {"type": "RDMA", "resources": [{"name": "rdma/hca"}]}},
        {"transfer__fabric": {"type": "RDMA", "resourceClaimTemplate": "gpu-nic"}},
        {"transfer__fabric": {"type": "RDMA", "hostNetwork": True}, "engine__type": "Reference"},
        {"prefill__tensorParallelSize": 8, "decode__tensorParallelSize": 4, "transfer__backend": "NIXL"},
        # Unequal TP into host memory with NIXL: the operator refuses it with rule F3, not the API server.
        {
            "transfer__backend": "NIXL",
            "prefill__tensorParallelSize": 2,
            "decode__hostKV": {"mode": "HostReceive", "size": "64G"},
        },
        {"prefill__extraArgs": ["--chunked-prefill-size", "8192", "--dtype=bfloat16", "--trust-remote-code"]},
        {"rollout": {"maxSurge": "25%", "maxUnavailable": 0}},
        {
            "transfer__strategy": "Staged",
            "transfer__digest": True,
            "transfer__stagingSize": 0,
            "transfer__quarantineSize": "1Gi",
        },
        {
            "prefill__hierarchicalCache": {
                "hostMemoryMode": "buffer_only",
                "storageBackend": "mooncake",
                "storageConfig": {"master_server_address": "mooncake:50051", "replicas": 2},
                "storagePrefetchPolicy": "wait_complete",
                "writePolicy": "write_through_selective",
                "layout": "page_first_direct",
                "ioBackend": "direct",
            },
            "decode__hierarchicalCache": {"mode": "Offload", "storageBackend": "mooncake", "size": 32},
        },
        {
            "decode__hostKV": {"mode": "HostReceive", "threshold": 0.9, "size": "64Gi"},
            "decode__hierarchicalCache": {"storageBackend": "file"},
            "decode__retractionBackup": "host_pool",
        },
        {"decode__hostKV": {"mode": "HiSparse", "ratio": 4, "hiSparse": {"deviceBufferSize": 4096}}},
        {"model": {"volume": {"configMap": {"name": "tiny-llama"}}}},
        {
            "decode__template": {
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                "affinity": {"nodeAffinity": {}},
                "volumes": [{"name": "cache", "emptyDir": {"medium": "Memory"}}],
                "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
            },
            "decode__resources": {"limits": {"nvidia.com/gpu": 8, "memory": "64Gi"}},
            "decode__env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
        },
    ],
)
def test_what_users_write_is_accepted(crd_server: Any, changes: dict[str, Any]) -> None:
    result = apply(crd_server, manifest(**changes))
    assert result.returncode == 0, result.stderr
    assert offline(manifest(**changes)) == []


def test_a_name_too_long_for_pod_names_is_refused(crd_server: Any) -> None:
    document = copy.deepcopy(GOOD)
    document["metadata"]["name"] = "a" * 41
    result = apply(crd_server, document)
    assert result.returncode != 0 and "at most 40 characters" in result.stderr
    (problem,) = offline(document)
    assert "at most 40 characters" in problem


def test_explain_shows_what_a_field_means(crd_server: Any) -> None:
    deadline = time.monotonic() + 30
    while True:
        result = crd_server.kubectl("explain", "pdc.spec.transfer.backend")
        # The API server publishes a new CRD's schema a moment after it serves the CRD.
        if "Who moves the KV" in result.stdout:
            break
        assert time.monotonic() < deadline, result.stdout + result.stderr
        time.sleep(0.3)
    assert "ENUM" in result.stdout
