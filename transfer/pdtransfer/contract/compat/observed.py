"""Facts read back from the cards of running ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pdtransfer.contract.card import RankCard
from pdtransfer.contract.facts import MAX_SIZE, RoleFacts
from pdtransfer.contract.geometry import AttentionKind, GeometryError, ModelGeometry, dtype_bytes
from pdtransfer.contract.layout import Region, RegionKind
from pdtransfer.contract.sglang_cli import card_facts


def facts_from_cards(
    cards: Sequence[RankCard], spec: RoleFacts | None = None, geometry: ModelGeometry | None = None
) -> RoleFacts:
    """Facts about one engine (a pod, or the pods of one multi-node group) from its ranks' cards.

    What a card does not tell stays unknown, or is taken from `spec`, the facts the engine was
    launched with. A stated geometry (the spec's, else `geometry`) tells more than a card does and
    is used unless the card contradicts it. ValueError without cards."""
    if not cards:
        raise ValueError("no cards to read facts from")
    card = cards[0]
    at = card.layout.coordinates
    regions = [region for c in cards for region in c.layout.regions]
    stages = {c.layout.coordinates.pp for c in cards}
    observed = {
        "role": card.role,
        "engine": card.engine.type,
        "engine_version": card.engine.version or None,
        "backend": card.engine.backend,
        "geometry": _geometry((spec.geometry if spec else None) or geometry, card),
        "model_name": card.model.name,
        "model_revision": card.model.revision or None,
        "model_dtype": card.model.dtype,
        "tensor_parallel": _size(at.tp_size * at.dp_size * at.cp_size),
        "pipeline_parallel": _size(at.pp_size),
        "attention_data_parallel": _size(at.dp_size),
        "context_parallel": _size(at.cp_size),
        "page_size": card.layout.page_tokens,
        "page_size_requested": spec.page_size if spec else None,
        "kv_dtype": card.layout.kv_dtype,
        "memory_kinds": frozenset(r.memory for r in regions if r.memory is not None),
        # One rank without regions is enough to lose its heads: the role then has none to speak of.
        "segments": len(regions) if all(c.layout.regions for c in cards) else 0,
        "regions_without_memory_kind": sum(r.memory is None for r in regions),
        "speculative_algorithm": card.engine.speculative_algorithm or card.model.kv_store_speculation,
        "nixl_backend": card.engine.nixl_plugin or None,
        "nixl_params": json.dumps(dict(card.engine.nixl_params)) if card.engine.nixl_params else "",
        "nixl_plugins": frozenset(card.engine.nixl_plugins) or (spec.nixl_plugins if spec else None),
        "max_total_tokens": card.engine.max_total_tokens,
        # What a stage holds of it is the whole draft: only the last one drafts.
        "draft_layers": len({r.layer for r in regions if r.draft}) if len(stages) == at.pp_size else None,
        "layers": tuple(sorted({r.layer for r in regions if not r.draft})) if len(stages) == at.pp_size else None,
        "observed": True,
    }
    # The engine has made its own choices already: they go before what it was asked for.
    told = card_facts(card.role, card.engine.settings)
    resolved = {name: value for name, value in told.items() if name not in observed} | {"resolved": bool(told)}
    if spec is None:
        return RoleFacts.model_validate(resolved | observed)
    return spec.model_copy(update=resolved | observed)


def _size(told: int) -> int:
    """No larger than facts may be: rule L3 says how many ranks are missing of a size that a card makes up."""
    return min(told, MAX_SIZE)


def contradiction(stated: ModelGeometry, card: RankCard) -> str | None:
    """What a stated geometry says otherwise than the running engine, with both values."""
    running = geometry_from_card(card)
    if running is None:
        return None
    # Layer patterns and latent dims are not told by a card.
    names = ("layers",) if running.latent else ("layers", "kv_heads", "head_dim", "value_dim")
    if running.latent != stated.latent:
        return f"attention is stated as {stated.attention.value}, the engine registered {running.attention.value} rows"
    for name in names:
        if getattr(stated, name) != getattr(running, name):
            return f"{name} is stated as {getattr(stated, name)}, the engine has {getattr(running, name)}"
    return None


def _geometry(stated: ModelGeometry | None, card: RankCard) -> ModelGeometry | None:
    if stated is None or contradiction(stated, card):
        return geometry_from_card(card)
    # Most models keep the KV of sliding layers in the one pool; the regions tell which.
    paged = {r.layer for r in card.layout.regions if r.kind is not RegionKind.STATE and not r.draft and not r.pool}
    if paged & set(stated.sliding_window_layers):
        left = tuple(i for i in stated.sliding_window_layers if i not in paged)
        return stated.model_copy(update={"sliding_window_layers": left})
    return stated


def geometry_from_card(card: RankCard) -> ModelGeometry | None:
    """What the card's model identity and regions tell of the geometry; None when too little.

    Layers whose only regions are state count as sliding-window layers: a card does not tell
    them from recurrent ones, and the spec's rules have seen the model."""
    layout, model = card.layout, card.model
    paged = {r.layer for r in layout.regions if r.kind is not RegionKind.STATE and not r.draft}
    state = {r.layer for r in layout.regions if r.kind is RegionKind.STATE and not r.draft}
    common = {
        "layers": model.layers,
        "sliding_window_layers": tuple(sorted(i for i in state - paged if i < model.layers)),
        "dtype": model.dtype,
    }
    latent = _first(card, RegionKind.LATENT)
    try:
        if latent is not None:
            width = model.head_dim or latent.item_bytes // layout.page_tokens
            index = _first(card, RegionKind.INDEX)
            kind = AttentionKind.MLA if index is None else AttentionKind.DSA
            return ModelGeometry(attention=kind, kv_heads=1, head_dim=width, **common)
        key = _first(card, RegionKind.KEY)
        total = model.total_kv_heads or (layout.heads.total if layout.heads else None)
        head_dim = model.head_dim
        if head_dim is None and key is not None and layout.heads is not None:
            element = dtype_bytes(layout.kv_dtype, model.dtype)
            head_dim = key.item_bytes // (layout.page_tokens * layout.heads.count * element)
        if total is None or head_dim is None:
            return None
        return ModelGeometry(
            attention=AttentionKind.GQA,
            kv_heads=total,
            head_dim=head_dim,
            v_head_dim=model.v_head_dim,
            **common,
        )
    except (GeometryError, ValueError):
        return None  # A nonsensical card: the layout rules say what is wrong with it.


def _first(card: RankCard, kind: RegionKind) -> Region | None:
    return next((r for r in card.layout.regions if r.kind is kind and not r.draft), None)
