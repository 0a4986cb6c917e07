"""KV dtype `auto`, and the DSA kernels that decide how a row is laid out (rules B5, B6).

Formulas: sglang.srt.arg_groups.overrides._dsa_kv_cache_dtype_default, _dsa_split_backend_resolution,
_deepseek_v4_kv_cache_dtype.
"""

from __future__ import annotations

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.effective.models import DTYPE_IS_BFLOAT16, MUSE_SPARK
from pdtransfer.contract.effective.rewrite import Draft
from pdtransfer.contract.facts import HostKVMode
from pdtransfer.contract.families import is_deepseek_v4, is_dsa
from pdtransfer.contract.geometry import is_fp8

_OVERRIDES = "arg_groups/overrides.py"
_SINKS = frozenset({"HYV4ForCausalLM", "HYV4ForCausalLMNextN"})
"""May have learnable sinks, which decide both."""
_BLACKWELL = 10


def kv_dtype(d: Draft) -> None:
    """What `auto` (the default) becomes. Other models keep it: it then means the model's dtype."""
    d.fill(kv_dtype="auto", model_dtype="auto")
    d.quietly(model_dtype=_model_dtype(d))
    if is_deepseek_v4(d.geometry):
        if d.now.kv_dtype == "auto":
            why = "DeepSeek-V4 keeps its KV in fp8"
            d.set("B5", "kv_dtype", "fp8_e4m3", why, f"{_OVERRIDES} _deepseek_v4_kv_cache_dtype")
        return
    if d.now.kv_dtype == "auto" and d.geometry is not None and d.geometry.architecture == MUSE_SPARK:
        d.set("B5", "kv_dtype", "fp8_e4m3", "Muse Spark keeps its KV in fp8", f"{_OVERRIDES} _muse_spark_overrides")
    if not _dsa_on_gpu(d):
        return
    source = f"{_OVERRIDES} _dsa_kv_cache_dtype_default"
    if d.now.kv_dtype == "bf16":
        d.set("B5", "kv_dtype", "bfloat16", "DSA spells it out", source)
    if d.now.kv_dtype != "auto":
        return
    if _sinks_untold(d):
        d.set("B5", "kv_dtype", None, "bfloat16 if the model has attention sinks", source)
        return
    blackwell = d.accelerator.major >= _BLACKWELL and not _sinks(d)
    why = f"DSA on {d.accelerator.value}"
    d.set("B5", "kv_dtype", "fp8_e4m3" if blackwell else "bfloat16", why, source)


_SPELLED = {"half": "float16", "float": "float32"}


def _model_dtype(d: Draft) -> str | None:
    """The dtype that --dtype names, spelled out; `auto` stays where the model's own is not known.
    (configs/model_config.py _get_and_verify_dtype)"""
    if d.geometry is not None and d.geometry.architecture in DTYPE_IS_BFLOAT16:
        return "bfloat16"
    asked = d.now.model_dtype
    own = d.geometry.dtype if d.geometry else None
    if asked != "auto" or own is None:
        return _SPELLED.get(asked or "", asked)
    own = _SPELLED.get(own, own)
    if own != "float32":
        return own
    gemma = d.geometry is not None and (d.geometry.model_type or "").startswith("gemma")
    return "bfloat16" if gemma else "float16"


def dsa_backend(d: Draft) -> None:
    """The kernels of this role, --dsa-prefill-backend or --dsa-decode-backend, where none is set."""
    if not _dsa_on_gpu(d) or not d.unset("dsa_backend") or d.now.kv_dtype is None or _sinks_untold(d):
        return
    chosen = _kernels(d, is_fp8(d.now.kv_dtype))
    why = f"DSA with {d.now.kv_dtype} on {d.accelerator.value}"
    d.set("B6", "dsa_backend", chosen, why, f"{_OVERRIDES} _dsa_split_backend_resolution")


def _kernels(d: Draft, fp8: bool) -> str:
    if _sinks(d):
        return "flashmla_sparse"
    chip, blackwell = d.accelerator, d.accelerator.major >= _BLACKWELL
    architecture = d.geometry.architecture if d.geometry else None
    if architecture == "GlmMoeDsaForCausalLM" and chip is Accelerator.SM120 and fp8:
        return "flashinfer_sparse_mla"
    if d.now.host_kv is HostKVMode.HISPARSE:
        if chip is Accelerator.ROCM:
            return "tilelang"
        return "flashmla_kv" if fp8 else "flashmla_sparse"
    if chip is Accelerator.ROCM:
        return "triton"
    if fp8:
        return "trtllm" if blackwell else "flashmla_kv"
    if d.prefill:
        return "flashmla_sparse"
    return "trtllm" if blackwell else "fa3"


def _dsa_on_gpu(d: Draft) -> bool:
    return is_dsa(d.geometry) and d.accelerator is not Accelerator.CPU


def _sinks(d: Draft) -> bool:
    return d.geometry is not None and bool(d.geometry.attention_sinks)


def _sinks_untold(d: Draft) -> bool:
    return d.geometry is not None and d.geometry.architecture in _SINKS and d.geometry.attention_sinks is None
