"""Every mapping of ranks, heads, stages and page spaces, by every strategy, against a global KV that is
placed token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plan_runner
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from plan_runner import Run
from plan_world import Model, Part, Rank

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.layout import RankCoordinates, RegionKind
from pdtransfer.contract.pairing import meet
from pdtransfer.plan import PairPlan, Strategy, pair_plan
from pdtransfer.plan.lanes import STRATEGIES

K, V = RegionKind.KEY, RegionKind.VALUE
SLOT = 512

WIDER = [(n * k, n) for n in range(1, 9) for k in range(2, 17) if n * k <= 16]
TPS = {"n to 1": WIDER, "1 to n": [pair[::-1] for pair in WIDER], "n to n": [(n, n) for n in range(1, 17)]}
"""Prefill and decode TP up to 16 where one divides the other."""


def fits(heads: int, *sizes: int) -> bool:
    """Heads split evenly, or are replicated evenly, over each TP size."""
    return all(heads % n == 0 or n % heads == 0 for n in sizes)


def stages(parts: Sequence[Part], layers: int, count: int) -> list[list[Part]]:
    """Parts by pipeline stage, draft layers and page spaces of their own on the last one."""
    last = count - 1
    of = [last if p.draft or p.layer >= layers else p.layer * count // layers for p in parts]
    return [[p for p, s in zip(parts, of, strict=True) if s == stage] for stage in range(count)]


def engine(
    model: Model,
    split: list[list[Part]],
    tp: int,
    items: Mapping[str, int],
    rng: np.random.Generator,
    **options: Any,
) -> list[Rank]:
    return [
        Rank(
            model,
            RankCoordinates(tp=rank, tp_size=tp, pp=stage, pp_size=len(split)),
            parts,
            items,
            rng,
            **options,
        )
        for stage, parts in enumerate(split)
        for rank in range(tp)
    ]


def page_lists(data: st.DataObject, model: Model, items: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """A random place in the pool for each prompt page of each page space."""
    lists = {}
    for pool, count in model.pages.items():
        seed = data.draw(st.integers(0, 2**16), label=f"pages of {pool!r}")
        if data.draw(st.booleans(), label="a run"):
            first = seed % (items[pool] - count + 1)
            pages = list(range(first, first + count))
        else:
            pages = np.random.default_rng(seed).permutation(items[pool])[:count].tolist()
        lists[pool] = dict(enumerate(pages))
    return lists


def move(
    source: Sequence[Rank],
    target: Sequence[Rank],
    mine: Mapping[str, Mapping[int, int]],
    theirs: Mapping[str, Mapping[int, int]],
    wish: Strategy,
    chunk_pages: int,
    rng: np.random.Generator,
    **memory: MemoryKind | None,
) -> set[Strategy]:
    """Every prefill rank writes to every decode rank it meets; `wish` where the pair allows it."""
    used: set[Strategy] = set()
    for rank in target:
        for sender in source:
            if not meet(sender.layout, rank.layout):
                continue
            pair = pair_plan(sender.layout, rank.layout, **memory)
            strategy = chosen(pair, wish)
            used.add(strategy)
            run = Run(pair, sender, rank, strategy, rng, SLOT)
            for pool, wanted in theirs.items():
                prompt = sorted(wanted)
                for low in range(0, len(prompt), chunk_pages):
                    part = prompt[low : low + chunk_pages]
                    run.chunk(pool, part[0], [mine[pool][p] for p in part], [wanted[p] for p in part])
            moved = pair.nbytes(len(theirs[""]), {p: len(w) for p, w in theirs.items() if p})
            assert moved == sum(
                lane.unit * lane.regions * len(theirs[lane.pool]) for lane in pair.lanes if lane.pool in theirs
            )
    return used


def chosen(pair: PairPlan, wish: Strategy) -> Strategy:
    if pair.allowed(wish, SLOT) is None:
        return wish
    return "sliced" if pair.unequal else "direct"


def parts_of(data: st.DataObject, latent: bool, tokens: int, layers: int) -> list[Part]:
    """Regions of a model: K and V or latent rows, index rows, a draft layer, sliding-window layers and a
    state with page spaces of their own."""
    draw = data.draw
    dims = draw(st.sampled_from([(4, 2), (2, 2), (3, 5)]), label="K and V dims")
    window = draw(st.booleans(), label="sliding window layer")

    def layer_of(number: int, **more: Any) -> list[Part]:
        if latent:
            return [Part(number, RegionKind.LATENT, 5 * tokens, **more)]
        return [Part(number, K, dims[0], **more), Part(number, V, dims[1], **more)]

    parts: list[Part] = []
    index = draw(st.booleans(), label="index rows")
    for layer in range(layers):
        parts += layer_of(layer)
        parts += [Part(layer, RegionKind.INDEX, 3 * tokens)] * index
    parts += layer_of(0, draft=True) * draw(st.booleans(), label="draft layer")
    parts += layer_of(layers, pool="window") * window
    parts += [Part(layers + 1, RegionKind.STATE, 11, "state")] * draw(st.booleans(), label="state")
    return parts


@pytest.mark.parametrize("shape", ["n to 1", "1 to n", "n to n"])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_bytes_equal_a_reference_that_places_every_token_by_itself(shape: str, data: st.DataObject, seed: int) -> None:
    rng = np.random.default_rng(seed)
    draw = data.draw
    p_tp, d_tp = draw(st.sampled_from(TPS[shape]), label="TP")
    latent = draw(st.integers(0, 4), label="MLA when 4") == 4
    counts = [h for h in range(1, 17) if fits(h, p_tp, d_tp)]
    heads = None if latent else draw(st.sampled_from(counts[::-1]), label="heads")
    tokens = draw(st.sampled_from([1, 2, 4]), label="page tokens")
    layers = draw(st.integers(1, 3), label="layers")
    prefill_stages = draw(st.integers(1, layers), label="prefill stages")
    decode_stages = draw(st.sampled_from([1, prefill_stages]), label="decode stages")
    parts = parts_of(data, latent, tokens, layers)
    prompt = draw(st.integers(1, 5), label="prompt pages")
    pages = {"": prompt} | {p.pool: 1 + (p.pool == "window") for p in parts if p.pool}
    model = Model(tokens, heads, parts, pages, rng)
    items = {pool: n + int(rng.integers(0, 4)) for pool, n in pages.items()}
    gap = draw(st.sampled_from([0, 1, 2, 16]), label="gap")
    source = engine(model, stages(parts, layers, prefill_stages), p_tp, items, rng, gap=gap)
    target = engine(model, stages(parts, layers, decode_stages), d_tp, items, rng, gap=gap)

    mine, theirs = page_lists(data, model, items), page_lists(data, model, items)
    prefix = draw(st.integers(0, prompt - 1), label="pages decode has")
    theirs[""] = {p: at for p, at in theirs[""].items() if p >= prefix}
    length = prompt * tokens - draw(st.integers(0, tokens - 1), label="ragged by")
    chunk = draw(st.integers(1, prompt), label="chunk pages")
    for rank in source:
        rank.fill(mine)
    done: set[Strategy] = set()
    for wish in STRATEGIES if p_tp != d_tp else STRATEGIES[:1]:
        done |= move(source, target, mine, theirs, wish, chunk, rng)
        for rank in target:
            rank.check(theirs, length)
            rank.memory.reset()
    for strategy in done:
        event(strategy)


@settings(max_examples=60, deadline=None)
@given(
    tp=st.sampled_from([(2, 1), (1, 2), (4, 2), (2, 4), (2, 2)]),
    wish=st.sampled_from(STRATEGIES),
    at_source=st.sampled_from([None, *MemoryKind]),
    at_decode=st.sampled_from([None, *MemoryKind]),
    seed=st.integers(0, 2**31),
)
def test_a_layer_in_both_memory_kinds_moves_by_the_one_that_is_named(
    tp: tuple[int, int], wish: Strategy, at_source: MemoryKind | None, at_decode: MemoryKind | None, seed: int
) -> None:
    """`None`: each region in one kind, any of them. The regions that are not named keep every byte."""
    rng = np.random.default_rng(seed)
    parts = [Part(layer, kind, 4) for layer in range(2) for kind in (K, V)]
    model = Model(2, 4, parts, {"": 3}, rng)
    items = {"": 5}
    source = engine(model, [parts], tp[0], items, rng, both=at_source)
    target = engine(model, [parts], tp[1], items, rng, both=at_decode)
    mine, theirs = {"": {0: 4, 1: 0, 2: 2}}, {"": {0: 1, 1: 2, 2: 4}}
    for rank in source:
        rank.fill(mine)
    move(source, target, mine, theirs, wish, 2, rng, source_memory=at_source, destination_memory=at_decode)
    for rank in target:
        rank.check(theirs, 6)


@settings(max_examples=100, deadline=None)
@given(
    first=st.integers(0, 5),
    counts=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    wish=st.sampled_from(["staged", "merge", "split"]),
    seed=st.integers(0, 2**31),
)
def test_head_ranges_that_overlap_anyhow_move_too(
    first: int, counts: tuple[int, int], wish: Strategy, seed: int
) -> None:
    """No TP sizes give such ranges; where the slices lie on no common grid they go one by one."""
    rng = np.random.default_rng(seed)
    parts = [Part(0, K, 4), Part(0, V, 4)]
    model = Model(2, 12, parts, {"": 2}, rng)
    ends = (first, first + counts[0]), (3, 3 + counts[1])
    low, high = max(e[0] for e in ends), min(e[1] for e in ends)
    if low >= high:
        return
    ranks = [Rank(model, RankCoordinates(), parts, {"": 3}, rng, slice_of=(a, b - a)) for a, b in ends]
    source, target = ranks
    mine, theirs = {"": {0: 2, 1: 0}}, {"": {0: 0, 1: 1}}
    source.fill(mine)
    pair = pair_plan(source.layout, target.layout)
    if any((a, b) != (low, high) for a, b in ends):
        on_grid = all((b - a) % (high - low) == 0 and (low - a) % (high - low) == 0 for a, b in ends)
        assert (pair.allowed("staged", SLOT) is None) == on_grid
    run = Run(pair, source, target, chosen(pair, wish), rng, SLOT)
    run.chunk("", 0, [2, 0], [0, 1])
    event(run.strategy)
    held = target.memory
    for part, address, prompt, token, value in target.places(theirs):
        region = next(r for p, r in target.regions if p == part)
        head = (address - region.address) // part.dim % counts[1] + 3
        at = slice(address - held.base, address - held.base + part.dim)
        inside = low <= head < high
        assert np.array_equal(held.data[at], value if inside else held.before[at]), (prompt, token, head)
        assert (held.writes[at] == inside).all()
    assert held.writes.sum() == pair.nbytes(2)


@pytest.mark.parametrize(
    "fault", ["none", "skips a piece", "moves a piece twice", "moves a page elsewhere", "takes another page"]
)
def test_the_check_finds_a_run_that_is_wrong_in_one_piece(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = plan_runner.slice_indices
    done = []

    def wrong(side: Any, lane: Any, regions: range, pages: np.ndarray) -> np.ndarray:
        indices = real(side, lane, regions, pages)
        done.append(fault)
        if fault == "skips a piece":
            return indices[:-1]
        if fault == "moves a piece twice":
            return np.append(indices, indices[:1])
        if fault == "moves a page elsewhere" and side is lane.destination:
            return real(side, lane, regions, np.where(pages == pages[0], 3, pages))
        if fault == "takes another page" and side is lane.source:
            return real(side, lane, regions, np.where(pages == pages[0], 3, pages))
        return indices

    monkeypatch.setattr(plan_runner, "slice_indices", wrong)
    rng = np.random.default_rng(7)
    parts = [Part(0, K, 4), Part(0, V, 4)]
    model = Model(2, 2, parts, {"": 2}, rng)
    (source,), (target, _) = engine(model, [parts], 1, {"": 4}, rng), engine(model, [parts], 2, {"": 4}, rng)
    mine, theirs = {"": {0: 1, 1: 2}}, {"": {0: 0, 1: 2}}
    source.fill(mine)
    move([source], [target], mine, theirs, "sliced", 2, rng)
    assert done
    if fault == "none":
        target.check(theirs, 4)
    else:
        with pytest.raises(AssertionError):
            target.check(theirs, 4)
