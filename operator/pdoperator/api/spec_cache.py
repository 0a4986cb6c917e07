"""Caches of a role that matter to disaggregation: SGLang's HiCache, and KV that decode receives into host memory.

Words for policies, layouts and backends are SGLang's own (0.5.23), since that is where users look them up. A value
that only another version of the engine knows can be passed in extraArgs, with the field left out.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field, StrictInt

from pdoperator.api.base import ApiModel
from pdoperator.api.kubetypes import AnyObject
from pdoperator.api.scalars import Quantity
from pdtransfer.contract.facts import HostKVMode

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
HostLayout = Literal["layer_first", "page_first", "page_first_direct", "page_first_kv_split", "page_head"]
IoBackend = Literal["kernel", "direct", "kernel_ascend"]
StorageBackend = Literal[
    "file", "sim", "mooncake", "npu_memcache", "hf3fs", "nixl", "aibrix", "dynamic", "eic", "simm", "mori", "shm",
    "tensorcast", "seaweedfs",
]  # fmt: skip
PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]
HostMemoryMode = Literal["cache", "buffer_only"]
RetractionBackup = Literal["cpu_tensor", "host_pool", "none"]


class HierarchicalCacheSpec(ApiModel):
    """SGLang's HiCache: KV kept in host memory or a store for reuse between requests. On when this is set. No setting
    of it has to be the same on prefill and decode; those that the engine rewrites are shown in
    status.<role>.engine."""

    ratio: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="Host pool size over device pool size. Set ratio or size, not both. Unset: 2, or less where host "
        "memory is short (see hostMemoryFraction).",
    )
    size: StrictInt | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Host pool size per rank in GB (10^9 bytes). It counts in the engine container's memory limit; "
        "SGLang keeps 10 GiB of it free.",
    )
    host_memory_mode: HostMemoryMode | None = Field(
        default=None,
        description="cache: host memory keeps KV (the default). buffer_only: host memory only stages KV on its way to "
        "storageBackend; prefill only.",
    )
    host_memory_fraction: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Largest part of the available host memory (after 10 GiB) that the pools of all ranks may take "
        "when neither ratio nor size is set. The engine's default is 0.8.",
    )
    write_policy: WritePolicy | None = Field(
        default=None, description="When KV goes from the device to the host. The engine's default is write_through."
    )
    layout: HostLayout | None = Field(
        default=None,
        description="Memory layout of the host pool. The engine's default is page_first; it is rewritten where "
        "ioBackend, storageBackend or hostKV need another one.",
    )
    io_backend: IoBackend | None = Field(
        default=None, description="How pages move between device and host. The engine's default is kernel."
    )
    storage_backend: StorageBackend | None = Field(
        default=None, description="Third level below host memory, for example file, mooncake or hf3fs. Unset: none."
    )
    storage_config: AnyObject | None = Field(
        default=None,
        description="Settings of storageBackend, passed to it as JSON, for example {master_server_address: ...}.",
    )
    storage_prefetch_policy: PrefetchPolicy | None = Field(
        default=None,
        description="When prefetching from storageBackend stops: best_effort never lets a request wait, wait_complete "
        "waits for all of it, timeout (the default) for a while.",
    )


class DecodeCacheMode(StrEnum):
    CACHE = "Cache"
    OFFLOAD = "Offload"


class DecodeHierarchicalCacheSpec(HierarchicalCacheSpec):
    """SGLang's HiCache on decode. On when this is set."""

    mode: DecodeCacheMode = Field(
        default=DecodeCacheMode.CACHE,
        description="Cache: decode keeps prefixes and asks prefill only for the rest; turns its radix cache on. "
        "Offload: decode keeps none, and writes the KV of its output to storageBackend, where prefill finds it in "
        "the next turn if its hierarchicalCache has the same storageBackend.",
    )


class HiSparseSpec(ApiModel):
    """Sizes of HiSparse (sparse attention with the full KV in host memory)."""

    top_k: StrictInt = Field(default=2048, ge=1, le=1048576, description="Tokens that one step of attention looks at.")
    device_buffer_size: StrictInt | None = Field(
        default=None,
        ge=1,
        le=1048576,
        description="Tokens of each request that stay on the device; at least topK. Unset: twice topK.",
    )


class HostKVSpec(ApiModel):
    """KV that decode receives into host memory."""

    mode: HostKVMode = Field(
        default=HostKVMode.OFF,
        description="Off; HostReceive: KV of new requests arrives in host memory while the device's pool is filled "
        "beyond threshold (needs transfer.backend PDCluster, and a model with plain attention: no MLA); HiSparse: "
        "sparse attention with the full KV in host memory (DeepSeek DSA models and MiniMax-M3).",
    )
    threshold: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="HostReceive: part of the device's KV pool in use from which on requests arrive in host memory. "
        "Unset: 0, every request.",
    )
    size: Quantity | None = Field(
        default=None,
        description="HostReceive: host memory per rank for it, for example 64G, in whole GB (10^9 bytes, rounded "
        "down). It counts in the engine container's memory limit. It is one pool with that of hierarchicalCache: set "
        "its size in one of the two.",
    )
    ratio: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="Host pool size over device pool size. Set ratio or size, not both. Unset: for HostReceive 0.2, "
        "and at least two of the longest requests; for HiSparse 2.",
    )
    hi_sparse: HiSparseSpec | None = Field(default=None, description="HiSparse: its sizes.")
