"""The flags of SGLang 0.5.23 that say something about the fit of prefill and decode.

This is the one table of them: `pdcluster preflight` reads plain command lines and running servers with it, and
the operator reads extraArgs. A test holds names, kinds, defaults and choices to SGLang's own parser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdtransfer.contract.sglang_cli.kinds import Kind
from pdtransfer.contract.sglang_cli.other_flags import OTHER

READ_FROM = "0.5.23"
"""The SGLang version whose flags these are."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `dest` is SGLang's own name of the setting, in its code and in /server_info."""

    names: tuple[str, ...]
    kind: Kind
    dest: str
    default: Any = None
    choices: tuple[str, ...] = ()
    fact: str = ""
    """Attribute of RoleFacts that takes the value as it is; '' where it is derived (`facts.py`) or no rule reads it."""
    open: bool = False
    """Plugins can add to the choices: another value is not refused, but not known either."""
    unset: Any = None
    """What the fact is where the setting is null: '' for "none". None: not known."""

    @property
    def name(self) -> str:
        """The name that messages use."""
        return self.names[0]


def _f(
    names: str,
    kind: Kind = Kind.TEXT,
    default: Any = None,
    fact: str = "",
    *,
    dest: str = "",
    choices: str = "",
    open: bool = False,
    unset: Any = None,
) -> Flag:
    """A row: space-separated names without dashes, and choices."""
    spelled = tuple("--" + n for n in names.split())
    if kind is Kind.SWITCH and default is None:
        default = False
    return Flag(
        spelled, kind, dest or spelled[0][2:].replace("-", "_"), default, tuple(choices.split()), fact, open, unset
    )


_INT, _SWITCH, _FLOAT, _TOKENS = Kind.INT, Kind.SWITCH, Kind.FLOAT, Kind.TOKENS

_ATTENTION = (
    "triton torch_native flex_attention dsa nsa qsa dsv4 compressed fa3 fa4 flashinfer llada2_cfg_flashinfer flashmla "
    "trtllm_mla cutedsl_mla tokenspeed_mla trtllm_mha hpc_ops minicpm_flashattn minicpm_flashinfer aiter wave "
    "intel_amx ascend intel_xpu"
)
_DSA = (
    "flashmla_sparse flashmla_sparse_q8 flashmla_kv flashmla_auto flashinfer_sparse_mla fa3 tilelang triton aiter "
    "trtllm intel_xpu"
)

