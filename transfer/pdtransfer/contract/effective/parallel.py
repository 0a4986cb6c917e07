"""Data and context parallelism within attention, where SGLang sets the sizes itself (rules A1, A12, A13).

Formulas: sglang.srt.arg_groups.parallel_hook.handle_deprecated_dp_attention, model_overrides/deepseek_v2.py,
deepseek_v4_hook.validate_deepseek_v4_cp.
"""

from __future__ import annotations

from pdtransfer.contract.effective.rewrite import Draft
from pdtransfer.contract.families import MLA_ON_TRTLLM, is_deepseek_v4, is_dsa


def attention_dp(d: Draft) -> None:
    """The legacy spelling --dp-size N --enable-dp-attention."""
    now = d.now
    if not now.dp_attention_flag:
        return
    if now.attention_data_parallel == 1 and now.data_parallel > 1:
        width = now.data_parallel
        why = f"attention DP {width}, attention TP {now.attention_tp or 'not whole'}"
        source = "arg_groups/parallel_hook.py handle_deprecated_dp_attention"
        asked = f"--dp-size {width} --enable-dp-attention"
        d.set("A1", "attention_data_parallel", width, why, source, asked)
        d.quietly(data_parallel=1)
    d.quietly(dp_attention_flag=False)


def prefill_cp(d: Draft) -> None:
    """--enable-prefill-cp of DeepSeek's kin: context parallelism over all of attention TP, whatever was asked for."""
    geometry, now = d.geometry, d.now
    if not now.prefill_cp or geometry is None:
        return
    sparse = is_dsa(geometry)
    if not sparse and not is_deepseek_v4(geometry) and not (geometry.latent and geometry.architecture in MLA_ON_TRTLLM):
        return
    width = now.attention_data_parallel * now.data_parallel
    keeps = sparse and now.cp_strategy == "interleave" and now.context_parallel > 1
    why, source = "--enable-prefill-cp with this model", "arg_groups/model_overrides/deepseek_v2.py"
    if now.data_parallel > 1:
        d.set("A1", "attention_data_parallel", width, why, source)
        d.quietly(data_parallel=1)
    if not keeps and now.tensor_parallel % width == 0:
        d.set("A13", "context_parallel", now.tensor_parallel // width, why, source)
