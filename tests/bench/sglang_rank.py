"""One rank of SGLang's own NIXL transfer classes, without the engine. Runs in SGLang's environment (hack/sglang).

SGLang refuses unequal TP to host memory; for measuring, that guard is removed here, and the result is labelled so. The
classes, their threads and their agent with its progress thread are SGLang's.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import sglang.srt.disaggregation.nixl.conn as nixl_conn
import torch
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
from sglang.srt.server_args import ServerArgs

DEADLINE = 60.0
ENDED = (KVPoll.Success, KVPoll.Failed)


@dataclass(frozen=True)
class Spec:
    """Which rank, of which shape."""

    role: str
    tp: int
    prefill: int
    decode: int
    page: int
    pool_pages: int
    layers: int
    heads: int
    dim: int
    port: int
    model: str
    tls: str

    @property
    def size(self) -> int:
        return self.prefill if self.role == "prefill" else self.decode


class Buffers:
    """KV pool (K layers, then V layers), and the rows of metadata SGLang sends along."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        heads = spec.heads // spec.size
        shape = (spec.pool_pages * spec.page, heads, spec.dim)
        self.kv = [torch.ones(shape, dtype=torch.int16) for _ in range(2 * spec.layers)]
        self.aux = torch.zeros(64, 16, dtype=torch.int32)
        if spec.role == "prefill":
            for number, buffer in enumerate(self.kv):
                buffer.copy_(self.expected(number, torch.arange(shape[0])))
            self.aux[0, 0] = 4242

    def expected(self, number: int, slots: torch.Tensor) -> torch.Tensor:
        """Content of prefill's token slots, for the heads of this rank."""
        heads = self.spec.heads // self.spec.size
        head = torch.arange(self.spec.tp * heads, (self.spec.tp + 1) * heads)
        inside = (head.view(-1, 1) * 17 + torch.arange(self.spec.dim) * 3).to(torch.int16)
        return (slots * 131 + number * 7919).to(torch.int16).view(-1, 1, 1) + inside

    def slots(self, pages: np.ndarray) -> torch.Tensor:
        """Token slots of pages."""
        first = torch.from_numpy(pages.astype(np.int64)).view(-1, 1) * self.spec.page
        return (first + torch.arange(self.spec.page)).view(-1)

    def arguments(self) -> KVArgs:
        """What the engine would tell the transfer classes."""
        spec, made = self.spec, KVArgs()
        items = [buffer[0].nbytes * spec.page for buffer in self.kv]
        values: dict[str, Any] = {
            "engine_rank": spec.tp,
            "pp_rank": 0,
            "system_dp_rank": None,
            "rust_http_port": None,
            "gpu_id": 0,
            "ib_device": None,
            "kv_cache_dtype_str": "torch.bfloat16",
            "kv_data_ptrs": [buffer.data_ptr() for buffer in self.kv],
            "kv_data_lens": [buffer.nbytes for buffer in self.kv],
            "kv_item_lens": items,
            "kv_data_mem_kinds": ["DRAM"] * len(self.kv),
            "kv_layer_ids": [],
            "num_draft_entries": 0,
            "kv_head_num": spec.heads // spec.size,
            "total_kv_head_num": spec.heads,
            "page_size": spec.page,
            "prefill_start_layer": 0,
            "prefill_end_layer": spec.layers,
            "aux_data_ptrs": [self.aux.data_ptr()],
            "aux_data_lens": [self.aux.nbytes],
            "aux_item_lens": [self.aux[0].nbytes],
            "is_hybrid_mla_backend": False,
            "swa_kv_cache_layout": None,
            "mla_compression_ratios": None,
        }
        values |= {
            f"state_{name}": []
            for name in (
                "types",
                "data_ptrs",
                "data_lens",
                "item_lens",
                "layer_ids",
                "dim_per_tensor",
                "slice_outer_counts",
                "conv_shard_groups",
            )
        }
        for name, value in values.items():
            setattr(made, name, value)
        return made


def remove_guard() -> None:
    """Let unequal TP through to host memory, by the per-token slices that SGLang prepares for device memory."""
    original: Callable[..., Any] = nixl_conn.NixlKVManager._prepare_payload_xfer

    def prepare(self: Any, peer: Any) -> Any:
        if self.is_mla_backend or peer.decode_tp_size == self.attn_tp_size:
            return original(self, peer)
        peer.dst_homogeneous_mem_kind = nixl_conn._homogeneous_kv_mem_kind(peer.dst_kv_mem_kinds, "destination")
        return self._init_hetero_tp_prep_handle(
            peer.agent_name, peer, src_mem_kind=self.src_mem_kind, dst_mem_kind=peer.dst_homogeneous_mem_kind
        )

    nixl_conn.NixlKVManager._prepare_payload_xfer = prepare


