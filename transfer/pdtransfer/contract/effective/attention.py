"""Which attention backend a role uses where the user set none (rule B2 hangs on it).

Formulas: sglang.srt.arg_groups.overrides._attention_backend_default, model_override_base.get_default_attn_backend
and the functions in model_overrides. A backend that can not be worked out is None.
"""

from __future__ import annotations

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.effective.models import (
    BASE_UNSET,
    GRANITE,
    KIMI_K3,
    NEMOTRON,
    NONE_SET,
    QWEN_HYBRID,
    SINKS,
    SINKS_UNTOLD,
    TRITON_TO_BE_DETERMINISTIC,
    WHISPER,
    is_step3p,
)
from pdtransfer.contract.effective.rewrite import Draft
from pdtransfer.contract.effective.special import split_backends
from pdtransfer.contract.families import MLA_ON_TRTLLM, is_deepseek_v4, is_dsa, is_minimax_m3
from pdtransfer.contract.geometry import ModelGeometry

_SOURCE = "arg_groups/overrides.py _attention_backend_default"
_MODELS = "arg_groups/model_overrides"
_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def attention(d: Draft) -> None:
    """Fill attention_backend as SGLang does: the model's own choice, then the common one."""
    if any(getattr(d.now, name) is None for name in _BACKENDS):
        return
    if is_deepseek_v4(d.geometry):
        d.set("B2", "attention_backend", "dsv4", "DeepSeek-V4 has kernels of its own", f"{_MODELS}/deepseek_v4.py")
        return
    split_backends(d)
    chosen = _of_model(d)
    if chosen is not None:
        if chosen:
            d.set("B2", "attention_backend", chosen, f"this model's choice on {d.accelerator.value}", _MODELS)
        else:
            d.set("B2", "attention_backend", None, "this model has a choice of its own", _MODELS)
    prefill, decode = d.now.prefill_attention_backend, d.now.decode_attention_backend
    if prefill and prefill == decode:
        d.set("B2", "attention_backend", prefill, "prefill and decode backends are the same", _SOURCE)
    elif d.now.attention_backend == "":
        backend = _deterministic(d) if d.now.deterministic else _common(d)
        d.keeps_pages = backend is None and _plain(d)
        d.set("B2", "attention_backend", backend, f"the common choice on {d.accelerator.value}", _SOURCE)
    if d.now.attention_backend == "fa3" and d.now.kv_dtype == "fp8_e5m2":
        why = "fa3 has no fp8_e5m2"
        d.set("B2", "attention_backend", "triton", why, "arg_groups/overrides.py _attention_backend_fa3_fp8_fallback")


def _none_set(d: Draft) -> bool:
    """None of the three backends is set."""
    return not any(getattr(d.now, name) for name in _BACKENDS)


def _of_model(d: Draft) -> str | None:
    """The model's own backend; '' where it has one that is not known here, None where it has none."""
    geometry, chip = d.geometry, d.accelerator
    if d.now.attention_backend or geometry is None:
        return None
    name = geometry.architecture or ""
    if is_dsa(geometry):
        return "dsa" if _none_set(d) else None
    if geometry.minicpm_sparse and not d.now.minicpm_force_dense and _none_set(d):
        blackwell = chip in (Accelerator.SM100, Accelerator.SM120)
        return "minicpm_flashinfer" if blackwell else "minicpm_flashattn"
    if name == KIMI_K3 and d.now.dcp_size > 1:
        return ""
    if name == GRANITE:
        return "flashinfer" if geometry.linear_layers and chip is Accelerator.SM100 else None
    if is_step3p(name) and _none_set(d):
        return {Accelerator.SM90: "fa3", Accelerator.SM100: "fa4", Accelerator.SM120: "fa4"}.get(chip)
    if name in MLA_ON_TRTLLM:
        return "trtllm_mla" if chip is Accelerator.SM100 and _none_set(d) else None
    if is_minimax_m3(geometry):
        return _minimax_m3(d) if _none_set(d) else None
    if name in QWEN_HYBRID:
        return _qwen_hybrid(d, geometry)
    if name in NEMOTRON:
        return _nemotron(d) if _none_set(d) else None
    if name in NONE_SET:
        return NONE_SET[name].get(chip) if _none_set(d) else None
    return BASE_UNSET[name].get(chip) if name in BASE_UNSET else None


