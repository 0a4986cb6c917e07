"""Family L: what running ranks really registered, alone and against the ranks they exchange KV with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdtransfer.contract.base import Role
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.compat.report import Finding, Status
from pdtransfer.contract.compat.rule import Outcome
from pdtransfer.contract.geometry import GeometryError, ModelGeometry, dtype_bytes
from pdtransfer.contract.layout import RankLayout, RegionKind
from pdtransfer.contract.pairing import meet

_RECYCLE = "nothing to set: the card is asked for again, and after the limit the pod is recycled"
_REFUSED = "The peer is refused before a byte moves."
_USED = "Fit is decided on what the engine has."
_SAME = "run the same model and engine version on both roles; if they are the same, report the layouts"


@dataclass(frozen=True, slots=True)
class LayoutRule:
    """A rule that only cards decide. It holds for every backend; where it fails the pair is never wired."""

    id: str
    title: str
    change: str
    outcome: Outcome = Outcome.REQ

    def finding(self, problem: str | None) -> Finding:
        """Pass without a problem; with it Fail, or Warn where the outcome is tolerable."""
        if problem is None:
            return Finding(rule=self.id, status=Status.PASS, title=self.title)
        return Finding(
            rule=self.id,
            status=Status.WARN if self.outcome.tolerable else Status.FAIL,
            title=self.title,
            message=f"{problem}. {_USED if self.outcome.tolerable else _REFUSED}",
            action=self.change,
            severity=self.outcome.value,
        )


L1 = LayoutRule("L1", "A card matches its own hashes", _RECYCLE)
L2 = LayoutRule("L2", "The cards of one engine agree", _RECYCLE)
L3 = LayoutRule("L3", "The ranks together hold every head and layer", _RECYCLE)
L4 = LayoutRule("L4", "Ranks that exchange KV hold regions that map", _SAME)
L5 = LayoutRule("L5", "Item sizes follow from heads, page and dtype", _SAME)
L6 = LayoutRule("L6", "A prefill and a decode rank of one PDCluster", "wire only what the operator's roster names")
L7 = LayoutRule("L7", "Fingerprints are equal", _SAME)
L8 = LayoutRule(
    "L8",
    "The engine runs the geometry that the spec states",
    "correct spec.model.geometry, or leave it out",
    Outcome.WARN,
)
LAYOUT_RULES = (L1, L2, L3, L4, L5, L6, L7, L8)


def name(card: RankCard) -> str:
    """How messages name a rank."""
    return f"{card.role.value} rank {card.rank} of {card.pod_name or card.pod_uid}"


def broken_seal(cards: Iterable[RankCard]) -> str | None:
    """L1: first card that does not match its own hashes."""
    return next((f"{name(c)}: {c.seal_broken}" for c in cards if c.seal_broken), None)


def disagreement(cards: Sequence[RankCard]) -> str | None:
    """L2: first fact in which two cards of one engine differ."""
    first = cards[0]
    for card in cards[1:]:
        for label, ours, theirs in (
            ("role", first.role.value, card.role.value),
            ("PDCluster", first.cluster_uid, card.cluster_uid),
            ("model", first.model, card.model),
            ("engine version", first.engine.version, card.engine.version),
            ("transfer backend", first.engine.backend.value, card.engine.backend.value),
            ("page size", first.layout.page_tokens, card.layout.page_tokens),
            ("KV dtype", first.layout.kv_dtype, card.layout.kv_dtype),
            ("ranks (tp, pp, dp, cp)", _grid(first.layout), _grid(card.layout)),
        ):
            if ours != theirs:
                return f"{name(first)} has {label} {ours}, {name(card)} has {theirs}"
        if first.pod_uid == card.pod_uid and first.incarnation != card.incarnation:
            return f"{name(first)} is of incarnation {first.incarnation}, {name(card)} of {card.incarnation}"
    return None


def _grid(layout: RankLayout) -> tuple[int, int, int, int]:
    at = layout.coordinates
    return at.tp_size, at.pp_size, at.dp_size, at.cp_size


def gap(cards: Sequence[RankCard], geometry: ModelGeometry | None = None) -> str | None:
    """L3: the first rank, head or layer of one engine that is missing or there twice.

    `geometry` tells which layers own no KV at all; without it every layer is expected."""
    first = cards[0]
    tp_size, pp_size, dp_size, cp_size = _grid(first.layout)
    seen = Counter(c.rank for c in cards)
    twice = next((rank for rank, count in sorted(seen.items()) if count > 1), None)
    if twice is not None:
        return f"{seen[twice]} cards stand under rank {twice} of the {first.role.value} engine"
    wanted = tp_size * pp_size * dp_size * cp_size
    if len(seen) < wanted:
        absent = next(rank for rank in range(wanted) if rank not in seen)
        return f"{first.role.value}: rank {absent} of {wanted} shows no card ({wanted - len(seen)} missing)"
    outside = next((rank for rank in sorted(seen) if rank >= wanted), None)
    if outside is not None:
        return f"{first.role.value}: rank {outside} is outside the engine's {wanted}"
    by_stage: dict[tuple[int, int, int], list[RankCard]] = {}
    for card in cards:
        at = card.layout.coordinates
        by_stage.setdefault((at.dp, at.cp, at.pp), []).append(card)
    for (dp, cp, pp), stage in sorted(by_stage.items()):
        problem = _head_gap([c.layout for c in stage])
        if problem:
            return f"{first.role.value} stage pp {pp} (dp {dp}, cp {cp}): {problem}"
    return _layer_gap(cards, frozenset(geometry.kvless_layers if geometry else ()))


def _layer_gap(cards: Sequence[RankCard], kvless: frozenset[int]) -> str | None:
    """First layer that the stages of one TP rank do not hold between them."""
    if any(r.pool and r.kind is not RegionKind.INDEX for card in cards for r in card.layout.regions):
        return None  # Hybrid: layers that hold state have no pages, and engines count the others in ways of their own.
    total = cards[0].model.layers
    held: dict[tuple[int, int, int], set[int]] = {}
    for card in cards:
        at = card.layout.coordinates
        held.setdefault((at.dp, at.cp, at.tp), set()).update(card.layout.layers)
    for (dp, _, tp), layers in sorted(held.items()):
        missing = next((i for i in range(total) if i not in layers and i not in kvless), None)
        if missing is not None:
            return f"{cards[0].role.value} tp {tp} (dp {dp}): layer {missing} of {total} has no region"
    return None


MAX_HEADS = 1 << 16


def _head_gap(layouts: Sequence[RankLayout]) -> str | None:
    """Heads of one stage's ranks: each of the total exactly `copies` times."""
    if all(layout.heads is None for layout in layouts):
        return None
    slices = [layout.heads for layout in layouts if layout.heads is not None]
    if len(slices) != len(layouts):
        return "some ranks hold a head slice and some hold whole rows"
    totals = {s.total for s in slices}
    if len(totals) != 1:
        return f"ranks speak of {min(totals)} and of {max(totals)} KV heads in total"
    total = totals.pop()
    # Bounds first: nothing below may run over a number that a card made up.
    if total > MAX_HEADS:
        return f"ranks speak of {total} KV heads in total"
    last = max(slices, key=lambda s: s.first + s.count)
    if last.first + last.count > total:
        return f"a rank holds KV heads {last.first}..{last.first + last.count - 1} of {total}"
    if total > sum(s.count for s in slices):
        return f"the ranks hold {sum(s.count for s in slices)} KV heads of {total}"
    held = Counter(h for s in slices for h in range(s.first, s.first + s.count))
    copies = sum(held.values()) / total
    uneven = next((h for h in range(total) if held[h] != copies), None)
    if uneven is not None:
        return f"KV head {uneven} of {total} is held by {held[uneven]} ranks, {copies:g} is even"
    return None


