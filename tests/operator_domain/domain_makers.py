"""Makers of raw specs and sealed cards for the domain's tests."""

from __future__ import annotations

from typing import Any

from pdtransfer.contract.base import EngineType, MemoryKind, Role
from pdtransfer.contract.card import EngineFacts, RankCard
from pdtransfer.contract.fingerprint import ModelIdentity
from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout, Region, RegionKind

UID = "11111111-2222-3333-4444-555555555555"
LAYERS, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 16, 16


def quickstart(**changes: Any) -> dict[str, Any]:
    """Raw spec: prefill at TP 2, two decode replicas at TP 1, over TCP."""
    raw: dict[str, Any] = {
        "model": {
            "servedName": "tiny",
            "volume": {"configMap": {"name": "tiny"}},
            "geometry": {"attention": "GQA", "layers": 4, "kvHeads": 2, "headDim": 16, "dtype": "float32"},
        },
        "engine": {"type": "Reference", "image": "pd:1"},
        "kvCache": {"pageSize": 16, "dtype": "float32"},
        "transfer": {"backend": "PDCluster", "image": "pd:1", "fabric": {"type": "TCP"}},
        "prefill": {"replicas": 1, "tensorParallelSize": 2},
        "decode": {"replicas": 2, "tensorParallelSize": 1},
        "router": {"type": "SMG", "replicas": 1},
    }
    for path, value in changes.items():
        at = raw
        *way, last = path.split("__")
        for step in way:
            at = at.setdefault(step, {})
        at[last] = value
    if raw["engine"].get("type") != "Reference" and not any(path.startswith("kvCache") for path in changes):
        raw["kvCache"]["dtype"] = "bfloat16"  # SGLang keeps no KV in float32
    return raw


def make_cards(
    pod_uid: str,
    role: Role,
    incarnation: str,
    tp: int,
    *,
    revision: str = "",
    model: str = "tiny",
    memory: MemoryKind | None = MemoryKind.DRAM,
    page: int = PAGE,
    devices: tuple[str, ...] = (),
) -> tuple[RankCard, ...]:
    """Sealed cards of one pod's ranks: GQA, 2 KV heads of 16, float32, 4 layers."""
    cards = []
    count = max(1, KV_HEADS // tp)
    for rank in range(tp):
        heads = HeadSlice(first=(rank * KV_HEADS // tp), count=count, total=KV_HEADS)
        regions = tuple(
            Region(layer=i, kind=kind, item_bytes=page * count * HEAD_DIM * 4, items=8, memory=memory)
            for kind in (RegionKind.KEY, RegionKind.VALUE)
            for i in range(LAYERS)
        )
        cards.append(
            RankCard(
                cluster_uid=UID,
                pod_uid=pod_uid,
                role=role,
                revision=revision,
                incarnation=incarnation,
                model=ModelIdentity(
                    name=model, dtype="float32", layers=LAYERS, total_kv_heads=KV_HEADS, head_dim=HEAD_DIM
                ),
                layout=RankLayout(
                    page_tokens=page,
                    kv_dtype="float32",
                    heads=heads,
                    coordinates=RankCoordinates(tp=rank, tp_size=tp),
                    regions=regions,
                ),
                engine=EngineFacts(type=EngineType.REFERENCE, version="0.1.0", max_total_tokens=128),
                agent_name=f"{pod_uid}-{incarnation}-{rank}",
                devices=devices,
            ).sealed()
        )
    return tuple(cards)
