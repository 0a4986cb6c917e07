"""What is known about one role before and after it starts: input of the fit rules.

A fact that is None is unknown; a rule that needs it answers Unknown, never a guess.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Backend, ContractModel, EngineType, MemoryKind, Role
from pdtransfer.contract.geometry import ModelGeometry
from pdtransfer.contract.launch_defaults import LAUNCH_DEFAULTS

NO_LIMIT = 1 << 31
"""A limit that is not there."""


class HostKVMode(StrEnum):
    """Decode KV that is received into host memory."""

    OFF = "Off"
    HOST_RECEIVE = "HostReceive"
    HISPARSE = "HiSparse"


MAX_SIZE = 1 << 16
"""Ranks of one kind that an engine can have: rules count through stages and ranks, and nobody has more."""


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

    tensor_parallel: int = Field(default=1, gt=0, le=MAX_SIZE)
    pipeline_parallel: int = Field(default=1, gt=0, le=MAX_SIZE)
    attention_data_parallel: int = Field(default=1, gt=0, le=MAX_SIZE)
    context_parallel: int = Field(default=1, gt=0, le=MAX_SIZE)
    data_parallel: int = Field(default=1, gt=0, le=MAX_SIZE)
    """Plain `--dp-size` (replicas inside one server), not attention DP."""
    dp_attention_flag: bool = False
    """The legacy spelling --dp-size N --enable-dp-attention was used."""

    page_size: int | None = Field(default=None, gt=0)
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

    observed: bool = False
    """Read back from running engines (their cards), not only from a spec."""
    page_size_requested: int | None = None
    """The page size that was set, where `page_size` is what the engine really uses."""
    max_total_tokens: int | None = None
    """Tokens in the KV pool of one attention-DP rank."""
    regions_without_memory_kind: int | None = None
    """From cards: registered regions that name neither VRAM nor DRAM."""
    dcp_size: int = Field(default=1, gt=0, le=MAX_SIZE)
    """Decode context parallelism (--dcp-size), a split of the KV sequence within attention TP."""
    dsa_backend: str | None = None
    """DSA kernels of this role: --dsa-prefill-backend on prefill, --dsa-decode-backend on decode."""
    draft_model: str | None = None
    draft_layers: int | None = None
    """Layers of the draft model's KV (d in the rules)."""
    optimistic_prefill: int | None = None
    """--optimistic-prefill-attempts, 0 is off."""
    all_cp_ranks_transfer: bool | None = None
    """SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER."""
    sampling_mask: bool | None = None
    """SGLANG_ENABLE_DISAGG_SAMPLING_MASK."""
    ssm_dtype: str | None = None
    """Dtype of the recurrent state (--mamba-ssm-dtype)."""

    whole_command: bool = False
    """The whole command line and environment are known: what is None was not set, so that the engine's
    own choice holds. Else None is unknown."""
    accelerator: Accelerator | None = None
    attention_backend: str | None = None
    """--attention-backend; '' where none is set. Likewise the two that go before it."""
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None

    hicache_mem_layout: str | None = None
    hicache_io_backend: str | None = None
    hicache_write_policy: str | None = None
    hicache_host_memory_mode: str | None = None
    """`cache` or `buffer_only`."""
    hicache_ratio: float | None = None
    """Host pool over device pool."""
    hicache_size: int | None = None
    """Host pool of a rank, GB; 0 leaves it to the ratio."""
    hicache_host_memory_fraction: float | None = None
    host_receive_threshold: float | None = None
    """--disaggregation-decode-host-receive-threshold; 1 is off."""
    unified_memory: bool | None = None
    priority_scheduling: bool | None = None
    disable_priority_preemption: bool | None = None
    retraction_backup_chosen: bool = False
    """The engine chose `retraction_backup` (contract.effective)."""
    max_running_requests: int | None = None
    decode_extra_slots: int | None = None
    speculative_eagle_topk: int | None = None
    ngram_breadth: int | None = None
    """--speculative-ngram-max-bfs-breadth: the width of NGRAM's trees."""
    speculative_adaptive: bool | None = None
    host_memory: int | None = None
    """Memory that all ranks of one pod may use, bytes (its limit)."""

    staging_pool_mb: int | None = None
    """SGLANG_DISAGG_STAGING_POOL_SIZE_MB: decode's staging ring, MiB a rank."""
    mooncake_tcp: bool | None = None
    """The backend was given as mooncake_tcp: Mooncake without RDMA."""
    ib_device: str | None = None
    """--disaggregation-ib-device, '' where none is set: names, or a JSON object of GPU id -> names."""
    ucx_net_devices: str | None = None
    """UCX_NET_DEVICES in the engine's environment, '' where it is not set. Likewise of two others:"""
    net_devices: str | None = None
    """PDTRANSFER_NET_DEVICES, which backend PDCluster reads."""
    mc_force_tcp: str | None = None
    """MC_FORCE_TCP, which Mooncake reads."""
    base_gpu_id: int | None = Field(default=None, ge=0)
    gpu_id_step: int | None = Field(default=None, gt=0)
    nodes: int | None = Field(default=None, gt=0)
    """--base-gpu-id, --gpu-id-step and --nnodes: which GPU a rank has (with the parallel sizes)."""
    one_visible_device: bool | None = None
    """SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS: each rank has a GPU 0."""
    use_ray: bool | None = None
    """--use-ray: Ray says which GPU a rank has."""
    nixl_params: str | None = None
    """SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS as it is written; '' where it is not set."""
    nixl_plugins: frozenset[str] | None = None
    """The plugins that NIXL finds in the engine's image: told by ranks that run it (on their cards), or by who looked
    into it. No flag, variable or server's answer tells it."""
    load_balance_method: str | None = None
    force_query_prefill_dp_rank: bool | None = None
    """SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK."""
    sampling_mask_max_tokens: int | None = None
    kv_checksum: bool | None = None
    """--disaggregation-enable-kv-checksum."""
    rank_host: str | None = None
    """SGLANG_HOST_IP (or HOST_IP): the address that ranks tell each other; '' where it is not set."""
    rust_server: bool | None = None
    """SGLANG_RUST_SERVER."""
    port: int | None = None
    route_registered: bool | None = None
    """From a running prefill: its bootstrap server answers /route for all of its ranks."""
    max_top_logprobs: int | None = Field(default=None, ge=0)
    """Most top_logprobs that a request which reaches the engine may ask for, NO_LIMIT where it is known that nothing
    limits it. SGLang has no setting for it: it is what stands in front of the engine that limits it."""
    resolved: bool = False
    """Read from a running server's own settings, after it changed what it changes: contract.effective adds nothing."""

    kv_cache_sharding: bool | None = None
    """--enable-kv-cache-sharding (prefill): each rank keeps a stripe of every page."""
    dsa_cache_layer_split: bool | None = None
    """--enable-dsa-cache-layer-split (prefill): context-parallel ranks keep different layers."""
    allocation_policy: str | None = None
    """--disaggregation-decode-allocation-policy: `early` or `prefill_complete`."""
    pd_role_switch: bool | None = None
    """--enable-pd-role-switch."""
    expert_parallel: int | None = None
    """--ep-size; None where it is not set (SGLang may then choose one)."""
    moe_a2a_backend: str | None = None
    """--moe-a2a-backend, `none` without one."""
    decode_tp_sizes: frozenset[int] | None = None
    """Of prefill: attention TP of every decode group that it serves (the one of this check and others, such
    as an older revision that still runs)."""
    hnd_kv_cache: bool | None = None
    """SGLANG_USE_HND_KVCACHE: pages are laid out head by head."""
    dsv4_attention_backend: str | None = None
    """--dsv4-attn-backend of DeepSeek-V4."""
    dsv4_kv_layout: str | None = None
    """SGLANG_DSV4_KV_LAYOUT; '' where it is not set."""
    dsv4_compressed_kv_layout: str | None = None
    """SGLANG_DSV4_COMPRESSED_KV_LAYOUT."""
    draft_tokens: int | None = None
    """--speculative-num-draft-tokens."""
    multi_layer_eagle: bool | None = None
    """--enable-multi-layer-eagle."""
    linear_replayssm: bool | None = None
    """--enable-linear-replayssm."""
    linear_replayssm_spec: bool | None = None
    """--enable-linear-replayssm-spec."""
    mamba_cache_strategy: str | None = None
    """--mamba-radix-cache-strategy: auto, no_buffer, extra_buffer or extra_buffer_lazy."""
    lmcache: bool | None = None
    """--enable-lmcache."""
    watermark: bool | None = None
    """--enable-watermark."""
    response_store: bool | None = None
    """--enable-response-store."""
    pdmux: bool | None = None
    """--enable-pdmux."""
    dllm_algorithm: str | None = None
    """--dllm-algorithm (diffusion LLM), '' for none."""
    minicpm_force_dense: bool | None = None
    """SGLANG_MINICPM_FORCE_DENSE."""
    max_prefill_tokens: int | None = None
    """--max-prefill-tokens."""
    prefill_cp: bool | None = None
    """--enable-prefill-cp."""
    cp_strategy: str | None = None
    """--cp-strategy: `zigzag` or `interleave`, '' where none is set."""
    deterministic: bool | None = None
    """--enable-deterministic-inference."""
    disable_hybrid_swa: bool | None = None
    """--disable-hybrid-swa-memory: sliding layers keep all of their KV, in the one pool."""
    aiter_unified_attention: bool | None = None
    """SGLANG_USE_AITER_UNIFIED_ATTN (ROCm)."""
    aiter_kv_layout: str | None = None
    """SGLANG_AITER_KV_CACHE_LAYOUT (ROCm)."""
    transfer_queues: int | None = None
    """SGLANG_DISAGGREGATION_QUEUE_SIZE: transfer threads of a prefill rank."""

    @property
    def attention_dp(self) -> int:
        """Attention DP after the engine rewrote the legacy spelling (rule A1)."""
        if self.dp_attention_flag and self.data_parallel > 1 and self.attention_data_parallel == 1:
            return self.data_parallel
        return self.attention_data_parallel

    @property
    def attention_tp(self) -> int | None:
        """Ranks that share one sequence's heads: tp // attention dp // cp. None where that is not
        whole (rule A2)."""
        split = self.attention_dp * self.context_parallel
        return None if self.tensor_parallel % split else self.tensor_parallel // split

    @property
    def replicas_inside(self) -> int:
        """Plain data-parallel replicas inside one server."""
        return 1 if self.dp_attention_flag else self.data_parallel

    def with_launch_defaults(self) -> RoleFacts:
        """These facts with the engine's fixed defaults (SGLang 0.5.23) where a flag is not set.

        Only for a caller who knows the whole command line and environment, such as the operator
        that composes them: an absent flag is then a known value, not an unknown one."""
        unset: dict[str, object] = {
            name: value for name, value in LAUNCH_DEFAULTS.items() if getattr(self, name) is None
        }
        return self.model_copy(update=unset | {"whole_command": True})


NO_DRAFT_KV = frozenset({"", "NONE", "NGRAM", "LOOKAHEAD"})
"""Speculation that keeps no draft KV: none at all, or guesses from the text alone."""
_ALIASES = {"NEXTN": "EAGLE"}


def draft_kv_algorithm(algorithm: str) -> str:
    """Canonical name of a speculative algorithm that stores draft KV, '' for one that does not."""
    name = algorithm.strip().upper().replace("-", "_")
    return "" if name.replace("_", "") in NO_DRAFT_KV else _ALIASES.get(name, name)
