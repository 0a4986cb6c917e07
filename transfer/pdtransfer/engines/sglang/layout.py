"""SGLang's KVArgs as regions of a card. Pure: of SGLang only the names of attributes, so that any object with them
will do.

Order of `kv_data_ptrs` (SGLang 0.5.23, disaggregation/utils.py and prefill.py): K of every layer then V of every
layer, or one latent row a layer (MLA); draft layers last, in the same way. Hybrid models name their layers in
`kv_layer_ids`. What is not KV of the whole prompt (index rows, recurrent state, sliding windows) are components:
lists in `state_*`, each with page lists of its own, matched between the two sides by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.layout import HeadSlice, RegionKind
from pdtransfer.engines.sglang.memory import KindOf
from pdtransfer.session.api import PoolRegion

STATE_BAND = 1 << 20
"""First made-up layer id of state that belongs to no one layer. Real models have fewer layers."""
COMPONENT_BAND, TENSOR_BAND = 1 << 18, 1 << 12
"""Ids of one component, and of one tensor of each layer in it."""
INDEX_TYPES = frozenset({"dsa"})


class BadLayout(ValueError):
    """SGLang's lists do not make sense together; the message begins with the attribute's name."""


@dataclass(frozen=True)
class Stage:
    """What KVArgs does not say. `first_layer` of this pipeline stage; `heads` None where rows do not split by head
    (MLA); `stages` of this engine's pipeline."""

    first_layer: int
    heads: HeadSlice | None
    stages: int = 1


@dataclass(frozen=True)
class Entry:
    """One buffer: what it holds."""

    layer: int
    kind: RegionKind
    draft: bool = False


