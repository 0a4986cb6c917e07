"""Which ranks meet, against SGLang's own rank mapping (section 2 of the PD rules), written out again here."""

from __future__ import annotations

import itertools

import pytest

from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout, Region, RegionKind
from pdtransfer.contract.pairing import meet

SIZES = range(1, 17)
PAIRS = [(p, d) for p, d in itertools.product(SIZES, SIZES) if p % d == 0 or d % p == 0]


def sglang_targets(p: int, d: int, r: int, mla: bool) -> list[int]:
    """Prefill TP ranks that decode rank `r` asks, real ones only: the table of section 2."""
    if d == p:
        return [r]
    if d > p:
        return [r // (d // p)]
    ranks = list(range(r * (p // d), (r + 1) * (p // d)))
    return ranks[:1] if mla else ranks


def held(rank: int, tp: int, heads: int) -> set[int]:
    """Heads of a rank, as SGLang's QKV loader splits them."""
    if tp >= heads:
        return {rank * heads // tp}
    return set(range(rank * heads // tp, (rank + 1) * heads // tp))


def layout(rank: int, tp: int, heads: int | None, layers: range = range(2)) -> RankLayout:
    if heads is None:
        return RankLayout(
            page_tokens=16,
            kv_dtype="bfloat16",
            coordinates=RankCoordinates(tp=rank, tp_size=tp),
            regions=tuple(Region(layer=i, kind=RegionKind.LATENT, item_bytes=8, items=1) for i in layers),
        )
    mine = held(rank, tp, heads)
    return RankLayout(
        page_tokens=16,
        kv_dtype="bfloat16",
        heads=HeadSlice(first=min(mine), count=len(mine), total=heads),
        coordinates=RankCoordinates(tp=rank, tp_size=tp),
        regions=tuple(Region(layer=i, kind=RegionKind.KEY, item_bytes=8, items=1) for i in layers),
    )


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_every_decode_head_has_one_sender_and_it_is_one_sglang_asks(heads: int) -> None:
    splits = [n for n in SIZES if n % heads == 0 or heads % n == 0]
    checked = 0
    for p, d in PAIRS:
        if p not in splits or d not in splits:
            continue
        for r in range(d):
            senders = [s for s in range(p) if meet(layout(s, p, heads), layout(r, d, heads))]
            asked = sglang_targets(p, d, r, mla=False)
            assert set(senders) <= set(asked), (p, d, r)
            for head in held(r, d, heads):
                covering = [s for s in senders if head in held(s, p, heads)]
                assert len(covering) == 1, (p, d, r, head, covering)
            # Without replication on the source the two agree rank by rank.
            if p <= heads or d >= p:
                assert senders == asked, (p, d, r)
            checked += 1
    assert checked > 100


def test_a_latent_row_comes_from_the_first_rank_sglang_asks() -> None:
    for p, d in PAIRS:
        for r in range(d):
            senders = [s for s in range(p) if meet(layout(s, p, None), layout(r, d, None))]
            assert senders == sglang_targets(p, d, r, mla=True), (p, d, r)


def test_replicated_sources_share_the_decode_ranks() -> None:
    """8 -> 16 ranks with 4 KV heads: decode d takes from prefill d // 2 (transfer study)."""
    for r in range(16):
        assert [s for s in range(8) if meet(layout(s, 8, 4), layout(r, 16, 4))] == [r // 2]


def test_stages_meet_where_they_hold_a_common_layer() -> None:
    first, second = layout(0, 1, 8, range(4)), layout(0, 1, 8, range(4, 8))
    whole, middle = layout(0, 1, 8, range(8)), layout(0, 1, 8, range(3, 5))
    assert meet(first, whole) and meet(second, whole) and meet(first, middle) and meet(second, middle)
    assert not meet(first, second)
