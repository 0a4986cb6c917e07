"""The page size that a role really uses (rule B2).

Formulas: sglang.srt.arg_groups.overrides._mla_backend_page_constraints, _fa4_page_constraint,
_page_size_default, and the functions in model_overrides that set one.
"""

from __future__ import annotations

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.effective.models import DIFFUSION_GEMMA, NEMOTRON, QWEN3_VL, QWEN4, QWEN_HYBRID
from pdtransfer.contract.effective.rewrite import Draft
from pdtransfer.contract.families import is_deepseek_v4, is_dsa, is_minimax_m3

_OVERRIDES = "arg_groups/overrides.py"
DSA_PAGE = 64
V4_PAGE = 256
M3_PAGE = 128


def of_model(d: Draft, *, backend_was_unset: bool) -> None:
    """Page sizes that models bring along, whatever was asked for."""
    geometry, chip = d.geometry, d.accelerator
    if geometry is None:
        return
    if is_deepseek_v4(geometry):
        d.set("B2", "page_size", V4_PAGE, "DeepSeek-V4 has pages of 256", "arg_groups/model_overrides/deepseek_v4.py")
        return
    if is_dsa(geometry):
        source = "arg_groups/model_overrides/deepseek_v2.py"
        if chip is Accelerator.ROCM:
            d.set("B2", "page_size", None, "DSA on ROCm has pages of 64 or 1, by the kernels that are there", source)
        else:
            size = DSA_PAGE * geometry.index_pool
            d.set("B2", "page_size", size, f"DSA has pages of 64 x {geometry.index_pool}", source)
        return
    name = geometry.architecture or ""
    backend = d.now.attention_backend
    # These two look at their own choice of a backend, or at --attention-backend, not at the common choice.
    split = backend_was_unset and bool(d.now.prefill_attention_backend or d.now.decode_attention_backend)
    if is_minimax_m3(geometry) and d.unset("page_size") and not split:
        own = {Accelerator.SM100: ("fa4", "trtllm_mha"), Accelerator.SM90: ("fa3",)}.get(chip, ())
        if backend in own:
            why = f"MiniMax-M3 with {backend} has pages of 128"
            d.set("B2", "page_size", M3_PAGE, why, "arg_groups/model_overrides/minimax_m3.py")
    elif name in QWEN_HYBRID and chip is Accelerator.SM100 and backend_was_unset:
        size, why = (64, "trtllm_mha") if backend == "trtllm_mha" else (1, "triton")
        if backend is not None:
            d.set("B2", "page_size", size, f"{name} with {why}", "arg_groups/model_overrides/qwen3_5.py")
    elif name in NEMOTRON and _nemotron_speculates(d) and backend_was_unset and not split and d.unset("page_size"):
        source = "arg_groups/model_overrides/nemotron_h.py"
        d.set("B2", "page_size", 64, "Nemotron-H with speculation and trtllm_mha", source)

    elif name in QWEN3_VL and chip is Accelerator.ROCM and d.unset("page_size") and d.now.aiter_unified_attention:
        why = "Qwen3-VL with SGLANG_USE_AITER_UNIFIED_ATTN"
        d.set("B2", "page_size", 16, why, "arg_groups/model_overrides/qwen3_vl.py")
    if name == QWEN4 and geometry.compressed_index_heads:
        why = "the compressed index has pages of 64"
        d.set("B2", "page_size", 64, why, "arg_groups/model_overrides/qwen4_exp.py")


def _nemotron_speculates(d: Draft) -> bool:
    on_sm100 = d.accelerator is Accelerator.SM100 and d.now.attention_backend == "trtllm_mha"
    return on_sm100 and bool(d.now.speculative_algorithm)


def of_backend(d: Draft) -> None:
    """What the attention backends need, then the default of 1."""
    base, prefill, decode = (
        d.now.attention_backend,
        d.now.prefill_attention_backend,
        d.now.decode_attention_backend,
    )
    _snap(d, "flashmla", (base, decode), (64,))
    _snap(d, "trtllm_mla", (base, decode), (32, 64))
    _snap(d, "cutedsl_mla", (base, decode, prefill), (32, 64))
    _snap(d, "trtllm_mha", (base, decode, prefill), (16, 32, 64, 128))
    _snap(d, "hpc_ops", (base, decode, prefill), (64,))
    if "fa4" in (base, decode, prefill) and d.accelerator is Accelerator.SM100 and _fa4_is_ours(d):
        size = 1 if d.geometry is not None and d.geometry.architecture == DIFFUSION_GEMMA else 128
        why = f"fa4 on SM100 has pages of {size}"
        d.set("B2", "page_size", size, why, f"{_OVERRIDES} _fa4_page_constraint")
    if d.unset("page_size") and (base is not None or d.keeps_pages):
        # A backend that is not known might have set one.
        d.set("B2", "page_size", _default(d), "the engine's default", f"{_OVERRIDES} _page_size_default")


def _default(d: Draft) -> int:
    return 64 if d.accelerator is Accelerator.ROCM and d.now.aiter_kv_layout == "vectorized_5d" else 1


def _fa4_is_ours(d: Draft) -> bool:
    return d.geometry is not None and not d.geometry.latent and (d.now.speculative_eagle_topk or 0) <= 1


def _snap(d: Draft, name: str, backends: tuple[str | None, ...], sizes: tuple[int, ...]) -> None:
    """Pages of 64 where this backend is used and the size is none of `sizes`."""
    if name not in backends or d.now.page_size in sizes:
        return
    if d.now.page_size is None and not d.now.whole_command:
        return
    allowed = " or ".join(str(s) for s in sizes) if len(sizes) < 3 else f"one of {', '.join(str(s) for s in sizes)}"
    why = f"attention backend {name} needs pages of {allowed}"
    d.set("B2", "page_size", 64, why, f"{_OVERRIDES} _mla_backend_page_constraints")