def head_slice(tp: int, tp_size: int, total: int) -> HeadSlice:
    """KV heads of attention rank `tp` (SGLang: max(1, total / tp_size) each; more ranks than heads replicate them)."""
    return HeadSlice(first=tp * total // tp_size, count=max(1, total // tp_size), total=total)


def pool_regions(args: Any, stage: Stage, kind_of: KindOf, gpu: int = 0) -> list[PoolRegion]:
    """Every buffer of the KV pool, of state components, and of the host pools where SGLang has some.

    `gpu` is the device of those in device memory, as this process numbers devices; 0 where they are emulated.
    Host memory is on device 0, as SGLang's own NIXL backend has it. Buffers of no bytes (layers that store nothing)
    are left out, as SGLang does. Raises BadLayout."""
    entries = kv_entries(args, stage)
    pointers = ("kv_data_ptrs", "kv_data_lens", "kv_item_lens")
    found = _laid(args, pointers, entries, "", kind_of)
    names = component_pools(args)
    for i, pool in enumerate(names):
        parts = _component(args, i, entries, stage)
        lists = _parts(args, ("state_data_ptrs", "state_data_lens", "state_item_lens"), i)
        found += _regions(lists, parts, pool, kind_of, f"state component {pool}")
    if getattr(args, "host_kv_data_ptrs", None):
        found += _host(args, entries, names, stage)
    return [replace(r, device=gpu) if r.memory == MemoryKind.VRAM.value else r for r in found]


def component_pools(args: Any) -> list[str]:
    """Name of each state component's page space: its type, and which of that type."""
    names: list[str] = []
    for one in getattr(args, "state_types", None) or ():
        word = str(getattr(one, "value", one))
        names.append(f"{word}.{sum(n.startswith(word + '.') for n in names)}")
    return names


def kv_entries(args: Any, stage: Stage) -> list[Entry]:
    """What each of `kv_data_ptrs` holds, in order."""
    count, draft = len(args.kv_data_ptrs), int(getattr(args, "num_draft_entries", 0) or 0)
    target = count - draft
    if target <= 0:
        raise BadLayout(f"kv_data_ptrs: {count} buffers, {draft} of them of draft layers: none of the model")
    ids = list(getattr(args, "kv_layer_ids", None) or ())
    if ids and len(ids) != count:
        raise BadLayout(f"kv_layer_ids: {len(ids)} ids for {count} buffers")
    if getattr(args, "mla_compression_ratios", None):
        if stage.stages > 1:
            raise BadLayout("mla_compression_ratios: compressed MLA in pipeline stages has no layer of each buffer")
        return [Entry(i, RegionKind.LATENT) for i in range(target)] + _drafts(draft, latent=True)
    latent = stage.heads is None
    if latent:
        layers = ids[:target] or [stage.first_layer + i for i in range(target)]
        return [Entry(n, RegionKind.LATENT) for n in layers] + _drafts(draft, latent)
    if target % 2:
        raise BadLayout(f"kv_data_ptrs: {target} buffers are not as many K as V")
    half = target // 2
    keys = ids[:half] or [stage.first_layer + i for i in range(half)]
    values = ids[half:target] or keys
    made = [Entry(n, RegionKind.KEY) for n in keys] + [Entry(n, RegionKind.VALUE) for n in values]
    return made + _drafts(draft, latent)


def _drafts(count: int, latent: bool) -> list[Entry]:
    if latent:
        return [Entry(i, RegionKind.LATENT, draft=True) for i in range(count)]
    if count % 2:
        raise BadLayout(f"num_draft_entries: {count} draft buffers are not as many K as V")
    half = range(count // 2)
    keys = [Entry(i, RegionKind.KEY, draft=True) for i in half]
    return keys + [Entry(i, RegionKind.VALUE, draft=True) for i in half]


def _component(args: Any, i: int, entries: Sequence[Entry], stage: Stage) -> list[Entry]:
    """What the buffers of state component `i` hold."""
    word = component_pools(args)[i].rsplit(".", 1)[0]
    sizes = args.state_item_lens[i]
    count = len(args.state_data_ptrs[i])
    base = STATE_BAND + COMPONENT_BAND * i
    if word in INDEX_TYPES:
        layers = [e.layer for e in entries if not e.draft and e.kind in (RegionKind.LATENT, RegionKind.KEY)]
        if count < len(layers) or count - len(layers) > sum(e.draft for e in entries):
            raise BadLayout(f"state_data_ptrs[{i}]: {count} index buffers for {len(layers)} layers")
        rest = range(count - len(layers))
        return [Entry(n, RegionKind.INDEX) for n in layers] + [Entry(n, RegionKind.INDEX, draft=True) for n in rest]
    ids = list(_part(args, "state_layer_ids", i) or ())
    if ids:
        seen: dict[int, int] = {}
        made = []
        for layer in ids:
            seen[layer] = seen.get(layer, -1) + 1
            made.append(Entry(base + TENSOR_BAND * seen[layer] + layer, RegionKind.STATE))
        return made
    if stage.stages > 1:
        raise BadLayout(f"state_layer_ids[{i}]: {word} in pipeline stages has no layer of each buffer")
    if word == "swa" and _like_kv(args, sizes, stage):
        half = range(count // 2)
        keys = [Entry(base + n, RegionKind.KEY) for n in half]
        return keys + [Entry(base + n, RegionKind.VALUE) for n in half]
    return [Entry(base + n, RegionKind.STATE) for n in range(count)]


def _like_kv(args: Any, sizes: Sequence[int], stage: Stage) -> bool:
    """A window pool whose rows are as those of the KV pool: then its slices can be cut by head as well."""
    split = stage.heads is not None and getattr(args, "swa_kv_cache_layout", None) == "nhd" and len(sizes) % 2 == 0
    kv = args.kv_item_lens
    half, middle = len(sizes) // 2, (len(kv) - int(getattr(args, "num_draft_entries", 0) or 0)) // 2
    return bool(split and set(sizes[:half]) == set(kv[:middle]) and set(sizes[half:]) == set(kv[middle : 2 * middle]))


def _host(args: Any, entries: Sequence[Entry], names: Sequence[str], stage: Stage) -> list[PoolRegion]:
    """The pools in host memory that a request may be received into instead."""

    def host(address: int) -> MemoryKind:
        return MemoryKind.DRAM

    found = _laid(args, ("host_kv_data_ptrs", "host_kv_data_lens", "host_kv_item_lens"), entries, "", host)
    for i in range(len(getattr(args, "host_state_data_ptrs", None) or ())):
        lists = _parts(args, ("host_state_data_ptrs", "host_state_data_lens", "host_state_item_lens"), i)
        found += _regions(lists, _component(args, i, entries, stage), names[i], host, f"host state {names[i]}")
    return found


Lists = tuple[Sequence[int], Sequence[int], Sequence[int]]


def _laid(
    args: Any, names: tuple[str, str, str], entries: Sequence[Entry], pool: str, kind_of: KindOf
) -> list[PoolRegion]:
    lists: Lists = (getattr(args, names[0]), getattr(args, names[1]), getattr(args, names[2]))
    return _regions(lists, entries, pool, kind_of, names[0])


def _parts(args: Any, names: tuple[str, str, str], i: int) -> Lists:
    return (_part(args, names[0], i), _part(args, names[1], i), _part(args, names[2], i))


def _part(args: Any, name: str, i: int) -> Any:
    held = getattr(args, name, None) or ()
    return held[i] if i < len(held) else ()


def _regions(lists: Lists, entries: Sequence[Entry], pool: str, kind_of: KindOf, name: str) -> list[PoolRegion]:
    addresses, lengths, sizes = lists
    if not len(addresses) == len(lengths) == len(sizes) == len(entries):
        counts = f"{len(addresses)} addresses, {len(lengths)} lengths, {len(sizes)} item sizes"
        raise BadLayout(f"{name}: {counts} for {len(entries)} buffers")
    found = []
    for address, length, size, entry in zip(addresses, lengths, sizes, entries, strict=True):
        if not length:
            continue  # a layer that stores nothing
        if size <= 0 or length < size:
            raise BadLayout(f"{name}: a buffer of {length} bytes has pages of {size}")
        found.append(
            PoolRegion(
                layer=int(entry.layer),
                kind=entry.kind.value,
                address=int(address),
                item_bytes=int(size),
                items=int(length) // int(size),
                memory=kind_of(int(address)).value,
                draft=entry.draft,
                pool=pool,
            )
        )
    return found