FLAGS: tuple[Flag, ...] = (
    # The model.
    _f("model-path model", fact="model_name"),
    _f("revision", fact="model_revision"),
    _f("dtype", default="auto", fact="model_dtype", choices="auto half float16 bfloat16 float float32"),
    _f(
        "kv-cache-dtype",
        default="auto",
        fact="kv_dtype",
        choices="auto fp8_e5m2 fp8_e4m3 mxfp8 bf16 bfloat16 nvfp4 fp4_mx_block16",
    ),
    _f("quantization"),
    _f("json-model-override-args", default="{}"),
    _f("context-length", _TOKENS, fact="context_length"),
    # Parallelism.
    _f("tp-size tensor-parallel-size", _INT, 1, "tensor_parallel"),
    _f("pp-size pipeline-parallel-size", _INT, 1, "pipeline_parallel"),
    _f("dp-size data-parallel-size", _INT, 1, "data_parallel"),
    _f("attn-dp-size attention-data-parallel-size", _INT, 1, "attention_data_parallel"),
    _f("attn-cp-size attention-context-parallel-size", _INT, 1, "context_parallel"),
    _f("dcp-size decode-context-parallel-size", _INT, 1, "dcp_size"),
    _f("ep-size expert-parallel-size ep", _INT, 1, "expert_parallel"),
    _f("enable-dp-attention", _SWITCH, fact="dp_attention_flag"),
    _f("enable-prefill-cp", _SWITCH, fact="prefill_cp"),
    _f("cp-strategy", fact="cp_strategy", choices="zigzag interleave", unset=""),
    _f("enable-kv-cache-sharding", _SWITCH, fact="kv_cache_sharding"),
    _f("enable-dsa-cache-layer-split", _SWITCH, fact="dsa_cache_layer_split"),
    _f(
        "load-balance-method",
        default="auto",
        fact="load_balance_method",
        choices="auto round_robin follow_bootstrap_room total_requests total_tokens",
    ),
    _f(
        "moe-a2a-backend",
        default="none",
        fact="moe_a2a_backend",
        choices="none deepep mooncake nixl mori ascend_fuseep flashinfer megamoe deepep_v2 pplx ascend_tp "
        "flashinfer_megamoe",
    ),
    _f("nnodes", _INT, 1, "nodes"),
    _f("base-gpu-id", _INT, 0, "base_gpu_id"),
    _f("gpu-id-step", _INT, 1, "gpu_id_step"),
    _f("use-ray", _SWITCH, fact="use_ray"),
    _f("node-rank", _INT, 0),
    _f("dist-init-addr nccl-init-addr"),
    # The pool of KV pages, and what computes on it.
    _f("page-size", _INT, fact="page_size"),
    _f("chunked-prefill-size", _INT, fact="chunked_prefill_size"),
    _f("max-total-tokens", _TOKENS),
    _f("max-running-requests", _INT, fact="max_running_requests"),
    _f("max-prefill-tokens", _TOKENS, 16384, "max_prefill_tokens"),
    _f("enable-deterministic-inference", _SWITCH, fact="deterministic"),
    _f("disable-hybrid-swa-memory", _SWITCH, fact="disable_hybrid_swa"),
    _f("disable-radix-cache", _SWITCH, fact="disable_radix_cache"),
    _f("enable-mixed-chunk", _SWITCH, fact="mixed_chunk"),
    _f("enable-unified-memory", _SWITCH, fact="unified_memory"),
    _f("enable-priority-scheduling", _SWITCH, fact="priority_scheduling"),
    _f("disable-priority-preemption", _SWITCH, fact="disable_priority_preemption"),
    _f("device"),
    _f("attention-backend", fact="attention_backend", choices=_ATTENTION, open=True, unset=""),
    _f("prefill-attention-backend", fact="prefill_attention_backend", choices=_ATTENTION, open=True, unset=""),
    _f("decode-attention-backend", fact="decode_attention_backend", choices=_ATTENTION, open=True, unset=""),
    _f("dsa-prefill-backend", choices=_DSA + " triton_sparse_mla"),
    _f("dsa-decode-backend", choices=_DSA),
    _f(
        "dsv4-attn-backend", default="auto", fact="dsv4_attention_backend", choices="auto flashmla flashmla_mega trtllm"
    ),
    # Speculation.
    _f("speculative-algorithm", fact="speculative_algorithm", unset=""),
    _f("speculative-draft-model-path speculative-draft-model", fact="draft_model"),
    _f("speculative-draft-kv-cache-dtype", choices="auto fp8_e5m2 fp8_e4m3 bf16 bfloat16"),
    _f("speculative-num-draft-tokens", _INT, fact="draft_tokens"),
    _f("speculative-eagle-topk", _INT, fact="speculative_eagle_topk"),
    _f("speculative-ngram-max-bfs-breadth", _INT, 10, "ngram_breadth"),
    _f("speculative-adaptive", _SWITCH, fact="speculative_adaptive"),
    _f("enable-multi-layer-eagle", _SWITCH, fact="multi_layer_eagle"),
    # Recurrent state.
    _f("mamba-ssm-dtype", fact="ssm_dtype", choices="float32 bfloat16 float16"),
    _f(
        "mamba-radix-cache-strategy",
        default="auto",
        fact="mamba_cache_strategy",
        choices="auto no_buffer extra_buffer extra_buffer_lazy",
    ),
    _f("enable-linear-replayssm", _SWITCH, fact="linear_replayssm"),
    _f("enable-linear-replayssm-spec", _SWITCH, fact="linear_replayssm_spec"),
    # Hierarchical cache and KV on the host.
    _f("enable-hierarchical-cache enable-hicache", _SWITCH, fact="hierarchical_cache"),
    _f(
        "hicache-storage-backend",
        fact="hicache_storage_backend",
        unset="",
        choices="file sim mooncake npu_memcache hf3fs nixl aibrix dynamic eic simm mori shm tensorcast seaweedfs",
    ),
    _f("hicache-ratio", _FLOAT, fact="hicache_ratio"),
    _f("hicache-size", _INT, 0, "hicache_size"),
    _f("hicache-host-memory-mode", default="cache", fact="hicache_host_memory_mode", choices="cache buffer_only"),
    _f("hicache-host-memory-fraction", _FLOAT, 0.8, "hicache_host_memory_fraction"),
    _f(
        "hicache-write-policy",
        default="write_through",
        fact="hicache_write_policy",
        choices="write_back write_through write_through_selective",
    ),
    _f("hicache-io-backend", default="kernel", fact="hicache_io_backend", choices="direct kernel kernel_ascend"),
    _f(
        "hicache-mem-layout",
        default="page_first",
        fact="hicache_mem_layout",
        choices="layer_first page_first page_first_direct page_first_kv_split page_head",
    ),
    _f("enable-hisparse", _SWITCH),
    _f("hisparse-config hierarchical-sparse-attention-extra-config"),
    # Prefill and decode.
    _f("disaggregation-mode", default="null", choices="null prefill decode"),
    _f(
        "disaggregation-transfer-backend",
        default="mooncake",
        choices="mooncake nixl ascend fake mori mooncake_tcp",
        open=True,
    ),
    _f("disaggregation-bootstrap-port", _INT, 8998, "bootstrap_port"),
    _f("disaggregation-ib-device", fact="ib_device", unset=""),
    _f("disaggregation-decode-enable-radix-cache", _SWITCH, fact="decode_radix_cache"),
    _f("disaggregation-decode-enable-offload-kvcache", _SWITCH, fact="decode_offload"),
    _f(
        "disaggregation-decode-retraction-backup",
        fact="retraction_backup",
        unset="",
        choices="cpu_tensor host_pool none",
    ),
    _f("disaggregation-decode-host-receive-threshold", _FLOAT, 1.0, "host_receive_threshold"),
    _f("disaggregation-decode-extra-slots", _INT, fact="decode_extra_slots"),
    _f(
        "disaggregation-decode-allocation-policy",
        default="early",
        fact="allocation_policy",
        choices="early prefill_complete",
    ),
    _f("disaggregation-enable-kv-checksum", _SWITCH, fact="kv_checksum"),
    _f("enable-pd-role-switch", _SWITCH, fact="pd_role_switch"),
    _f("optimistic-prefill-attempts", _INT, 0, "optimistic_prefill"),
    _f("sampling-mask-max-tokens", _INT, 4096, "sampling_mask_max_tokens"),
    _f("enable-lmcache", _SWITCH, fact="lmcache"),
    _f("enable-pdmux", _SWITCH, fact="pdmux"),
    _f("enable-response-store", _SWITCH, fact="response_store"),
    _f("enable-watermark", _SWITCH, fact="watermark"),
    _f("dllm-algorithm", fact="dllm_algorithm", unset=""),
    # The server.
    _f("host", default="127.0.0.1", fact="host"),
    _f("port", _INT, 30000, "port"),
    _f("served-model-name"),
    _f("config"),
    Flag(("-h", "--help"), _SWITCH, "help", False),
)