def wrong_size(card: RankCard) -> str | None:
    """L5: first K or V region whose item is not page * heads * dim * bytes.

    Dims that the card's model does not state, and dtypes without whole bytes, are not checked."""
    layout, model = card.layout, card.model
    for region in layout.regions:
        # A page space of its own (sliding windows) may have other heads and dims than the model's full layers.
        if region.draft or region.pool or region.kind not in (RegionKind.KEY, RegionKind.VALUE):
            continue
        if layout.heads is None:
            return f"{name(card)}: layer {region.layer} has a {region.kind.value} region and the rank no head slice"
        rows = layout.page_tokens * layout.heads.count
        if region.item_bytes % rows:
            return (
                f"{name(card)}: layer {region.layer} {region.kind.value} item is {region.item_bytes} bytes, not a "
                f"multiple of {layout.page_tokens} tokens x {layout.heads.count} heads"
            )
        dim = model.head_dim if region.kind is RegionKind.KEY else (model.v_head_dim or model.head_dim)
        if dim is None:
            continue
        try:
            expected = rows * dim * dtype_bytes(layout.kv_dtype, model.dtype)
        except GeometryError:
            continue
        if region.item_bytes != expected:
            return (
                f"{name(card)}: layer {region.layer} {region.kind.value} item is {region.item_bytes} bytes; "
                f"{layout.page_tokens} tokens x {layout.heads.count} heads x {dim} in {layout.kv_dtype} are {expected}"
            )
    return None