class Rank:
    """One manager, used for one request after the other."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.buffers = Buffers(spec)
        self.address = f"127.0.0.1:{spec.port}"
        arguments = ServerArgs(
            model_path=spec.model,
            device="cpu",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            grammar_backend="none",
            tp_size=spec.size,
            page_size=spec.page,
            disaggregation_mode=spec.role,
            disaggregation_transfer_backend="nixl",
            host="127.0.0.1",
            port=spec.port + 1,
            disaggregation_bootstrap_port=spec.port,
            mem_fraction_static=0.1,
            disable_overlap_schedule=True,
            max_total_tokens=4096,
            disaggregation_decode_retraction_backup="cpu_tensor" if spec.role == "decode" else None,
        )
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=spec.tp, gpu_id=0))
        get_parallel().override_permanently(pp_group=None)
        if spec.prefill != spec.decode:
            remove_guard()
        if spec.role == "prefill" and spec.tp == 0:
            self._server = nixl_conn.NixlKVBootstrapServer("127.0.0.1", spec.port)
            time.sleep(0.5)
        self._arguments = arguments

    def manage(self) -> None:
        """Register; after this the bootstrap server knows a prefill rank."""
        mode = DisaggregationMode.PREFILL if self.spec.role == "prefill" else DisaggregationMode.DECODE
        self.manager = nixl_conn.NixlKVManager(self.buffers.arguments(), mode, self._arguments, False)

    def meet(self) -> None:
        """Decode: learn of prefill's ranks."""
        until = time.monotonic() + DEADLINE
        while self.spec.role == "decode" and not self.manager.try_ensure_parallel_info(self.address):
            if time.monotonic() > until:
                raise TimeoutError("the bootstrap server does not know prefill")
            time.sleep(0.1)

    def ask(self, room: int, pages: np.ndarray) -> None:
        """Decode: name the pages."""
        self.handle = nixl_conn.NixlKVReceiver(self.manager, self.address, room)
        self.handle.init(0)
        self._reach(KVPoll.WaitingForInput)
        self.handle.send_metadata(pages, 0, [])

    def open(self, room: int, count: int) -> None:
        """Prefill: until decode's pages are known."""
        self.handle = nixl_conn.NixlKVSender(self.manager, self.address, room)
        self._reach(KVPoll.WaitingForInput)
        self.handle.init(count, 0)

    def send(self, pages: np.ndarray, start: float) -> float:
        """Prefill: hand the pages over at `start`; when that really was."""
        while (left := start - time.perf_counter()) > 0:
            time.sleep(left - 0.0005 if left > 0.001 else 0)
        began = time.perf_counter()
        self.handle.send(pages, [], num_kv_tokens=len(pages) * self.spec.page)
        self._reach(KVPoll.Success)
        self.handle.clear()
        return began

    def wait(self) -> float:
        """Decode: when Success was seen."""
        self._reach(KVPoll.Success)
        ended = time.perf_counter()
        self.handle.clear()
        return ended

    def _reach(self, wanted: int) -> None:
        ctypes.CDLL(None).prctl(29, ctypes.c_ulong(1), 0, 0, 0)  # a sleep of 50 us takes no 100
        until = time.monotonic() + DEADLINE
        while (state := self.handle.poll()) != wanted:
            if state in ENDED:
                try:
                    self.handle.failure_exception()
                except Exception as error:
                    raise RuntimeError(f"SGLang: {error}") from error
                raise RuntimeError(f"SGLang: ended as {state}")
            if time.monotonic() > until:
                raise TimeoutError(f"SGLang: still in state {state}")
            time.sleep(50e-6)

    def forget(self, pages: np.ndarray) -> None:
        """Clear pages before a run that is verified."""
        for buffer in self.buffers.kv:
            buffer[self.buffers.slots(pages)] = 0

    def wrong(self, pages: np.ndarray, source: np.ndarray) -> int:
        """Numbers that differ from prefill's."""
        here, there = self.buffers.slots(pages), self.buffers.slots(source)
        return sum(
            int((buffer[here] != self.buffers.expected(number, there)).sum())
            for number, buffer in enumerate(self.buffers.kv)
        )

    def threads(self) -> int:
        """For a log."""
        return threading.active_count()


def main(spec: Spec, pipe: Connection) -> None:
    """Answer ("method", arguments) until the pipe ends."""
    os.environ.pop("UCX_TLS", None)
    if spec.tls:
        os.environ["UCX_TLS"] = spec.tls
    torch.set_num_threads(1)
    rank: Rank | None = None
    while True:
        try:
            what, *arguments = pipe.recv()
        except EOFError:
            break
        try:
            if what == "make":
                rank = Rank(spec)
                pipe.send(("ok", None))
            else:
                pipe.send(("ok", getattr(rank, what)(*arguments)))
        except Exception:
            pipe.send(("error", traceback.format_exc()[-3000:]))
    os._exit(0)
