"""What is known about one role before and after it starts: input of the fit rules.

A fact that is None is unknown; a rule that needs it answers Unknown, never a guess.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

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

    tensor_parallel: int = Field(default=1, gt=0)
    pipeline_parallel: int = Field(default=1, gt=0)
    attention_data_parallel: int = Field(default=1, gt=0)
    context_parallel: int = Field(default=1, gt=0)
    data_parallel: int = Field(default=1, gt=0)
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
    dcp_size: int = Field(default=1, gt=0)
    """Decode context parallelism (--dcp-size), a split of the KV sequence within attention TP."""
    dsa_backend: str | None = None
    """DSA kernels of this role: --dsa-prefill-backend on prefill, --dsa-decode-backend on decode."""
    draft_model: str | None = None
    draft_layers: int | None = None
    """Layers of the draft model's KV (d in the rules)."""
    optimistic_prefill: bool | None = None
    all_cp_ranks_transfer: bool | None = None
    """SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER."""
    sampling_mask: bool | None = None
    """SGLANG_ENABLE_DISAGG_SAMPLING_MASK."""
    ssm_dtype: str | None = None
    """Dtype of the recurrent state (--mamba-ssm-dtype)."""

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
        defaults = {
            "decode_radix_cache": False,
            "hierarchical_cache": False,
            "decode_offload": False,
            "hicache_storage_backend": "",
            "retraction_backup": "",
            "mixed_chunk": False,
            "speculative_algorithm": "",
            "staging_buffer": False,
            "nixl_backend": "UCX",
            "bootstrap_port": 8998,
            "host": "127.0.0.1",
            "all_cp_ranks_transfer": False,
            "sampling_mask": False,
            "optimistic_prefill": False,
        }
        unset = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return self.model_copy(update=unset)


NO_DRAFT_KV = frozenset({"", "NONE", "NGRAM", "LOOKAHEAD"})
"""Speculation that keeps no draft KV: none at all, or guesses from the text alone."""
_ALIASES = {"NEXTN": "EAGLE"}


def draft_kv_algorithm(algorithm: str) -> str:
    """Canonical name of a speculative algorithm that stores draft KV, '' for one that does not."""
    name = algorithm.strip().upper().replace("-", "_")
    return "" if name.replace("_", "") in NO_DRAFT_KV else _ALIASES.get(name, name)
