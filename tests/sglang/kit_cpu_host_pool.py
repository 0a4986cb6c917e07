"""An SGLang plugin for tests only: SGLang's host pools work where there is no GPU.

SGLang 0.5.23 pins their memory through the CUDA runtime (mem_cache/pool_host/common.py, `_cuda_host_register`), and
copies between them and the KV pool with kernels that no CPU build has. With this the memory is not pinned and torch
copies; which pages go where, and all that a transfer backend sees of it, stays SGLang's. What is run with it is
labelled `host pool hook`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NAME = "pdcluster-test-cpu-host-pool"
POOL = "sglang.srt.mem_cache.pool_host"


def _not_pinned(original: Callable[..., None], buffer: Any, registration_granularity_bytes: int | None = None) -> None:
    """In place of `_cuda_host_register`."""


def _load(
    original: Callable[..., None],
    pool: Any,
    device_pool: Any,
    host_indices: Any,
    device_indices: Any,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """One layer's tokens from the host pool (`layer_first`) to the KV pool."""
    for device, host in ((pool.device_k_buffers, pool.k_buffer), (pool.device_v_buffers, pool.v_buffer)):
        device[layer_id][device_indices] = host[layer_id][host_indices]


def _back_up(
    original: Callable[..., None], pool: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str
) -> None:
    """All layers' tokens from the KV pool to the host pool."""
    for layer in range(len(pool.device_k_buffers)):
        for device, host in ((pool.device_k_buffers, pool.k_buffer), (pool.device_v_buffers, pool.v_buffer)):
            host[layer][host_indices] = device[layer][device_indices]


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    held = {
        f"{POOL}.common._cuda_host_register": _not_pinned,
        f"{POOL}.mha.MHATokenToKVPoolHost.load_to_device_per_layer": _load,
        f"{POOL}.mha.MHATokenToKVPoolHost.backup_from_device_all_layer": _back_up,
    }
    for target, hook in held.items():
        HookRegistry.register(target, hook, HookType.AROUND)
