"""Specs, and what SGLang has to read from the command lines that the operator composes from them.

Written down by hand, setting by setting, from the spec's fields and SGLang's own names.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from kit_specs import RDMA

from pdoperator.domain.engine_command import NodePlace
from pdtransfer.contract.base import Role

BOTH = {
    "host": "0.0.0.0",
    "port": 30000,
    "disaggregation_bootstrap_port": 8998,
    "enable_metrics": True,
}
BACKENDS = {"PDCluster": "pdcluster", "NIXL": "nixl", "Mooncake": "mooncake"}
SIZES = ((1, 1), (2, 1), (1, 2), (8, 4))


@dataclass(frozen=True)
class Case:
    """A spec, and what SGLang has to read from its two command lines beyond what every line has.

    `fits` says whether SGLang starts with it on a Hopper GPU; None: that is not asked."""

    name: str
    spec: dict[str, Any] = field(default_factory=dict)
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    model: str = "gqa"
    fits: bool | None = True
    place: NodePlace | None = None


def _sides(backend: str, p: int, d: int, fabric: dict[str, Any]) -> Case:
    flag = "mooncake_tcp" if (backend, fabric["type"]) == ("Mooncake", "TCP") else BACKENDS[backend]
    return Case(
        f"{backend}-{fabric['type']}-{p}to{d}",
        {
            "transfer": {"backend": backend, "fabric": fabric},
            "prefill": {"tensorParallelSize": p},
            "decode": {"tensorParallelSize": d},
        },
        {"tp_size": p, "disaggregation_transfer_backend": flag},
        {"tp_size": d, "disaggregation_transfer_backend": flag},
    )


def _decode(name: str, decode: dict[str, Any], expected: dict[str, Any], **more: Any) -> Case:
    return Case(name, {"decode": decode}, {}, expected, **more)


HICACHE = {
    "size": 30,
    "writePolicy": "write_through_selective",
    "layout": "page_first_direct",
    "ioBackend": "direct",
    "storageBackend": "mooncake",
    "storageConfig": {"master_server_address": "mooncake:50051", "replicas": 2},
    "storagePrefetchPolicy": "wait_complete",
}
HICACHE_READ = {
    "hicache_size": 30,
    "hicache_write_policy": "write_through_selective",
    "hicache_mem_layout": "page_first_direct",
    "hicache_io_backend": "direct",
    "hicache_storage_backend": "mooncake",
    "hicache_storage_backend_extra_config": '{"master_server_address":"mooncake:50051","replicas":2}',
    "hicache_storage_prefetch_policy": "wait_complete",
}
CACHE_ON_DECODE = {"enable_hierarchical_cache": True, "disaggregation_decode_enable_radix_cache": True}

CASES = [
    Case("plain"),
    *(
        _sides(backend, p, d, fabric)
        for backend, (p, d), fabric in itertools.product(BACKENDS, SIZES, ({"type": "TCP"}, RDMA))
    ),
    Case(
        "parallel",
        {
            "prefill": {"tensorParallelSize": 8, "pipelineParallelSize": 2, "attentionDataParallelSize": 4},
            "decode": {"tensorParallelSize": 4, "attentionDataParallelSize": 2},
        },
        {"tp_size": 8, "pp_size": 2, "attn_dp_size": 4},
        {"tp_size": 4, "attn_dp_size": 2},
        fits=None,  # PP needs flags of the model's kernels; the parser is asked only.
    ),
    Case(
        "pages-and-dtype",
        {"kvCache": {"pageSize": 64, "dtype": "fp8_e4m3"}, "model": {"servedName": "served", "revision": "abc"}},
        {"page_size": 64, "kv_cache_dtype": "fp8_e4m3", "served_model_name": "served", "revision": "abc"},
        {"page_size": 64, "kv_cache_dtype": "fp8_e4m3", "served_model_name": "served", "revision": "abc"},
    ),
    Case(
        "nixl-devices",
        {"transfer": {"backend": "NIXL", "fabric": RDMA | {"devices": ["mlx5_0:1", "mlx5_3"]}}},
        {"disaggregation_transfer_backend": "nixl", "disaggregation_ib_device": "mlx5_0,mlx5_3"},
        {"disaggregation_transfer_backend": "nixl", "disaggregation_ib_device": "mlx5_0,mlx5_3"},
    ),
    Case("own-devices", {"transfer": {"fabric": RDMA | {"devices": ["mlx5_0:1"]}}}),
    Case(
        "tcp-devices",
        {"transfer": {"backend": "NIXL", "fabric": {"type": "TCP", "devices": ["eth0"]}}},
        {"disaggregation_transfer_backend": "nixl"},
        {"disaggregation_transfer_backend": "nixl"},
    ),
    Case("hicache-default", {"prefill": {"hierarchicalCache": {}}}, {"enable_hierarchical_cache": True}),
    Case(
        "hicache-all",
        {"prefill": {"hierarchicalCache": HICACHE}, "decode": {"hierarchicalCache": HICACHE}},
        {"enable_hierarchical_cache": True, **HICACHE_READ},
        {**CACHE_ON_DECODE, **HICACHE_READ},
    ),
    Case(
        "hicache-buffer",
        {"prefill": {"hierarchicalCache": {"hostMemoryMode": "buffer_only", "storageBackend": "file"}}},
        {
            "enable_hierarchical_cache": True,
            "hicache_host_memory_mode": "buffer_only",
            "hicache_storage_backend": "file",
        },
    ),
    Case(
        "hicache-fraction",
        {"prefill": {"hierarchicalCache": {"hostMemoryFraction": 0.5}}},
        {"enable_hierarchical_cache": True, "hicache_host_memory_fraction": 0.5},
    ),
    _decode("radix", {"radixCache": True}, {"disaggregation_decode_enable_radix_cache": True}),
    _decode(
        "hicache-decode",
        {"hierarchicalCache": {"ratio": 1.5}, "radixCache": True},
        {**CACHE_ON_DECODE, "hicache_ratio": 1.5},
    ),
    _decode(
        "offload",
        {"hierarchicalCache": {"mode": "Offload", "storageBackend": "file", "ratio": 2}},
        {
            "disaggregation_decode_enable_offload_kvcache": True,
            "hicache_storage_backend": "file",
            "hicache_ratio": 2.0,
        },
    ),
    *(
        _decode(f"retraction-{b}", {"retractionBackup": b}, {"disaggregation_decode_retraction_backup": b})
        for b in ("cpu_tensor", "host_pool", "none")
    ),
    _decode(
        "host-receive",
        {"hostKV": {"mode": "HostReceive"}},
        {"disaggregation_decode_host_receive_threshold": 0.0},
    ),
    _decode(
        "host-receive-sized",
        {"hostKV": {"mode": "HostReceive", "threshold": 0.75, "size": "64Gi"}, "retractionBackup": "host_pool"},
        {
            "disaggregation_decode_host_receive_threshold": 0.75,
            "hicache_size": 68,  # 64 x 2^30 bytes are 68.7 x 10^9
            "disaggregation_decode_retraction_backup": "host_pool",
        },
    ),
    _decode(
        "host-receive-cached",
        {"hostKV": {"mode": "HostReceive", "ratio": 0.5}, "hierarchicalCache": {}},
        {**CACHE_ON_DECODE, "disaggregation_decode_host_receive_threshold": 0.0, "hicache_ratio": 0.5},
    ),
    _decode("hisparse", {"hostKV": {"mode": "HiSparse"}}, {"enable_hisparse": True}, model="dsa"),
    _decode(
        "hisparse-sized",
        {"hostKV": {"mode": "HiSparse", "ratio": 4, "hiSparse": {"topK": 1024, "deviceBufferSize": 4096}}},
        {
            "enable_hisparse": True,
            "hisparse_config": '{"device_buffer_size":4096,"host_to_device_ratio":4.0,"top_k":1024}',
        },
        model="dsa",
    ),
    Case(
        "extra-args",
        {
            "prefill": {"extraArgs": ["--chunked-prefill-size", "4096", "--optimistic-prefill-attempts=1"]},
            "decode": {
                "extraArgs": [
                    "--reasoning-parser=qwen3", "--tool-call-parser", "qwen25", "--speculative-algorithm", "NGRAM",
                    "--speculative-num-draft-tokens", "4", "--max-running-requests", "16", "--mem-frac", "0.8",
                ]
            },
        },
        {"chunked_prefill_size": 4096, "optimistic_prefill_attempts": 1},
        {
            "reasoning_parser": "qwen3",
            "tool_call_parser": "qwen25",
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": 4,
            "max_running_requests": 16,
            "mem_fraction_static": 0.8,
        },
        fits=None,
    ),
    Case(
        "dcp-and-dsa-backends",
        {
            "transfer": {"backend": "Mooncake"},
            "prefill": {"extraArgs": ["--dsa-prefill-backend", "flashmla_sparse"]},
            "decode": {
                "tensorParallelSize": 4,
                "extraArgs": ["--dcp-size", "2", "--dsa-decode-backend=flashmla_kv"],
            },
        },
        {"dsa_prefill_backend": "flashmla_sparse", "disaggregation_transfer_backend": "mooncake_tcp"},
        {
            "tp_size": 4,
            "dcp_size": 2,
            "dsa_decode_backend": "flashmla_kv",
            "disaggregation_transfer_backend": "mooncake_tcp",
        },
        model="dsa",
        fits=None,
    ),
    *(
        Case(
            f"node-{rank}-of-2-{leader}",
            {
                "prefill": {"nodesPerReplica": 2, "tensorParallelSize": 16},
                "decode": {"nodesPerReplica": 2, "tensorParallelSize": 16},
            },
            *(
                {"nnodes": 2, "node_rank": rank, "dist_init_addr": address, "tp_size": 16}
                for _ in Role
            ),
            fits=None,
            place=NodePlace(rank, leader),
        )
        for rank, leader, address in (
            (0, "c-prefill-0-0-ab-0.c-pods", "c-prefill-0-0-ab-0.c-pods:20000"),
            (1, "c-prefill-0-0-ab-0.c-pods", "c-prefill-0-0-ab-0.c-pods:20000"),
            (1, "fd00::7", "[fd00::7]:20000"),
        )
    ),
]  # fmt: skip

# What the API server refuses at apply (cel_cache.py) since SGLang refuses to start: SGLang's own word on it.
REFUSED = [
    _decode("hisparse-with-radix", {"hostKV": {"mode": "HiSparse"}, "radixCache": True}, {}, model="dsa"),
    _decode("hisparse-with-hicache", {"hostKV": {"mode": "HiSparse"}, "hierarchicalCache": {}}, {}, model="dsa"),
    _decode("offload-without-store", {"hierarchicalCache": {"mode": "Offload"}}, {}),
    _decode(
        "offload-with-host-pool",
        {"hierarchicalCache": {"mode": "Offload", "storageBackend": "file"}, "retractionBackup": "host_pool"},
        {},
    ),
    _decode(
        "offload-with-host-receive",
        {"hierarchicalCache": {"mode": "Offload", "storageBackend": "file"}, "hostKV": {"mode": "HostReceive"}},
        {},
    ),
    _decode("host-receive-cpu", {"hostKV": {"mode": "HostReceive"}, "retractionBackup": "cpu_tensor"}, {}),
    _decode("buffer-on-decode", {"hierarchicalCache": {"hostMemoryMode": "buffer_only", "storageBackend": "file"}}, {}),
    Case("buffer-without-store", {"prefill": {"hierarchicalCache": {"hostMemoryMode": "buffer_only"}}}),
]
