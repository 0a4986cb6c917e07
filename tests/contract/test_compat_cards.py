"""The rules on real layouts: facts from cards, whole engines, and one pair of ranks at the handshake."""

from __future__ import annotations

from typing import Any

import pytest
from rules_kit import Cards, Pair, failed

from pdtransfer.contract.base import Backend, MemoryKind, Role
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.compat import Report, Status, check_cards, check_rank_pair, facts_from_cards
from pdtransfer.contract.facts import HostKVMode
from pdtransfer.contract.geometry import AttentionKind
from pdtransfer.contract.layout import HeadSlice, Region, RegionKind

P, D = Role.PREFILL, Role.DECODE


def message(report: Report, rule: str) -> str:
    finding = report.finding(rule)
    assert finding is not None and finding.status is Status.FAIL, (rule, finding)
    return finding.message


def relaid(card: RankCard, **layout: Any) -> RankCard:
    return card.model_copy(update={"layout": card.layout.model_copy(update=layout)}).sealed()


def with_region(card: RankCard, index: int, **region: Any) -> RankCard:
    regions = list(card.layout.regions)
    regions[index] = regions[index].model_copy(update=region)
    return relaid(card, regions=tuple(regions))


def test_facts_are_read_back_from_cards(engine_cards: Cards) -> None:
    f = facts_from_cards(engine_cards(D, 4, 2, memory=(MemoryKind.VRAM, MemoryKind.DRAM)))
    assert (f.role, f.tensor_parallel, f.pipeline_parallel, f.page_size, f.kv_dtype) == (D, 4, 2, 16, "bfloat16")
    assert (f.model_name, f.engine_version, f.layers) == ("example/model", "0.5.23", (0, 1, 2, 3))
    # 8 ranks of 2 layers, K and V, twice.
    assert (f.segments, f.regions_without_memory_kind) == (64, 0)
    assert f.memory_kinds == {MemoryKind.VRAM, MemoryKind.DRAM} and f.observed
    assert f.geometry and (f.geometry.kv_heads, f.geometry.head_dim, f.geometry.layers) == (8, 64, 4)
    assert f.staging_buffer is None and f.host is None


def test_a_latent_region_tells_mla_and_an_index_dsa(engine_cards: Cards) -> None:
    mla = engine_cards(D, 2, latent=True)
    f = facts_from_cards(mla)
    assert f.geometry and f.geometry.attention is AttentionKind.MLA
    index = Region(layer=0, kind=RegionKind.INDEX, item_bytes=2112, items=33, memory=MemoryKind.VRAM)
    dsa = facts_from_cards([relaid(mla[0], regions=(*mla[0].layout.regions, index))])
    assert dsa.geometry and dsa.geometry.attention is AttentionKind.DSA


def test_the_spec_tells_what_cards_do_not(engine_cards: Cards, pair: Pair) -> None:
    spec, _ = pair(page_size=32, staging_buffer=True, host_kv=HostKVMode.OFF)
    f = facts_from_cards(engine_cards(P, 2), spec)
    assert (f.page_size, f.page_size_requested, f.staging_buffer, f.tensor_parallel) == (16, 32, True, 2)


def with_windows(cards: list[RankCard]) -> list[RankCard]:
    """These cards with layers 0 and 2 in a pool of their own."""

    def of(card: RankCard) -> RankCard:
        regions = tuple(r.model_copy(update={"pool": "swa"}) if r.layer in (0, 2) else r for r in card.layout.regions)
        return card.model_copy(update={"layout": card.layout.model_copy(update={"regions": regions})}).sealed()

    return [of(card) for card in cards]


