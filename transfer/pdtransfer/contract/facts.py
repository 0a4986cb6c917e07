"""What is known about one role before and after it starts: input of the fit rules.

A fact that is None is unknown; a rule that needs it answers Unknown, never a guess.
"""

from __future__ import annotations

from enum import StrEnum

from pdtransfer.contract.base import Backend, ContractModel, EngineType, MemoryKind, Role
from pdtransfer.contract.geometry import ModelGeometry


class HostKVMode(StrEnum):
    """Decode KV that is received into host memory."""

    OFF = "Off"
    HOST_RECEIVE = "HostReceive"
    HISPARSE = "HiSparse"


class RoleFacts(ContractModel):
    """Facts about one role of one PDCluster (from its spec), or of one group of equal pods
    (from their cards). Sizes are counts of ranks unless said otherwise."""

    role: Role
    engine: EngineType = EngineType.SGLANG
    engine_version: str | None = None
    backend: Backend = Backend.PDCLUSTER
    geometry: ModelGeometry | None = None
    model_name: str | None = None
    model_revision: str | None = None
    model_dtype: str | None = None

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    attention_data_parallel: int = 1
    context_parallel: int = 1
    data_parallel: int = 1
    """Plain `--dp-size` (replicas inside one server), not attention DP."""
    dp_attention_flag: bool = False
    """The legacy spelling --dp-size N --enable-dp-attention was used."""

    page_size: int | None = None
    kv_dtype: str | None = None
    chunked_prefill_size: int | None = None
    context_length: int | None = None

    decode_radix_cache: bool | None = None
    disable_radix_cache: bool | None = None
    hierarchical_cache: bool | None = None
    decode_offload: bool | None = None
    hicache_storage_backend: str | None = None
    retraction_backup: str | None = None
    mixed_chunk: bool | None = None

    host_kv: HostKVMode = HostKVMode.OFF
    memory_kinds: frozenset[MemoryKind] | None = None
    """From cards: what is registered. From a spec: None unless it is certain."""
    segments: int | None = None
    """From cards: number of registered KV regions."""

    speculative_algorithm: str | None = None
    """None unknown, '' none, else the algorithm."""
    staging_buffer: bool | None = None
    nixl_backend: str | None = None
    bootstrap_port: int | None = None
    host: str | None = None
    layers: tuple[int, ...] | None = None
    """From cards: layer ids held over all stages."""
