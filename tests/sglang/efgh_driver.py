"""Runs under SGLang's own Python: functions of SGLang that decide rules E5, F4, G6, H3, H9, H12 and H14 without a GPU.

Reads a JSON object of lists of arguments from stdin, writes the answers in the same shape: a value, or
{"error": text} where SGLang raises.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
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


def gpus(tp: int, pp: int, replicas: int, nodes: int, base: int, step: int, one: bool) -> list[int]:
    """H3: the GPU number that each rank of node 0 is started with, by SGLang's own launchers."""
    from sglang.srt.entrypoints import engine
    from sglang.srt.environ import envs
    from sglang.srt.managers import data_parallel_controller as controller
    from sglang.srt.platforms.cuda import CudaDeviceMixin
    from sglang.srt.utils import common

    started: list[int] = []
    sizes = {"tp_size": tp, "pp_size": pp, "nnodes": nodes, "node_rank": 0, "num_dp_ranks": replicas}
    plain = {"attn_dp_enabled": False, "moe_dp_size": 1, "ep_size": 1, "ep_join_rank_offset": 0}
    parallel = SimpleNamespace(**sizes, **plain)
    moe = SimpleNamespace(ep_join_mode=None, elastic_ep_backend=None, is_ep_joiner=False, is_ep_scale_joiner=False)
    running = SimpleNamespace(moe=moe, features=SimpleNamespace(enable_memory_saver=False))

    class Process:
        pid = 1

        def __init__(self, target: Any, args: tuple[Any, ...] = (), **_: Any) -> None:
            self.gpu = args[2]

        def start(self) -> None:
            started.append(self.gpu)

    stand_ins: dict[str, Any] = {
        "get_parallel": lambda: parallel,
        "get_device": lambda: SimpleNamespace(base_gpu_id=base, gpu_id_step=step),
        "get_exec": lambda: running,
        "mp": SimpleNamespace(Process=Process, Pipe=lambda duplex: (mock.MagicMock(), mock.MagicMock())),
        "numa_utils": SimpleNamespace(configure_subprocess=lambda *_: nullcontext()),
        "TorchMemorySaverAdapter": mock.MagicMock(),
    }
    with ExitStack() as stack:
        for module in (engine, controller):
            for name, value in stand_ins.items():
                stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(mock.patch.object(common, "current_platform", CudaDeviceMixin()))
        stack.enter_context(envs.SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS.override(one))
        if replicas == 1:
            engine.Engine._launch_scheduler_processes(None, None, None)
        else:
            _replicas(controller, stack)
    return sorted(started)


def _replicas(controller: Any, stack: ExitStack) -> None:
    """Start all replicas, one after the other."""
    own = controller.DataParallelController.__new__(controller.DataParallelController)
    own.__dict__.update(
        env_lock=nullcontext(), scheduler_procs=[], local_kv_event_sources=[], prelaunched_schedulers=None,
        attn_replica_size=1, run_scheduler_process_func=None, workers=[None] * 64, context=None,
    )  # fmt: skip
    stack.enter_context(mock.patch.object(controller.DataParallelController, "_record_scheduler_init_infos"))
    for name in ("PortArgs", "bind_port", "get_zmq_socket"):
        stack.enter_context(mock.patch.object(controller, name, mock.MagicMock()))
    stack.enter_context(mock.patch.object(controller, "physical_ep_rank_to_dp_rank", lambda *_: 0))

    def launch(target: Any, args: tuple[Any, ...]) -> Any:
        server, ports, first, rank, ready = args
        own.launch_tensor_parallel_group(server, ports, first, rank)
        ready.set()
        return mock.MagicMock()

    stack.enter_context(mock.patch.object(controller.threading, "Thread", launch))
    own.launch_dp_schedulers(None, mock.MagicMock())


def lookups(text: str, gpu: int) -> str | None:
    """H3: the names that SGLang finds for one GPU, for NIXL and for Mooncake alike."""
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import get_ib_devices_for_gpu

    found: str | None = get_ib_devices_for_gpu(text, gpu)
    return found


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
    "gpus": gpus,
    "lookups": lookups,
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