def test_a_stated_geometry_serves_both_sides_and_a_wrong_one_is_a_warning(engine_cards: Cards, pair: Pair) -> None:
    """One side of an older revision, whose spec is gone: its cards are not held against the other's spec."""
    spec, _ = pair("swa8", page_size=16)
    assert spec.geometry is not None
    stated = spec.geometry.model_copy(update={"layers": 4, "sliding_window_layers": (0, 2)})
    told = spec.model_copy(update={"geometry": stated, "decode_tp_sizes": None})
    cards = engine_cards(P, 2), engine_cards(D, 2)
    assert check_cards(*cards, prefill_spec=told).verdict is Status.PASS
    apart = with_windows(engine_cards(P, 2)), with_windows(engine_cards(D, 4))
    assert failed(check_cards(*apart, Backend.NIXL, prefill_spec=told)) == ["D2"]
    # What the engine keeps in its one pool has no windows, whatever the model's config calls it.
    one_pool = engine_cards(P, 2), engine_cards(D, 4)
    assert failed(check_cards(*one_pool, Backend.NIXL, prefill_spec=told)) == []
    wrong = spec.model_copy(update={"geometry": stated.model_copy(update={"kv_heads": 4})})
    report = check_cards(*cards, prefill_spec=wrong)
    finding = report.finding("L8")
    assert report.verdict is Status.WARN and finding
    assert "kv_heads is stated as 4, the engine has 8" in finding.message


def test_no_cards_are_an_error_or_unknown(engine_cards: Cards) -> None:
    with pytest.raises(ValueError, match="no cards"):
        facts_from_cards([])
    report = check_cards([], engine_cards(D))
    assert report.verdict is Status.UNKNOWN and report.findings[0].needs == "prefill.cards"


@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 4), (4, 2), (8, 16), (16, 8)])
@pytest.mark.parametrize("latent", [False, True])
def test_equal_models_at_any_divisible_tp_fit(engine_cards: Cards, p: int, d: int, latent: bool) -> None:
    report = check_cards(engine_cards(P, p, latent=latent), engine_cards(D, d, latent=latent))
    assert report.verdict is Status.PASS, report.first_failure


def test_pipeline_stages_fit_by_layer_id(engine_cards: Cards) -> None:
    assert check_cards(engine_cards(P, 2, 4), engine_cards(D, 4, 4)).verdict is Status.PASS
    between = check_cards(engine_cards(P, 2, 4), engine_cards(D, 4, 2)).first_failure
    assert between and between.rule == "A8"  # SGLang's common classes map no such stages
    ours = check_cards(engine_cards(P, 2, 4), engine_cards(D, 2))
    assert ours.verdict is Status.PASS
    nixl = check_cards(engine_cards(P, 2, 4, backend="NIXL"), engine_cards(D, 2, backend="NIXL"))
    assert failed(nixl) == ["A9"]


def test_unequal_tp_into_host_memory_on_real_layouts(engine_cards: Cards) -> None:
    memory = (MemoryKind.DRAM,)
    assert check_cards(engine_cards(P, 4), engine_cards(D, 2, memory=memory)).verdict is Status.PASS
    nixl = check_cards(
        engine_cards(P, 4, backend="NIXL"), engine_cards(D, 2, memory=memory, backend="NIXL"), Backend.NIXL
    )
    assert failed(nixl) == ["F3"]


def test_a_stale_card_is_never_wired(engine_cards: Cards) -> None:
    p = engine_cards(P)
    partly = with_region(engine_cards(D)[0], 3, memory=None)
    assert "1 of 8 KV regions" in message(check_cards(p, [partly]), "F7")
    empty = relaid(engine_cards(D)[0], regions=())
    report = check_cards(p, [empty])
    assert "decode registered no KV memory segments" in message(report, "F8")
    assert "F8" in failed(check_rank_pair(p[0], empty)) and "F7" in failed(check_rank_pair(p[0], partly))


def test_a_broken_seal_is_refused(engine_cards: Cards) -> None:
    p, d = engine_cards(P)[0], engine_cards(D)[0]
    forged = d.model_copy(update={"layout": d.layout.model_copy(update={"page_tokens": 32})})
    assert "decode rank 0" in message(check_rank_pair(p, forged), "L1")
    unsealed = d.model_copy(update={"fingerprint": ""})
    assert "(none)" in message(check_cards([p], [unsealed]), "L1")


