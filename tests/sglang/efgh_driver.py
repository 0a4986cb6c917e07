"""Runs under SGLang's own Python: functions of SGLang that decide rules E5, F4, G6, H3, H9, H12 and H14 without a GPU.

Reads a JSON object of lists of arguments from stdin, writes the answers in the same shape: a value, or
{"error": text} where SGLang raises.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock


def staging(p: int, d: int, heads: int, tokens: int, head_bytes: int, layers: int) -> int:
    """G6: bytes of one chunk in one decode rank's ring."""
    from sglang.srt.disaggregation.common.staging_buffer import compute_staging_layout

    return int(compute_staging_layout(p, d, 0, heads, tokens, head_bytes, layers)[2])


def devices(text: str) -> str | None:
    """H3: UCX's device list of GPU 0, by the function that NIXL's manager calls."""
    from sglang.srt.disaggregation.nixl.conn import _resolve_ucx_device_list

    return _resolve_ucx_device_list(text, 0)


def retraction(
    pool: str, ssm: bool, dcp: bool, radix: bool, offload: bool, priority: bool, keep: bool, hicache: bool, tokens: int
) -> dict[str, Any]:
    """E5: backup and ratio of a decode server, by SGLang's own function; its pool and configuration are stand-ins."""
    from sglang.srt.mem_cache import kv_cache_builder as builder
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    kind = {"mha": MHATokenToKVPool, "mla": MLATokenToKVPool}[pool]
    cache = kind.__new__(kind)
    cache.size, cache.page_size = tokens, 64
    told: dict[str, Any] = {}
    worker = SimpleNamespace(
        is_hybrid_swa=False,
        get_memory_pool=lambda: (SimpleNamespace(max_context_len=8192), SimpleNamespace(get_kvcache=lambda: cache)),
        model_runner=SimpleNamespace(mtp_draft_device_pools=[], spec_algorithm=None, model_config=None),
    )
    disagg = SimpleNamespace(
        disaggregation_decode_retraction_backup=None,
        disaggregation_mode="decode",
        disaggregation_decode_enable_radix_cache=radix,
        disaggregation_decode_enable_offload_kvcache=offload,
        disaggregation_decode_host_receive_threshold=1.0,
    )
    memory = SimpleNamespace(
        enable_unified_memory=False, hicache_ratio=None, hicache_size=0, enable_hierarchical_cache=hicache
    )
    schedule = SimpleNamespace(enable_priority_scheduling=priority, disable_priority_preemption=keep)
    context = SimpleNamespace(override=lambda _source, **fields: told.update(fields))
    stand_ins = {
        "get_disagg": disagg,
        "get_memory": memory,
        "get_schedule": schedule,
        "get_parallel": SimpleNamespace(dcp_enabled=dcp),
        "get_context": context,
    }
    with ExitStack() as stack:
        for name, value in stand_ins.items():
            stack.enter_context(mock.patch.object(builder, name, lambda value=value: value))
        stack.enter_context(mock.patch.object(builder, "uses_ssm_state", lambda _config: ssm))
        backup = builder.resolve_decode_retraction_backup(tp_worker=worker)
    return {"backup": backup, "ratio": told.get("hicache_ratio")}


def logprobs() -> int:
    """H12: entries of top_logprobs in a row of metadata."""
    import torch
    from sglang.srt.disaggregation.utils import MetadataBuffers

    buffers = MetadataBuffers(1, hidden_size=8, hidden_states_dtype=torch.float32, max_sampling_mask_tokens=1)
    return int(buffers.output_top_logprobs_val.shape[1])


PARTS: dict[str, Callable[..., Any]] = {
    "staging": staging,
    "devices": devices,
    "retraction": retraction,
    "logprobs": logprobs,
}


def answer(part: str, arguments: list[Any]) -> Any:
    try:
        return PARTS[part](*arguments)
    except Exception as refused:  # whatever SGLang raises is its answer
        return {"error": f"{type(refused).__name__}: {refused}"}


def main() -> None:
    logging.disable(logging.CRITICAL)
    asked = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr  # SGLang prints
    json.dump({part: [answer(part, one) for one in calls] for part, calls in asked.items()}, out)


if __name__ == "__main__":
    main()
