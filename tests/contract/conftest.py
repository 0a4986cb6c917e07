"""Makers of facts and cards for the contract's tests. Sizes are written out by hand in the tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import EngineType, MemoryKind, Role
from pdtransfer.contract.card import EngineFacts, RankCard
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.fingerprint import ModelIdentity
from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout, Region, RegionKind

sys.path.insert(0, str(Path(__file__).parent))

from geometries import GEOMETRIES


@pytest.fixture
def facts() -> Callable[..., RoleFacts]:
    """facts(role, model="gqa8", **changes): a role about which everything a spec can tell is known."""

    def make(role: Role, model: str | None = "gqa8", **changes: Any) -> RoleFacts:
        base: dict[str, Any] = {
            "role": role,
            "engine": EngineType.SGLANG,
            "engine_version": "0.5.23",
            "geometry": GEOMETRIES[model] if model else None,
            "model_name": "example/model",
            "model_dtype": "bfloat16",
            "page_size": 64,
            "kv_dtype": "bfloat16",
            "chunked_prefill_size": 8192,
            "host": "0.0.0.0",
            "accelerator": Accelerator.NVIDIA,
            "max_top_logprobs": 20,
        }
        return RoleFacts(**(base | changes)).with_launch_defaults()

    return make


@pytest.fixture
def pair(facts: Callable[..., RoleFacts]) -> Callable[..., tuple[RoleFacts, RoleFacts]]:
    """pair(model="gqa8", prefill={...}, decode={...}, **both)."""

    def make(
        model: str | None = "gqa8",
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        **both: Any,
    ) -> tuple[RoleFacts, RoleFacts]:
        d = facts(Role.DECODE, model, **(both | (decode or {})))
        # Prefill serves these decodes alone, unless the test says otherwise.
        served = {"decode_tp_sizes": {d.attention_tp} if d.attention_tp else None}
        return facts(Role.PREFILL, model, **(served | both | (prefill or {}))), d

    return make


@pytest.fixture
def engine_cards() -> Callable[..., list[RankCard]]:
    """engine_cards(role, tp, pp=1, ...): sealed cards of a small engine, 4 layers of 8 heads of 64
    dims, page 16: a K or V item is 16 * heads * 64 * element bytes."""

    def make(
        role: Role,
        tp: int = 1,
        pp: int = 1,
        *,
        layers: int = 4,
        heads: int = 8,
        page: int = 16,
        kv_dtype: str = "bfloat16",
        element: int = 2,
        memory: tuple[MemoryKind | None, ...] = (MemoryKind.VRAM,),
        latent: bool = False,
        backend: Any = "PDCluster",
        spec: str = "",
        name: str = "example/model",
        version: str = "0.5.23",
        incarnation: str = "i1",
    ) -> list[RankCard]:
        cards = []
        for s in range(pp):
            for r in range(tp):
                if latent:
                    slice_ = None
                    kinds = [(RegionKind.LATENT, page * 576 * element)]
                else:
                    count = max(1, heads // tp)
                    first = r * count if tp <= heads else r // (tp // heads)
                    slice_ = HeadSlice(first=first, count=count, total=heads)
                    item = page * count * 64 * element
                    kinds = [(RegionKind.KEY, item), (RegionKind.VALUE, item)]
                regions = tuple(
                    Region(layer=layer, kind=kind, item_bytes=item, items=33, memory=m)
                    for layer in range(s * layers // pp, (s + 1) * layers // pp)
                    for kind, item in kinds
                    for m in memory
                )
                cards.append(
                    RankCard(
                        cluster_uid="c1",
                        pod_uid=f"{role.value}-pod",
                        role=role,
                        incarnation=incarnation,
                        model=ModelIdentity(
                            name=name,
                            dtype="bfloat16",
                            layers=layers,
                            total_kv_heads=None if latent else heads,
                            head_dim=None if latent else 64,
                            kv_store_speculation=spec,
                        ),
                        layout=RankLayout(
                            page_tokens=page,
                            kv_dtype=kv_dtype,
                            heads=slice_,
                            coordinates=RankCoordinates(tp=r, tp_size=tp, pp=s, pp_size=pp),
                            regions=regions,
                        ),
                        engine=EngineFacts(type=EngineType.SGLANG, version=version, backend=backend),
                        agent_name=f"{role.value}-{s}-{r}",
                    ).sealed()
                )
        return cards

    return make