def test_cards_of_one_engine_must_agree(engine_cards: Cards) -> None:
    p, d = engine_cards(P, 2), engine_cards(D, 2)
    for change, text in (
        ({"incarnation": "i2"}, "incarnation i1"),
        ({"cluster_uid": "c2"}, "PDCluster c1"),
        ({"engine": d[1].engine.model_copy(update={"version": "0.5.24"})}, "engine version 0.5.23"),
    ):
        odd = [d[0], d[1].model_copy(update=change).sealed()]
        assert text in message(check_cards(p, odd), "L2")
    other_page = [d[0], relaid(d[1], page_tokens=32)]
    assert "page size 16" in message(check_cards(p, other_page), "L2")


def test_a_missing_or_doubled_rank_is_a_gap(engine_cards: Cards) -> None:
    p, d = engine_cards(P, 4), engine_cards(D, 4)
    assert "rank 2 of 4 shows no card" in message(check_cards(p, [*d[:2], d[3]]), "L3")
    assert "2 cards stand under rank 1" in message(check_cards(p, [*d, d[1]]), "L3")


def test_heads_must_be_covered_equally(engine_cards: Cards) -> None:
    p, d = engine_cards(P, 4), engine_cards(D, 4)
    lost = [*d[:3], relaid(d[3], heads=HeadSlice(first=4, count=2, total=8))]
    # Heads 4 and 5 are there twice and 6 and 7 not at all: 8 held of 8.
    assert "KV head 4 of 8 is held by 2 ranks" in message(check_cards(p, lost), "L3")
    beyond = [*d[:3], relaid(d[3], heads=HeadSlice(first=7, count=2, total=8))]
    assert "KV heads 7..8 of 8" in message(check_cards(p, beyond), "L3")
    mixed = [*d[:3], relaid(d[3], heads=None)]
    assert "whole rows" in message(check_cards(p, mixed), "L3")
    other_total = [*d[:3], relaid(d[3], heads=HeadSlice(first=6, count=2, total=16))]
    assert "8 and of 16" in message(check_cards(p, other_total), "L3")


def test_numbers_that_a_card_makes_up_cost_nothing(engine_cards: Cards) -> None:
    p, d = engine_cards(P)[0], engine_cards(D)[0]
    huge = 2**40
    at = d.layout.coordinates.model_copy(update={"tp_size": huge})
    assert f"rank 1 of {huge} shows no card" in message(check_cards([p], [relaid(d, coordinates=at)]), "L3")
    heads = HeadSlice(first=0, count=huge, total=huge)
    assert f"{huge} KV heads in total" in message(check_cards([p], [relaid(d, heads=heads)]), "L3")
    deep = d.model_copy(update={"model": d.model.model_copy(update={"layers": huge})}).sealed()
    assert f"layer 4 of {huge}" in message(check_cards([p], [deep]), "L3")
    outside = d.layout.coordinates.model_copy(update={"tp": 5})
    assert "rank 5 is outside the engine's 1" in message(check_cards([p], [relaid(d, coordinates=outside)]), "L3")


def test_layers_must_be_covered(engine_cards: Cards, pair: Pair) -> None:
    p, d = engine_cards(P), engine_cards(D)
    short = relaid(d[0], regions=d[0].layout.regions[:-2])
    assert "layer 3 of 4 has no region" in message(check_cards(p, [short]), "L3")
    # A layer that owns no KV by the spec's geometry may be absent.
    spec_p, spec_d = pair()
    geometry = spec_p.geometry.model_copy(update={"layers": 4, "kvless_layers": (3,)}) if spec_p.geometry else None
    known = {"geometry": geometry, "page_size": 16}
    report = check_cards(
        [relaid(p[0], regions=p[0].layout.regions[:-2])],
        [short],
        prefill_spec=spec_p.model_copy(update=known),
        decode_spec=spec_d.model_copy(update=known),
    )
    assert report.verdict is Status.PASS, report.first_failure


