"""What a rank's card says of its model, its engine and its place, read back from the running SGLang."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pdtransfer.contract.base import Backend, EngineType, Role
from pdtransfer.contract.card import EngineFacts, RankCard
from pdtransfer.contract.fingerprint import ModelIdentity
from pdtransfer.contract.geometry import GeometryError, dtype_bytes
from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout, RegionKind
from pdtransfer.engines.sglang.checkpoint import folder_digest
from pdtransfer.engines.sglang.layout import Stage, head_slice
from pdtransfer.engines.sglang.running import Told, running_settings
from pdtransfer.engines.sglang.settings import Settings
from pdtransfer.session.api import PoolRegion


@dataclass(frozen=True)
class ModelFacts:
    """Of the model that runs. `dtype` without "torch."; `heads` KV heads before replication, None for MLA; `settings`
    those that SGLang runs it with."""

    name: str
    revision: str
    dtype: str
    layers: int
    heads: int | None
    settings: Told = ()


def read_model(server_args: Any, latent: bool) -> ModelFacts:
    """From SGLang's own model configuration (kept with the arguments, read once a process)."""
    from sglang.srt.arg_groups.model_override_base import model_config_of

    config = model_config_of(server_args)
    path = str(server_args.model_path)
    named = str(getattr(server_args, "served_model_name", None) or path)
    revision = folder_digest(Path(path)) or str(getattr(server_args, "revision", None) or "")
    if named == path and Path(path).is_dir():
        # Where it is mounted says nothing about what it is, and may differ between the two sides.
        named = next(iter(getattr(config.hf_config, "architectures", None) or ()), "model")
    return ModelFacts(
        name=named,
        revision=revision,
        dtype=plain_dtype(config.dtype),
        layers=int(config.num_hidden_layers),
        heads=None if latent else int(config.get_total_num_kv_heads()),
        settings=running_settings(server_args),
    )


def plain_dtype(dtype: object) -> str:
    """A dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def kv_dtype(named: object, model: ModelFacts) -> str:
    """The KV dtype of KVArgs; `auto` is the model's."""
    name = plain_dtype(named)
    return model.dtype if name == "auto" else name


def stage_of(model: ModelFacts, at: RankCoordinates, first_layer: int | None) -> Stage:
    """The rank's pipeline stage. `first_layer` is known to prefill; decode's is computed as SGLang deals layers."""
    heads = None if model.heads is None else head_slice(at.tp, at.tp_size, model.heads)
    if first_layer is None:
        first_layer = 0
        if at.pp_size > 1:
            from sglang.srt.distributed.utils import get_pp_indices

            first_layer = int(get_pp_indices(model.layers, at.pp, at.pp_size)[0])
    return Stage(first_layer, heads, at.pp_size)


def new_incarnation() -> str:
    """One for an engine start."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class Place:
    """Where a rank is: `host` is the address that peers reach it at, `port` the engine's HTTP port."""

    role: Role
    host: str
    port: int
    bootstrap: str
    incarnation: str


def card_template(
    settings: Settings,
    place: Place,
    model: ModelFacts,
    at: RankCoordinates,
    heads: HeadSlice | None,
    regions: Sequence[PoolRegion],
    args: Any,
    speculation: str,
) -> RankCard:
    """The rank's card without what only its endpoint knows."""
    dtype, page = kv_dtype(args.kv_cache_dtype_str, model), int(args.page_size)
    drafts = any(r.draft for r in regions)
    dims = {kind: _dim(regions, kind, page, heads, dtype, model) for kind in (RegionKind.KEY, RegionKind.VALUE)}
    slots = [r.items for r in regions if not r.pool and not r.draft]
    return RankCard(
        cluster_uid=settings.cluster_uid,
        # Without an operator a place is its address: who comes back there takes the place of who was there.
        pod_uid=settings.pod_uid or f"{place.role.value}@{place.host}:{place.port}",
        pod_name=settings.pod_name or f"{place.host}:{place.port}",
        role=place.role,
        revision=settings.revision,
        incarnation=place.incarnation,
        model=ModelIdentity(
            name=model.name,
            revision=model.revision,
            dtype=model.dtype,
            layers=model.layers,
            total_kv_heads=model.heads,
            head_dim=dims[RegionKind.KEY],
            v_head_dim=dims[RegionKind.VALUE],
            kv_store_speculation=speculation if drafts else "",
        ),
        layout=RankLayout(
            page_tokens=page,
            kv_dtype=dtype,
            heads=heads,
            coordinates=at,
            emulated_vram=settings.emulated_vram,
        ),
        engine=EngineFacts(
            type=EngineType.SGLANG,
            version=installed("sglang"),
            backend=Backend.PDCLUSTER,
            nixl_version=installed("nixl"),
            speculative_algorithm=speculation,
            # Page 0 takes what padded requests write: SGLang's pools have it beside the tokens that they lend.
            max_total_tokens=max(0, min(slots, default=0) - 1) * page,
            settings=model.settings,
        ),
        agent_name="",
        bootstrap=place.bootstrap,
    )


def _dim(
    regions: Sequence[PoolRegion], kind: RegionKind, page: int, heads: HeadSlice | None, dtype: str, model: ModelFacts
) -> int | None:
    """Elements of one head of one token, from what was registered; None for rows without heads."""
    first = next((r for r in regions if r.kind == kind.value and not r.draft and not r.pool), None)
    if first is None or heads is None:
        return None
    try:
        row = page * heads.count * dtype_bytes(dtype, model.dtype)
    except GeometryError:
        return None
    return first.item_bytes // row if first.item_bytes % row == 0 else None


def installed(distribution: str) -> str:
    """Its version, empty without it."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
