"""Parts of abcd_driver.py about how rows are laid out, and about models. Runs under SGLang's own Python."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from abcd_state import PAGE, bare
from sglang.srt.arg_groups import deepseek_v4_hook, overrides
from sglang.srt.configs import model_config
from sglang.srt.configs.mamba_utils import mamba2_state_dtype
from sglang.srt.configs.minicpm import MiniCPMHybridConfig
from sglang.srt.disaggregation import prefill as prefill_queue
from sglang.srt.disaggregation import utils as pd_utils
from sglang.srt.environ import envs
from sglang.srt.layers.attention.qsa.config import is_qwen_qsa
from sglang.srt.mem_cache import deepseek_v4_memory_pool as v4_pool
from sglang.srt.mem_cache import kv_cache_configurator as configurator
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool


def rows(case: dict[str, Any]) -> dict[str, Any]:
    """Bytes of one token's row of a DSA model in fp8, on one role."""
    kernel = SimpleNamespace(dsa_prefill_backend=case["prefill"], dsa_decode_backend=case["decode"])
    config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=64),
        kv_lora_rank=512,
        qk_rope_head_dim=64,
    )
    with (
        mock.patch.object(configurator, "get_disagg", lambda: SimpleNamespace(disaggregation_mode=case["role"])),
        mock.patch.object(configurator, "get_exec", lambda: SimpleNamespace(kernel=kernel)),
        mock.patch.object(configurator, "_is_hip", case.get("hip", False)),
    ):
        return {
            "bytes": configurator.calculate_mla_kv_cache_dim(model_config=config, kv_cache_dtype=torch.float8_e4m3fn)
        }


def v4_layouts(case: dict[str, Any]) -> dict[str, Any]:
    """The main layout of a DeepSeek-V4 pool, from the flag, the variable and the GPU."""
    sm100 = case["major"] == 10
    backend = case["backend"]
    asked = case["layout"]
    cfg = SimpleNamespace(device="cuda", kv_cache_dtype=case.get("dtype", "fp8_e4m3"), disaggregation_mode="prefill")
    config = SimpleNamespace(hf_config=SimpleNamespace(model_type=case["model_type"]))
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (case["major"], 0)),
        mock.patch("sglang.srt.utils.common.is_sm100_supported", lambda *_: sm100),
        mock.patch.object(deepseek_v4_hook, "resolving_view", lambda _: cfg),
        mock.patch.object(deepseek_v4_hook, "model_config_of", lambda _: config),
        envs.SGLANG_DSV4_KV_LAYOUT.override(asked) if asked else mock.MagicMock(),
    ):
        if backend == "auto":
            backend = deepseek_v4_hook._default_dsv4_attention_backend(None)
        kernel = SimpleNamespace(dsv4_attn_backend=backend)
        with mock.patch.object(v4_pool, "get_exec", lambda: SimpleNamespace(kernel=kernel)):
            try:
                layout, _ = v4_pool.select_dsv4_kv_layout()
            except AssertionError as refused:
                return {"refused": str(refused)}
    return {"layout": layout.value}


def auto_dtype(case: dict[str, Any]) -> dict[str, Any]:
    """What KV dtype 'auto' becomes for a DSA model."""
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=64))
    view = SimpleNamespace(kv_cache_dtype="auto", dsa_prefill_backend=None, dsa_decode_backend=None)
    with (
        mock.patch.object(overrides, "model_config_of", lambda _: config),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (case["major"], 0)),
    ):
        return {"dtype": overrides._dsa_kv_cache_dtype_default(view)["kv_cache_dtype"]}


def head_by_head(case: dict[str, Any]) -> dict[str, Any]:
    """Whether a pool laid out head by head can be registered."""
    cls = {"MHA": memory_pool.MHATokenToKVPool, "MLA": memory_pool.MLATokenToKVPool}[case["pool"]]
    buffer = torch.zeros(4, 2)
    pool = bare(
        cls,
        use_hnd=True,
        kv_buffer=[buffer],
        k_buffer=[],
        v_buffer=[],
        _kv_buffer_descs=[],
        layer_num=1,
        page_size=1,
        data_ptrs=None,
    )
    try:
        pool.get_contiguous_buf_infos()
    except AssertionError as refused:
        return {"refused": str(refused)}
    return {"registered": True}


def families(case: dict[str, Any]) -> dict[str, Any]:
    """SGLang's own questions about a config.json."""
    text = case["config"].get("text_config", case["config"])
    inner = SimpleNamespace(**text)
    outer = SimpleNamespace(**(case["config"] | ({"text_config": inner} if "text_config" in case["config"] else {})))
    answer = {
        "v4": model_config.is_deepseek_v4(outer),
        "m3": model_config.is_minimax_sparse(outer),
        "qsa": is_qwen_qsa(outer),
        "ssm": str(mamba2_state_dtype(outer).temporal).removeprefix("torch."),
    }
    if answer["m3"]:
        sparse = model_config.get_minimax_sparse_attention_config(outer)
        _, layers = model_config.get_minimax_sparse_layer_ids(sparse)
        answer["index_values"] = bool(
            set(layers) - set(model_config.get_minimax_sparse_disable_value_layer_ids(sparse))
        )
    if "MiniCPM" in case["config"]["architectures"][0]:
        known = {k: v for k, v in case["config"].items() if k in ("num_hidden_layers", "mixer_types", "sparse_config")}
        # Lightning layers want as many KV heads as heads (32 by default there).
        answer["minicpm"] = MiniCPMHybridConfig(num_key_value_heads=32, **known).has_minicpm_sparse_attention
    return answer


def index_value_pool(case: dict[str, Any]) -> dict[str, Any]:
    """Whether a MiniMax-M3 pool with index values is taken for transfer."""
    pool = bare(memory_pool.MiniMaxSparseKVPool, index_kv_pool=object() if case["values"] else None, index_k_pool=None)
    pool.get_dense_kv_state_buf_infos = lambda: ([], [], [])
    try:
        pd_utils.setup_state_kv_args(SimpleNamespace(), pool)
    except NotImplementedError as refused:
        return {"refused": str(refused)}
    return {"taken": True}


def window_pool(case: dict[str, Any]) -> dict[str, Any]:
    """The layer from which a pool of full and sliding layers counts, in a later pipeline stage."""
    pool = SWAKVPool(
        size=32,
        size_swa=32,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=1,
        head_dim=8,
        full_attention_layer_ids=case["full"],
        swa_attention_layer_ids=case["sliding"],
        device="cpu",
    )
    first = prefill_queue._transfer_start_layer(pool=pool, hf_text_config=None)
    return {"first": first, "entries": len(pool.get_contiguous_buf_infos()[0])}


PARTS = {
    "rows": rows,
    "v4_layouts": v4_layouts,
    "auto_dtype": auto_dtype,
    "head_by_head": head_by_head,
    "families": families,
    "index_value_pool": index_value_pool,
    "window_pool": window_pool,
}