def test_item_sizes_must_follow_from_heads_and_dtype(engine_cards: Cards) -> None:
    p, d = engine_cards(P)[0], engine_cards(D)[0]
    # 16 tokens x 8 heads x 64 dims x 2 bytes = 16384.
    text = message(check_rank_pair(p, with_region(d, 0, item_bytes=8192)), "L5")
    assert "8192" in text and "16384" in text
    assert "not a multiple" in message(check_rank_pair(p, with_region(d, 0, item_bytes=16383)), "L5")
    headless = relaid(d, heads=None)
    assert "no head slice" in message(check_rank_pair(p, headless), "L5")


def test_regions_that_do_not_map_name_both_sides(engine_cards: Cards) -> None:
    p, d = engine_cards(P)[0], engine_cards(D)[0]
    text = message(check_rank_pair(p, with_region(d, 0, item_bytes=8192)), "L4")
    assert "layer 0 K has 128 bytes per token and head on prefill" in text and "64 on decode" in text
    missing = relaid(d, regions=d.layout.regions[1:])
    assert "layer 0 is K+V on prefill rank 0 of prefill-pod and V on" in message(check_rank_pair(p, missing), "L4")
    total = relaid(d, heads=HeadSlice(first=0, count=8, total=16))
    assert "counts 8 KV heads" in message(check_rank_pair(p, total), "L4")
    latent = engine_cards(D, latent=True)[0]
    assert "whole rows" in message(check_rank_pair(p, latent), "L4")


def test_dsa_row_layouts_that_differ_are_found_on_the_cards(engine_cards: Cards) -> None:
    """Rule B6: a prefill with raw 576-byte rows and a decode with 656-byte rows."""
    p = engine_cards(P, latent=True, kv_dtype="fp8_e4m3", element=1)[0]
    d = engine_cards(D, latent=True, kv_dtype="fp8_e4m3", element=1)[0]
    rows = tuple(r.model_copy(update={"item_bytes": 16 * 656}) for r in d.layout.regions)
    text = message(check_rank_pair(p, relaid(d, regions=rows)), "L4")
    assert "9216 bytes per item" in text and "10496" in text


def test_state_is_not_sliced(engine_cards: Cards) -> None:
    def with_state(cards: list[RankCard]) -> list[RankCard]:
        region = Region(layer=0, kind=RegionKind.STATE, item_bytes=4096, items=8, memory=MemoryKind.VRAM)
        return [relaid(c, regions=(*c.layout.regions, region)) for c in cards]

    equal = check_cards(with_state(engine_cards(P, 2)), with_state(engine_cards(D, 2)))
    assert equal.verdict is Status.PASS, equal.first_failure
    unequal = check_cards(with_state(engine_cards(P, 2)), with_state(engine_cards(D, 4)))
    assert "keeps state, which is not sliced" in message(unequal, "L4")


def test_the_handshake_names_the_model_difference(engine_cards: Cards) -> None:
    p = engine_cards(P)[0]
    other = check_rank_pair(p, engine_cards(D, name="example/other")[0])
    assert failed(other) == ["B7", "L7"]
    assert "'example/model'" in message(other, "L7") and "'example/other'" in message(other, "L7")
    spec = check_rank_pair(p, engine_cards(D, spec="EAGLE3")[0])
    assert failed(spec) == ["C1", "L7"]


def test_the_handshake_refuses_other_roles_clusters_versions_and_backends(engine_cards: Cards) -> None:
    p, d = engine_cards(P)[0], engine_cards(D)[0]
    assert "prefill rank and the destination a prefill rank" in message(check_rank_pair(p, p), "L6")
    assert "PDCluster c1" in message(check_rank_pair(p, d.model_copy(update={"cluster_uid": "c9"})), "L6")
    assert "V1" in failed(check_rank_pair(p, engine_cards(D, version="0.5.24")[0]))
    assert "H1" in failed(check_rank_pair(p, engine_cards(D, backend="NIXL")[0]))


def test_ranks_of_different_stages_pass_at_the_handshake(engine_cards: Cards) -> None:
    first, last = engine_cards(P, 2, 2)[0], engine_cards(D, 2, 2)[3]
    assert check_rank_pair(first, last).verdict is Status.PASS