def _minimax_m3(d: Draft) -> str | None:
    if d.accelerator is Accelerator.SM100:
        return "trtllm_mha" if d.now.kv_dtype == "fp8_e4m3" else "fa4"
    return {Accelerator.ROCM: "triton", Accelerator.SM90: "fa3"}.get(d.accelerator)


def extra_buffer(d: Draft) -> bool | None:
    """Whether recurrent state is cached with an extra buffer, as far as SGLang knows it when it chooses the
    backend: `auto` is settled later and counts as no. None where it is not known.
    (model_override_base.mamba_extra_buffer_of)"""
    if d.now.disable_radix_cache:
        return False
    strategy = d.now.mamba_cache_strategy
    return None if strategy is None else strategy.startswith("extra_buffer")


def _qwen_hybrid(d: Draft, geometry: ModelGeometry) -> str | None:
    if d.accelerator is not Accelerator.SM100:
        return None
    algorithm = d.now.speculative_algorithm
    buffered = extra_buffer(d)
    if algorithm is None or buffered is None:
        return ""
    if _common(d) != "trtllm_mha":
        return "triton"
    plain = not buffered and not d.now.disable_radix_cache and not algorithm
    return "triton" if plain else "trtllm_mha"


def _nemotron(d: Draft) -> str | None:
    if d.accelerator not in (Accelerator.SM100, Accelerator.SM120):
        return None
    algorithm = d.now.speculative_algorithm
    if algorithm is None:
        return ""
    on_sm100 = d.accelerator is Accelerator.SM100
    if not algorithm:
        return "trtllm_mha" if on_sm100 else None
    return "trtllm_mha" if on_sm100 and d.now.speculative_eagle_topk in (None, 1) else "triton"


def _deterministic(d: Draft) -> str | None:
    """--enable-deterministic-inference. (overrides._deterministic_attention_backend)"""
    if d.geometry is None or d.geometry.architecture is None:
        return None
    if d.accelerator in (Accelerator.SM100, Accelerator.SM120):
        return "triton" if d.geometry.architecture in TRITON_TO_BE_DETERMINISTIC else "flashinfer"
    return "fa3"


def _common(d: Draft) -> str | None:
    """get_default_attn_backend: by attention kind and accelerator; None when it is not known."""
    geometry, chip, now = d.geometry, d.accelerator, d.now
    if geometry is None or geometry.architecture is None:
        return None  # Any model might have a choice of its own.
    if geometry.architecture == WHISPER:
        return "flashinfer"
    if chip is Accelerator.CPU:
        return None  # By whether the CPU has AMX; nothing here depends on it.
    if geometry.latent:
        if chip is Accelerator.ROCM:
            return None  # aiter or triton, by the number of query heads.
        return {Accelerator.SM90: "fa3", Accelerator.SM100: "flashinfer"}.get(chip, "triton")
    algorithm, topk = now.speculative_algorithm, now.speculative_eagle_topk
    if algorithm is None:
        return None
    linear = topk is None or (topk == 1 and now.page_size in (None, 1))
    if chip is Accelerator.SM90 and linear:
        return "fa3"
    if chip is Accelerator.SM100 and linear and (not algorithm or topk is not None or algorithm.upper() == "DFLASH"):
        return "fa4" if asymmetric(geometry) else "trtllm_mha"
    if chip is Accelerator.ROCM:
        return "aiter"
    if geometry.architecture in SINKS_UNTOLD and geometry.attention_sinks is None:
        return None
    return "triton" if geometry.architecture in SINKS or geometry.attention_sinks else "flashinfer"


def _plain(d: Draft) -> bool:
    """The backend that can not be told is one of those that take pages of any size: aiter or triton, flashinfer or
    triton, or a CPU's."""
    if d.accelerator is Accelerator.CPU:
        return True
    geometry = d.geometry
    if geometry is None or geometry.architecture is None:
        return False
    if geometry.latent:
        return d.accelerator is Accelerator.ROCM
    untold = geometry.architecture in SINKS_UNTOLD and geometry.attention_sinks is None
    return untold and d.accelerator not in (Accelerator.SM90, Accelerator.SM100)


def asymmetric(geometry: ModelGeometry) -> bool:
    """K and V heads differ in width, in full or in sliding layers (MiMo-V2)."""
    k = geometry.swa_head_dim or geometry.head_dim
    v = geometry.swa_v_head_dim or geometry.v_head_dim or k
    return geometry.head_dim != geometry.value_dim or k != v
