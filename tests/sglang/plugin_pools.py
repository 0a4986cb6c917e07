"""Buffers of one rank as SGLang's KVArgs describe them: their shape, and bytes that a seeded generator knows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import KVArgs

PAGE = 4
AUX = (16, 32, 64)
"""Bytes a row of the metadata buffers; the last holds the room first, as SGLang's does."""
ROWS = 8
Array = npt.NDArray[np.uint16]


@dataclass
class Shape:
    """One engine. `kind`: mha or mla. `host`: it has host pools as well (decode). `index`, `state`: it has
    such a component. `drafts` draft layers."""

    role: str = "prefill"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    copies: bool = False
    """The data-parallel groups are whole replicas (--dp-size without DP attention)."""
    cp: int = 1
    layers: int = 4
    heads: int = 4
    dim: int = 8
    kind: str = "mha"
    pages: int = 16
    drafts: int = 0
    index: bool = False
    state: bool = False
    host: bool = False
    dtype: str = "bfloat16"
    page_size: int = PAGE
    model: str = "Tiny"
    port: int = 30000


def truth(room: int, page: int, layer: int, part: str, shape: Shape) -> Array:
    """Bytes of one prompt page over all heads, (tokens, heads or 1, dim), from a seeded generator."""
    rng = np.random.default_rng([room, page, layer, sum(part.encode())])
    heads = shape.heads if shape.kind == "mha" and part in ("K", "V", "dK", "dV") else 1
    return rng.integers(1, 65535, (shape.page_size, heads, shape.dim), dtype=np.uint16)


@dataclass
class RankPool:
    """One rank's buffers. `parts` maps (name, layer) to (pages, tokens, heads of the rank, dim)."""

    shape: Shape
    tp: int
    pp: int
    parts: dict[tuple[str, int], Array] = field(default_factory=dict)
    host: dict[tuple[str, int], Array] = field(default_factory=dict)
    slots: dict[tuple[str, int], Array] = field(default_factory=dict)
    aux: list[npt.NDArray[np.uint8]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = self.shape
        self.stage = range(self.pp * shape.layers // shape.pp, (self.pp + 1) * shape.layers // shape.pp)
        names = ("K", "V") if shape.kind == "mha" else ("L",)
        for name, layer in itertools.product(names, self.stage):
            self.parts[name, layer] = self._buffer(name)
        for name, layer in itertools.product([f"d{n}" for n in names], range(shape.drafts)):
            self.parts[name, layer] = self._buffer(name)
        if shape.host:
            self.host = {key: np.zeros_like(array) for key, array in self.parts.items()}
        if shape.index:
            for layer in self.stage:
                self.slots["I", layer] = np.zeros((shape.pages, 6), dtype=np.uint16)
        if shape.state:
            for layer in (0, 1):
                self.slots["S", layer] = np.zeros((ROWS, 40), dtype=np.uint16)
        self.aux = [np.zeros((ROWS, size), dtype=np.uint8) for size in AUX]

    @property
    def count(self) -> int:
        return max(1, self.shape.heads // self.shape.tp)

    def _buffer(self, name: str) -> Array:
        heads = self.count if self.shape.kind == "mha" else 1
        return np.zeros((self.shape.pages, self.shape.page_size, heads, self.shape.dim), dtype=np.uint16)

    def share(self, whole: Array) -> Array:
        """This rank's heads of a page of all heads."""
        if self.shape.kind != "mha":
            return whole
        first = self.tp * self.shape.heads // self.shape.tp
        return whole[:, first : first + self.count]

    def fill(self, room: int, pages: Sequence[int], first: int = 0) -> None:
        for (name, layer), array in self.parts.items():
            for i, page in enumerate(pages):
                array[page] = self.share(truth(room, first + i, layer, name, self.shape))

    def wrong(self, room: int, pages: Sequence[int], first: int = 0, host: bool = False) -> list[str]:
        """What does not hold the room's bytes."""
        return [
            f"{name} layer {layer} page {page}"
            for (name, layer), array in (self.host if host else self.parts).items()
            for i, page in enumerate(pages)
            if not np.array_equal(array[page], self.share(truth(room, first + i, layer, name, self.shape)))
        ]

    def args(self) -> KVArgs:
        """As SGLang's queues fill them."""
        k, shape = KVArgs(), self.shape
        k.engine_rank, k.pp_rank, k.system_dp_rank, k.gpu_id = self.tp, self.pp, None, 0
        k.kv_cache_dtype_str, k.page_size, k.ib_device = "auto", shape.page_size, None
        k.kv_layer_ids, k.num_draft_entries = [], sum(name.startswith("d") for name, _ in self.parts)
        k.kv_data_ptrs, k.kv_data_lens, k.kv_item_lens = _lists(self.parts.values())
        k.prefill_start_layer, k.prefill_end_layer = self.stage.start, self.stage.stop
        k.aux_data_ptrs, k.aux_data_lens, k.aux_item_lens = _lists(self.aux)
        if self.host:
            k.host_kv_data_ptrs, k.host_kv_data_lens, k.host_kv_item_lens = _lists(self.host.values())
        k.is_hybrid_mla_backend, k.swa_kv_cache_layout, k.mla_compression_ratios = False, None, None
        k.state_types, k.state_layer_ids, k.state_dim_per_tensor = [], [], []
        k.state_data_ptrs, k.state_data_lens, k.state_item_lens = [], [], []
        for letter, word in (("I", "dsa"), ("S", "mamba")):
            held = [array for (name, _), array in self.slots.items() if name == letter]
            if held:
                pointers, lengths, items = _lists(held)
                k.state_types.append(word)
                k.state_data_ptrs.append(pointers)
                k.state_data_lens.append(lengths)
                k.state_item_lens.append(items)
                k.state_layer_ids.append([])
                k.state_dim_per_tensor.append([])
        return k

    def set_row(self, index: int, room: int, token: int) -> None:
        """What SGLang's set_buf leaves for decode: here a token, and the room in the last buffer."""
        self.aux[0][index].view(np.uint64)[0] = token
        self.aux[-1][index].view(np.uint64)[0] = room

    def row(self, index: int) -> tuple[int, int]:
        """Token and room that decode would read."""
        return int(self.aux[0][index].view(np.uint64)[0]), int(self.aux[-1][index].view(np.uint64)[0])


def _lists(arrays: Iterable[Any]) -> tuple[list[int], list[int], list[int]]:
    held = list(arrays)
    return [a.ctypes.data for a in held], [a.nbytes for a in held], [a[0].nbytes for a in held]
