"""Ranks whose pools are plain byte arrays, filled from and checked against one global KV.

Every token's head is placed by the layout rule (page, token, head, dim) alone, and nothing here uses the
plan. Addresses are made up: nothing outside the arrays can be touched unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout, Region, RegionKind


class Memory:
    """Bytes from `base` on, and how often each was written."""

    def __init__(self, base: int, nbytes: int, rng: np.random.Generator) -> None:
        self.base = base
        self.data = rng.integers(0, 256, nbytes, dtype=np.uint8)
        self.before = self.data.copy()
        self.writes = np.zeros(nbytes, dtype=np.int64)
        self.registered: list[tuple[int, int, MemoryKind, int]] = []

    def reset(self) -> None:
        """As it was in the beginning."""
        self.data[:] = self.before
        self.writes[:] = 0

    def at(self, address: int, nbytes: int, device: int, kind: MemoryKind | None = None) -> slice:
        """Where the bytes lie in `data`; they must lie in one registered region of that kind."""
        assert any(
            low <= address and address + nbytes <= high and device == where and kind in (None, held)
            for low, high, held, where in self.registered
        ), f"{nbytes} bytes at {address} are not of one region"
        return slice(address - self.base, address - self.base + nbytes)

    def read(self, address: int, nbytes: int, device: int, kind: MemoryKind | None = None) -> np.ndarray:
        return self.data[self.at(address, nbytes, device, kind)]

    def write(self, address: int, data: np.ndarray, device: int, kind: MemoryKind | None = None) -> None:
        where = self.at(address, len(data), device, kind)
        self.data[where] = data
        self.writes[where] += 1


@dataclass(frozen=True)
class Part:
    """One kind of region: how its rows are made. `dim` is bytes of a head of one token, or of a page
    for rows that do not split by head."""

    layer: int
    kind: RegionKind
    dim: int
    pool: str = ""
    draft: bool = False

    @property
    def split(self) -> bool:
        return self.kind in (RegionKind.KEY, RegionKind.VALUE)


@dataclass
class Model:
    """The global KV: for each part (prompt pages, tokens, all heads, dim), or (prompt pages, dim)."""

    tokens: int
    heads: int | None
    parts: Sequence[Part]
    pages: Mapping[str, int]
    rng: np.random.Generator
    values: dict[Part, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part in self.parts:
            n = self.pages[part.pool]
            shape = (n, self.tokens, self.heads, part.dim) if part.split else (n, part.dim)
            self.values[part] = self.rng.integers(0, 256, shape, dtype=np.uint8)


class Rank:
    """One rank of an engine: which heads and parts it holds, and its memory."""

    def __init__(
        self,
        model: Model,
        at: RankCoordinates,
        parts: Sequence[Part],
        items: Mapping[str, int],
        rng: np.random.Generator,
        *,
        gap: int = 1,
        both: MemoryKind | None = None,
        slice_of: tuple[int, int] | None = None,
    ) -> None:
        self.model = model
        heads = None
        if model.heads is not None:
            count = max(1, model.heads // at.tp_size)
            first, count = slice_of or (at.tp * model.heads // at.tp_size, count)
            heads = HeadSlice(first=first, count=count, total=model.heads)
        self.regions: list[tuple[Part, Region]] = []
        self.other: list[Region] = []
        """Registered in the memory kind that is not chosen."""
        base = address = int(rng.integers(1, 1 << 20)) * 4096
        for part in parts:
            item = part.dim * model.tokens * heads.count if part.split and heads else part.dim
            kind = both or list(MemoryKind)[int(rng.integers(2))]
            kinds = [kind] if both is None else [kind, next(k for k in MemoryKind if k is not kind)]
            for k in kinds:
                region = Region(
                    layer=part.layer,
                    kind=part.kind,
                    item_bytes=item,
                    items=items[part.pool],
                    memory=k,
                    device=0 if k is MemoryKind.DRAM else at.tp,
                    address=address,
                    draft=part.draft,
                    pool=part.pool,
                )
                if k is kind:
                    self.regions.append((part, region))
                else:
                    self.other.append(region)
                address += item * items[part.pool] + gap * int(rng.integers(4))
        self.memory = Memory(base, address - base, rng)
        everything = [*(r for _, r in self.regions), *self.other]
        rng.shuffle(everything)  # type: ignore[arg-type]
        for region in everything:
            assert region.memory is not None
            end = region.address + region.item_bytes * region.items
            self.memory.registered.append((region.address, end, region.memory, region.device))
        self.layout = RankLayout(
            page_tokens=model.tokens,
            kv_dtype="fp8",
            heads=heads,
            coordinates=at,
            regions=tuple(everything),
        )

    def places(self, pages: Mapping[str, Mapping[int, int]]) -> Iterator[tuple[Part, int, int, int | None, np.ndarray]]:
        """(part, address, prompt page, token, bytes) of every head of every token, one by one.
        `pages[pool]` maps prompt pages to pool pages."""
        for part, region in self.regions:
            for prompt, page in pages.get(part.pool, {}).items():
                start = region.address + page * region.item_bytes
                value = self.model.values[part]
                if not part.split:
                    yield part, start, prompt, None, value[prompt]
                    continue
                assert self.layout.heads is not None
                for token in range(self.model.tokens):
                    for head in range(self.layout.heads.count):
                        offset = (token * self.layout.heads.count + head) * part.dim
                        yield part, start + offset, prompt, token, value[prompt, token, self.layout.heads.first + head]

    def fill(self, pages: Mapping[str, Mapping[int, int]]) -> None:
        """Put the global KV into the pool."""
        for _, address, _, _, data in self.places(pages):
            at = address - self.memory.base
            self.memory.data[at : at + len(data)] = data

    def check(self, pages: Mapping[str, Mapping[int, int]], tokens: int) -> None:
        """Every byte of the wanted pages was written once and those of the prompt's `tokens` are right;
        nothing else changed."""
        wanted = np.zeros(len(self.memory.data), dtype=np.int64)
        for part, address, prompt, token, data in self.places(pages):
            at = address - self.memory.base
            wanted[at : at + len(data)] += 1
            # What lies behind the end of a ragged last page may be anything.
            if part.pool or token is None or prompt * self.model.tokens + token < tokens:
                assert np.array_equal(self.memory.data[at : at + len(data)], data), (part, prompt, token)
        assert np.array_equal(self.memory.writes, wanted)
        untouched = wanted == 0
        assert np.array_equal(self.memory.data[untouched], self.memory.before[untouched])
