"""Makers of facts and cards for the contract's tests. Sizes are written out by hand in the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import EngineType, MemoryKind, Role
from pdtransfer.contract.card import EngineFacts, RankCard
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.fingerprint import ModelIdentity
from pdtransfer.contract.geometry import AttentionKind, ModelGeometry
from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout, Region, RegionKind

GEOMETRIES = {
    "gqa8": ModelGeometry(attention=AttentionKind.GQA, layers=36, kv_heads=8, head_dim=64, dtype="bfloat16"),
    "gqa4": ModelGeometry(attention=AttentionKind.GQA, layers=36, kv_heads=4, head_dim=64, dtype="bfloat16"),
    "swa8": ModelGeometry(
        attention=AttentionKind.GQA,
        layers=36,
        kv_heads=8,
        head_dim=64,
        dtype="bfloat16",
        sliding_window_layers=tuple(range(0, 36, 2)),
    ),
    "linear": ModelGeometry(
        attention=AttentionKind.GQA,
        layers=48,
        kv_heads=2,
        head_dim=256,
        dtype="bfloat16",
        linear_layers=tuple(i for i in range(48) if (i + 1) % 4),
        ssm_dtype="float32",
    ),
    "qsa": ModelGeometry(
        attention=AttentionKind.GQA,
        layers=48,
        kv_heads=2,
        head_dim=256,
        dtype="bfloat16",
        linear_layers=tuple(i for i in range(48) if (i + 1) % 4),
        ssm_dtype="float32",
        compressed_index_heads=4,
        architecture="Qwen4ExpForConditionalGeneration",
    ),
    "kimi": ModelGeometry(
        attention=AttentionKind.MLA,
        layers=27,
        kv_heads=1,
        head_dim=576,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        dtype="bfloat16",
        linear_layers=tuple(i for i in range(27) if (i + 1) % 4),
        ssm_dtype="float32",
        architecture="KimiLinearForCausalLM",
    ),
    "mimo-swa": ModelGeometry(
        attention=AttentionKind.GQA,
        layers=48,
        kv_heads=4,
        head_dim=192,
        v_head_dim=128,
        swa_kv_heads=8,
        dtype="bfloat16",
        sliding_window_layers=tuple(i for i in range(48) if i % 6),
    ),
    "v4": ModelGeometry(
        attention=AttentionKind.DSA,
        layers=43,
        kv_heads=1,
        head_dim=512,
        index_head_dim=128,
        dtype="bfloat16",
        model_type="deepseek_v4",
        architecture="DeepseekV4ForCausalLM",
    ),
    "v41": ModelGeometry(
        attention=AttentionKind.DSA,
        layers=43,
        kv_heads=1,
        head_dim=512,
        index_head_dim=128,
        dtype="bfloat16",
        model_type="deepseek_v41",
        architecture="DeepseekV41ForCausalLM",
    ),
    "m3": ModelGeometry(
        attention=AttentionKind.GQA,
        layers=60,
        kv_heads=4,
        head_dim=128,
        dtype="bfloat16",
        model_type="minimax_m2",
        architecture="MiniMaxM3SparseForConditionalGeneration",
    ),
    "m3-values": ModelGeometry(
        attention=AttentionKind.GQA,
        layers=60,
        kv_heads=4,
        head_dim=128,
        dtype="bfloat16",
        architecture="MiniMaxM3SparseForCausalLM",
        index_values=True,
    ),
    "minicpm": ModelGeometry(
        attention=AttentionKind.GQA,
        layers=32,
        kv_heads=2,
        head_dim=128,
        dtype="bfloat16",
        architecture="MiniCPMSALAForCausalLM",
        minicpm_sparse=True,
    ),
    "glm5": ModelGeometry(
        attention=AttentionKind.DSA,
        layers=78,
        kv_heads=1,
        head_dim=576,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        dtype="bfloat16",
        architecture="Glm5NextForConditionalGeneration",
    ),
    "mimo": ModelGeometry(
        attention=AttentionKind.GQA, layers=48, kv_heads=4, head_dim=192, v_head_dim=128, dtype="bfloat16"
    ),
    "mla": ModelGeometry(
        attention=AttentionKind.MLA,
        layers=61,
        kv_heads=1,
        head_dim=576,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        dtype="bfloat16",
        model_type="deepseek_v3",
    ),
    "dsa": ModelGeometry(
        attention=AttentionKind.DSA,
        layers=61,
        kv_heads=1,
        head_dim=576,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        dtype="bfloat16",
        model_type="deepseek_v32",
    ),
}


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