def strangers(prefill: RankCard, decode: RankCard) -> str | None:
    """L6: the two are not a prefill and a decode rank of one PDCluster."""
    if prefill.role is not Role.PREFILL or decode.role is not Role.DECODE:
        return f"the source is a {prefill.role.value} rank and the destination a {decode.role.value} rank"
    if prefill.cluster_uid != decode.cluster_uid:
        return f"{name(prefill)} is of PDCluster {prefill.cluster_uid}, {name(decode)} of {decode.cluster_uid}"
    return None


def other_fingerprint(prefill: RankCard, decode: RankCard) -> str | None:
    """L7: the fingerprints differ, with the first field that does."""
    if prefill.fingerprint == decode.fingerprint:
        return None
    pairs = [
        (field, getattr(prefill.model, field), getattr(decode.model, field))
        for field in type(prefill.model).model_fields
    ]
    pairs.append(("KV dtype", prefill.layout.kv_dtype, decode.layout.kv_dtype))
    pairs.append(("page size", prefill.layout.page_tokens, decode.layout.page_tokens))
    for field, ours, theirs in pairs:
        if ours != theirs:
            return f"{name(prefill)} has {field} {ours!r}, {name(decode)} has {theirs!r}"
    return f"{name(prefill)} has fingerprint {prefill.fingerprint}, {name(decode)} {decode.fingerprint}"


def unmapped(prefill: RankCard, decode: RankCard) -> str | None:
    """L4: first region that two meeting ranks can not map onto each other. None for ranks that
    exchange nothing."""
    p, d = prefill.layout, decode.layout
    if (p.heads is None) != (d.heads is None):
        whole, split = (prefill, decode) if p.heads is None else (decode, prefill)
        return f"{name(whole)} holds whole rows, {name(split)} a slice of heads"
    if p.heads and d.heads and p.heads.total != d.heads.total:
        return f"{name(prefill)} counts {p.heads.total} KV heads, {name(decode)} {d.heads.total}"
    if p.page_tokens != d.page_tokens:
        return f"{name(prefill)} has page size {p.page_tokens}, {name(decode)} {d.page_tokens}"
    if not meet(p, d):
        return None
    ours, theirs = _items(p), _items(d)
    kinds = _kinds(ours), _kinds(theirs)
    for layer in sorted(set(kinds[0]) & set(kinds[1])):
        if kinds[0][layer] != kinds[1][layer]:
            shown = ["+".join(sorted(k.value for k in side[layer])) for side in kinds]
            return f"layer {layer} is {shown[0]} on {name(prefill)} and {shown[1]} on {name(decode)}"
    for key in sorted(set(ours) & set(theirs)):
        layer, kind, _ = key
        sizes = _per_head(ours[key], kind, p), _per_head(theirs[key], kind, d)
        if len(sizes[0] | sizes[1]) > 1:
            what = "bytes per token and head" if kind in (RegionKind.KEY, RegionKind.VALUE) else "bytes per item"
            return (
                f"layer {layer} {kind.value} has {_numbers(sizes[0])} {what} on {name(prefill)} and "
                f"{_numbers(sizes[1])} on {name(decode)}"
            )
        # Beside latent rows every rank holds the same state (its sizes are equal then), and one copy serves all.
        if kind is RegionKind.STATE and p.heads and p.coordinates.tp_size != d.coordinates.tp_size:
            return (
                f"layer {layer} keeps state, which is not sliced: attention TP is {p.coordinates.tp_size} on "
                f"{name(prefill)} and {d.coordinates.tp_size} on {name(decode)}"
            )
    return None


Key = tuple[int, RegionKind, bool]


def _items(layout: RankLayout) -> dict[Key, set[int]]:
    """Item sizes by what must match; a layer may lie in device and host memory at once."""
    found: dict[Key, set[int]] = {}
    for region in layout.regions:
        found.setdefault(region.key, set()).add(region.item_bytes)
    return found


def _kinds(items: dict[Key, set[int]]) -> dict[int, set[RegionKind]]:
    """Region kinds of each layer, draft layers not counted."""
    found: dict[int, set[RegionKind]] = {}
    for layer, kind, draft in items:
        if not draft:
            found.setdefault(layer, set()).add(kind)
    return found


def _per_head(sizes: set[int], kind: RegionKind, layout: RankLayout) -> set[float]:
    """K and V per token and head, so that two head counts compare; other kinds as they are."""
    if layout.heads is None or kind not in (RegionKind.KEY, RegionKind.VALUE):
        return {float(s) for s in sizes}
    return {s / (layout.page_tokens * layout.heads.count) for s in sizes}


def _numbers(sizes: set[float]) -> str:
    return " and ".join(f"{s:g}" for s in sorted(sizes))
