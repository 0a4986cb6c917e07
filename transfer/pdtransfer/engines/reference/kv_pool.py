"""The paged KV pool of one rank: per layer one K and one V tensor, each a region of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout, Region, RegionKind


def memory_of(kind: str, layer: int) -> MemoryKind:
    """Memory kind that a layer's regions claim under --kv-memory-kind. Without a GPU, VRAM is emulated on
    host memory and labelled. `mixed`: layers alternate (even VRAM, odd DRAM), to exercise mixed kinds."""
    if kind == "dram" or (kind == "mixed" and layer % 2):
        return MemoryKind.DRAM
    return MemoryKind.VRAM


@dataclass(frozen=True)
class PoolShape:
    """Sizes of a rank's pool; `page_tokens` tokens a page, NHD inside a page."""

    layers: int
    pages: int
    page_tokens: int
    heads: HeadSlice
    head_dim: int

    @property
    def tensor(self) -> tuple[int, int, int, int]:
        """[pages, page_tokens, kv_heads of this rank, head_dim]"""
        return (self.pages, self.page_tokens, self.heads.count, self.head_dim)


class PagedKVPool:
    """K and V of every layer; writes and reads go by page table."""

    def __init__(self, shape: PoolShape, dtype: torch.dtype, memory: str) -> None:
        self.shape = shape
        self.dtype = dtype
        self.memory = memory
        self.keys = [torch.zeros(shape.tensor, dtype=dtype) for _ in range(shape.layers)]
        self.values = [torch.zeros(shape.tensor, dtype=dtype) for _ in range(shape.layers)]

    @property
    def emulated_vram(self) -> bool:
        """True when some region says VRAM but lies in host memory."""
        return self.memory != "dram"

    def slots(self, pages: Sequence[int], start: int, count: int) -> torch.Tensor:
        """Flat token slots (page * page_tokens + offset) of positions start .. start+count-1."""
        size = self.shape.page_tokens
        position = torch.arange(start, start + count)
        table = torch.tensor(pages, dtype=torch.int64)
        return table[position // size] * size + position % size

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store [tokens, heads, head_dim] K and V at the slots."""
        flat = (-1, self.shape.heads.count, self.shape.head_dim)
        self.keys[layer].view(flat)[slots] = key.to(self.dtype)
        self.values[layer].view(flat)[slots] = value.to(self.dtype)

    def read(self, layer: int, pages: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [tokens, heads, head_dim] of the first `tokens` positions of a page table."""
        flat = (-1, self.shape.heads.count, self.shape.head_dim)
        return (
            self.keys[layer][pages].view(flat)[:tokens],
            self.values[layer][pages].view(flat)[:tokens],
        )

    def regions(self) -> tuple[Region, ...]:
        """Every tensor as the region that the transfer module registers."""
        found = []
        for kind, tensors in ((RegionKind.KEY, self.keys), (RegionKind.VALUE, self.values)):
            for layer, tensor in enumerate(tensors):
                found.append(
                    Region(
                        layer=layer,
                        kind=kind,
                        item_bytes=tensor[0].numel() * tensor.element_size(),
                        items=tensor.shape[0],
                        memory=memory_of(self.memory, layer),
                        address=tensor.data_ptr(),
                    )
                )
        return tuple(found)

    def layout(self, rank: int, tp_size: int) -> RankLayout:
        """What this rank registers, read from the tensors themselves."""
        return RankLayout(
            page_tokens=self.keys[0].shape[1],
            kv_dtype=dtype_name(self.keys[0].dtype),
            heads=self.shape.heads,
            coordinates=RankCoordinates(tp=rank, tp_size=tp_size),
            regions=self.regions(),
            emulated_vram=self.emulated_vram,
        )


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> 'float32'."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """'float32' -> torch.float32."""
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found
