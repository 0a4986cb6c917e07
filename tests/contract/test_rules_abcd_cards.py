"""PDCluster's column about state (D1 to D3, A9, A13) beside what the mover really plans for SGLang's own lists.

Lists are as SGLang's KVArgs has them, read by the backend's own reader; no SGLang is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdtransfer.contract.base import Backend, EngineType, MemoryKind, Role
from pdtransfer.contract.card import EngineFacts, RankCard
from pdtransfer.contract.compat import Status, check, check_cards
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.fingerprint import ModelIdentity
from pdtransfer.contract.geometry import AttentionKind, ModelGeometry, from_hf_config
from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout, Region, RegionKind
from pdtransfer.contract.pairing import meet
from pdtransfer.engines.sglang.layout import BadLayout, Stage, pool_regions
from pdtransfer.errors import LayoutMismatch
from pdtransfer.plan.match import RegionPair, region_pairs

PAGE, DIM, HEADS = 16, 64, 8
LAYERS = 4


def held(tp: int, heads: int = HEADS) -> int:
    return max(1, heads // tp)


def kv_args(tp: int, kind: str) -> SimpleNamespace:
    """One rank of a model of 4 layers: `swa` (two slide), `swa-other` (sliding heads twice as many), `mamba` (two keep
    recurrent state), `mla-state` (latent rows and a whole state component)."""
    item = PAGE * held(tp) * DIM * 2
    kv = [PAGE * 576 * 2] * 2 if kind == "mla-state" else [item] * 4
    state: dict[str, tuple[str, list[int]]] = {
        "swa": ("swa", [item] * 4),
        "swa-other": ("swa", [PAGE * held(tp, 2 * HEADS) * DIM * 2] * 4),
        "mamba": ("mamba", [4096 // tp, 4096 // tp, 1 << 15, 1 << 15]),
        "mla-state": ("swa_ring", [8192] * 2),
    }
    name, sizes = state[kind]
    return SimpleNamespace(
        kv_data_ptrs=[(1 << 32) + (n << 28) for n in range(len(kv))],
        kv_data_lens=[size * 8 for size in kv],
        kv_item_lens=kv,
        kv_layer_ids=[0, 2] * 2 if kind == "mamba" else [],
        num_draft_entries=0,
        state_types=[name],
        state_data_ptrs=[[(1 << 40) + (n << 28) for n in range(len(sizes))]],
        state_data_lens=[[size * 8 for size in sizes]],
        state_item_lens=[sizes],
        state_layer_ids=[[1, 3, 1, 3]] if kind == "mamba" else [[]],
        swa_kv_cache_layout="nhd" if name == "swa" else None,
    )


def cards(role: Role, tp: int, kind: str, cp: int = 1) -> list[RankCard]:
    found = []
    for c in range(cp):
        for r in range(tp):
            heads = None if kind == "mla-state" else HeadSlice(first=r * HEADS // tp, count=held(tp), total=HEADS)
            made = pool_regions(kv_args(tp, kind), Stage(0, heads), lambda _: MemoryKind.VRAM)
            regions = tuple(
                Region(
                    layer=one.layer,
                    kind=RegionKind(one.kind),
                    item_bytes=one.item_bytes,
                    items=one.items,
                    memory=MemoryKind(one.memory),
                    address=one.address,
                    pool=one.pool,
                )
                for one in made
            )
            found.append(
                RankCard(
                    cluster_uid="c",
                    pod_uid=role.value,
                    role=role,
                    incarnation="i",
                    model=ModelIdentity(
                        name="m",
                        dtype="bfloat16",
                        layers=LAYERS,
                        total_kv_heads=heads and HEADS,
                        head_dim=heads and DIM,
                    ),
                    layout=RankLayout(
                        page_tokens=PAGE,
                        kv_dtype="bfloat16",
                        heads=heads,
                        coordinates=RankCoordinates(tp=r, tp_size=tp, cp=c, cp_size=cp),
                        regions=regions,
                    ),
                    engine=EngineFacts(type=EngineType.SGLANG, version="0.5.23", backend=Backend.PDCLUSTER),
                    agent_name=f"{role.value}{c}{r}",
                ).sealed()
            )
    return found


def planned(prefill: list[RankCard], decode: list[RankCard]) -> list[RegionPair]:
    return [
        pair
        for p in prefill
        for d in decode
        if meet(p.layout, d.layout)
        for pair in region_pairs(p.layout, d.layout, None, None)
    ]


GEOMETRY: dict[str, dict[str, Any]] = {
    "swa": {"attention": AttentionKind.GQA, "sliding_window_layers": (1, 3)},
    "swa-other": {"attention": AttentionKind.GQA, "sliding_window_layers": (1, 3), "swa_kv_heads": 2 * HEADS},
    "mamba": {"attention": AttentionKind.GQA, "linear_layers": (1, 3), "ssm_dtype": "float32"},
}


@pytest.mark.parametrize("kind", list(GEOMETRY))
@pytest.mark.parametrize(("p", "d"), [(2, 2), (1, 4), (4, 2), (8, 16)])
def test_state_fits_by_the_rules_where_the_mover_plans_it(kind: str, p: int, d: int) -> None:
    geometry = ModelGeometry(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16", **GEOMETRY[kind])
    common: dict[str, Any] = {"geometry": geometry, "page_size": PAGE, "kv_dtype": "bfloat16"}
    report = check(
        RoleFacts(role=Role.PREFILL, tensor_parallel=p, **common).with_launch_defaults(),
        RoleFacts(role=Role.DECODE, tensor_parallel=d, **common).with_launch_defaults(),
        Backend.PDCLUSTER,
    )
    before = [f.rule for f in report.of(Status.FAIL) if f.rule[0] in "AD"]
    sides = cards(Role.PREFILL, p, kind), cards(Role.DECODE, d, kind)
    after = [f.rule for f in check_cards(*sides).of(Status.FAIL)]
    try:
        pairs = planned(*sides)
    except LayoutMismatch:
        pairs = []
    assert bool(before) == bool(after) == (not pairs), (before, after)
    if pairs:
        # Each byte of every decode rank's regions comes from one place.
        wanted = sum(r.item_bytes for card in sides[1] for r in card.layout.regions)
        assert sum(pair.length * max(1, pair.rows) for pair in pairs) == wanted


def test_windows_of_equal_rows_are_cut_by_head() -> None:
    pairs = planned(cards(Role.PREFILL, 2, "swa"), cards(Role.DECODE, 4, "swa"))
    windows = [pair for pair in pairs if pair.source.pool == "swa.0"]
    # 4 decode ranks x 2 sliding layers x K and V; 2 heads of 64 dims in 2 bytes.
    assert len(windows) == 16 and {(pair.rows, pair.length) for pair in windows} == {(PAGE, 2 * DIM * 2)}


def test_state_beside_latent_rows_goes_to_every_decode_rank_once() -> None:
    sides = cards(Role.PREFILL, 2, "mla-state"), cards(Role.DECODE, 4, "mla-state")
    assert [f.rule for f in check_cards(*sides).of(Status.FAIL)] == []
    pairs = planned(*sides)
    assert len(pairs) == 4 * (2 + 2) and all(pair.rows == 0 for pair in pairs)


def test_stages_without_layer_ids_are_refused_by_the_backend() -> None:
    """A9: the reader stops the engine at its start."""
    heads = HeadSlice(first=0, count=HEADS, total=HEADS)
    with pytest.raises(BadLayout, match="pipeline stages"):
        pool_regions(kv_args(1, "swa"), Stage(2, heads, stages=2), lambda _: MemoryKind.VRAM)
    pool_regions(kv_args(1, "mamba"), Stage(2, heads, stages=2), lambda _: MemoryKind.VRAM)


def test_the_first_context_parallel_rank_sends_alone() -> None:
    prefill, decode = cards(Role.PREFILL, 2, "swa", cp=2), cards(Role.DECODE, 2, "swa")
    assert [f.rule for f in check_cards(prefill, decode).of(Status.FAIL)] == []
    asked = [(p.layout.coordinates.cp, p.layout.coordinates.tp) for p in prefill if meet(p.layout, decode[1].layout)]
    assert asked == [(0, 1)]


def config(**more: Any) -> dict[str, Any]:
    return {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, **more}


def test_configs_tell_the_families_that_rules_ask_for() -> None:
    v4 = from_hf_config(config(architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", index_head_dim=128))
    assert (v4.attention, v4.latent, v4.kv_heads, v4.kv_lora_rank) == (AttentionKind.DSA, True, 1, None)
    sparse = {"sparse_attention_freq": [0, 1, 1, 1], "sparse_disable_index_value": [0, 1, 0, 1]}
    m3 = from_hf_config(
        {
            "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
            "model_type": "minimax_m3_vl",
            "text_config": config(model_type="minimax_m2", sparse_attention_config=sparse),
        }
    )
    assert (m3.architecture, m3.index_values) == ("MiniMaxM3SparseForConditionalGeneration", True)
    qwen = from_hf_config(config(full_attention_interval=4, indexer_n_heads=4, mamba_ssm_dtype="bfloat16"))
    assert (qwen.compressed_index_heads, qwen.ssm_dtype, qwen.linear_layers) == (4, "bfloat16", (0, 1, 2))
    assert from_hf_config(config(full_attention_interval=4)).ssm_dtype == "float32"
    sala = from_hf_config(config(sparse_config={"topk": 64}, mixer_types=["lightning", "minicpm4"]))
    assert sala.minicpm_sparse and not from_hf_config(config()).minicpm_sparse
