"""An SGLang plugin for tests only: SGLang's stock `nixl` backend says that its KV pool is DRAM.

On a CPU the pool is host memory, but SGLang 0.5.23 tells NIXL that it is device memory, and UCX without CUDA refuses
it. With this the stock backend moves KV on a CPU at equal TP; nothing else of it is changed. What is measured with it
is labelled `nixl + DRAM hook`.
"""

from __future__ import annotations

from typing import Any

NAME = "pdcluster-test-nixl-dram"


def _say_dram(manager: Any, args: Any, *rest: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)
    return (manager, args, *rest), named


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__", _say_dram, HookType.BEFORE)