def _others() -> tuple[Flag, ...]:
    rows = []
    for kind, text in OTHER.items():
        for row in text.split():
            names, _, dest = row.partition(">")
            spelled = tuple("--" + n for n in names.split(","))
            rows.append(Flag(spelled, kind, dest or spelled[0][2:].replace("-", "_")))
    return tuple(rows)


OTHERS: tuple[Flag, ...] = _others()
"""The flags that no rule of fit reads. They matter for what an abbreviation means and which flag takes a value."""

BY_DEST: dict[str, Flag] = {f.dest: f for f in (*OTHERS, *FLAGS)}
DERIVED = frozenset(
    {
        "disaggregation_mode",
        "disaggregation_transfer_backend",
        "dsa_prefill_backend",
        "dsa_decode_backend",
        "enable_hisparse",
        "max_total_tokens",
        "config",
    }
)
"""Settings that `facts.py` reads in a way of its own."""

PLACEMENT = frozenset({"nnodes", "base_gpu_id", "gpu_id_step", "use_ray"})
"""Settings that say which GPU a rank has. They tell facts, but only a device for each GPU (rule H3) hangs on them: a
value that nobody knows here hides nothing else."""


def is_read(dest: str) -> bool:
    """Whether rules of fit hang on this setting (PLACEMENT aside)."""
    flag = BY_DEST.get(dest)
    return flag is not None and dest not in PLACEMENT and (bool(flag.fact) or dest in DERIVED)
