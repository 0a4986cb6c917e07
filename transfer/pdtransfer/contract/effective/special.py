"""Models whose choices are more than one attention backend: split backends, prefix caches, a backend forced last.

Formulas: sglang.srt.arg_groups.model_overrides (iquest_q1, kimi_k3, minicpm, moss_vl, qwen3_vl, embedding_gemma2),
arg_groups.attention_hook.handle_attention_backend_compatibility, model_hook.handle_model_capability_adjustments.
"""

from __future__ import annotations

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.effective.models import (
    EMBEDDING_GEMMA2,
    IQUEST,
    KIMI_K3,
    MINICPM,
    MOSS_VL,
    QWEN3_VL,
    WHISPER,
)
from pdtransfer.contract.effective.rewrite import Draft
from pdtransfer.contract.families import is_hrm_text

_MODELS = "arg_groups/model_overrides"
_DENSE = {"minicpm_flashattn", "minicpm_flashinfer"}
_SPLITS = ("prefill_attention_backend", "decode_attention_backend")


def split_backends(d: Draft) -> None:
    """Backends that a model gives prefill and decode steps apart. Before its choice for both."""
    name = d.geometry.architecture if d.geometry else None
    if name in IQUEST:
        _iquest(d)
    elif name == MOSS_VL and _none_set(d):
        _set(d, "prefill_attention_backend", "flashinfer", "Moss-VL's prefill needs it", "moss_vl")
    elif name == KIMI_K3:
        _kimi_k3(d)
    elif name in QWEN3_VL:
        _qwen3_vl(d)
    elif name in MINICPM and d.now.minicpm_force_dense:
        _minicpm_dense(d)


def _set(d: Draft, field: str, value: str | None, why: str, module: str) -> None:
    d.set("B2", field, value, why, f"{_MODELS}/{module}.py")


def _none_set(d: Draft) -> bool:
    return not any(getattr(d.now, f) for f in ("attention_backend", *_SPLITS))


def _iquest(d: Draft) -> None:
    """fa3 and nothing else: the two that are not set, where one of them is."""
    if d.now.attention_backend == "" and not _none_set(d):
        for field in _SPLITS:
            if getattr(d.now, field) == "":
                _set(d, field, "fa3", "IQuest-Q1 needs it for both", "iquest_q1")


def _kimi_k3(d: Draft) -> None:
    if d.now.dcp_size > 1:
        # Which ones it takes hangs on the version of FlashInfer, or of aiter, in the image.
        for field in _SPLITS:
            _set(d, field, None, "Kimi-K3 with decode context parallelism has backends of its own", "kimi_k3")
    elif d.accelerator is Accelerator.SM100 and _none_set(d):
        for field in _SPLITS:
            _set(d, field, "trtllm_mla", f"Kimi-K3 on {d.accelerator.value}", "kimi_k3")


def _qwen3_vl(d: Draft) -> None:
    """GPUs of this generation with less than 60 GiB keep the common choice; nothing tells how much this one has."""
    if d.accelerator is Accelerator.SM90 and not d.now.attention_backend and not d.now.decode_attention_backend:
        _set(d, "decode_attention_backend", None, "flashinfer on GPUs of 60 GiB or more", "qwen3_vl")


def _minicpm_dense(d: Draft) -> None:
    blackwell = d.accelerator in (Accelerator.SM100, Accelerator.SM120)
    for field in ("attention_backend", *_SPLITS):
        asked = getattr(d.now, field)
        if asked in _DENSE:
            dense = "flashinfer" if asked == "minicpm_flashinfer" else "fa4" if blackwell else "fa3"
            _set(d, field, dense, "SGLANG_MINICPM_FORCE_DENSE", "minicpm")


def prefix_cache(d: Draft) -> None:
    """Models that run without a prefix cache, and HRM-Text, which takes whole prompts."""
    geometry = d.geometry
    if geometry is None:
        return
    name = geometry.architecture
    hybrid = name in MINICPM and (geometry.minicpm_sparse or geometry.minicpm_lightning)
    if name in (EMBEDDING_GEMMA2, WHISPER) or hybrid or is_hrm_text(geometry):
        d.quietly(disable_radix_cache=True)
    if is_hrm_text(geometry):
        d.quietly(chunked_prefill_size=-1)


def forced_last(d: Draft) -> None:
    """HRM-Text's backend, which SGLang forces after the page size followed from another one."""
    if is_hrm_text(d.geometry) and d.now.attention_backend != "triton":
        source = "arg_groups/model_hook.py handle_model_capability_adjustments"
        d.set("B2", "attention_backend", "triton", "HRM-Text attends to its prompt in both directions", source)
