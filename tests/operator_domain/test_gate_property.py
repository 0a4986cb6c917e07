"""The ready set against brute force: every subset is tried, the heaviest legal one must weigh the same."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdoperator.domain.gate import best_set, min_weight_cover, weight


def brute(prefills: dict[str, Fraction], decodes: dict[str, Fraction], good: set[tuple[str, str]]) -> Fraction:
    """Weight of the heaviest set with both sides present and every prefill good with every decode; 0 if none."""
    best = Fraction(0)
    for i in range(1, len(prefills) + 1):
        for ps in combinations(prefills, i):
            ds = [d for d in decodes if all((p, d) in good for p in ps)]
            if ds:
                best = max(best, sum(prefills[p] for p in ps) + sum(decodes[d] for d in ds))
    return best


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, Fraction], dict[str, Fraction], set[tuple[str, str]]]:
    n, m = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    ps = {f"p{i}": weight(n, draw(st.booleans())) for i in range(n)}
    ds = {f"d{i}": weight(m, draw(st.booleans())) for i in range(m)}
    good = {(p, d) for p in ps for d in ds if draw(st.integers(0, 3))}
    return ps, ds, good


@given(worlds())
@settings(max_examples=200, deadline=None)
def test_the_set_is_wired_two_sided_and_as_heavy_as_possible(
    world: tuple[dict[str, Fraction], dict[str, Fraction], set[tuple[str, str]]],
) -> None:
    ps, ds, good = world
    kept = best_set(ps, ds, good)
    for p in kept & set(ps):
        for d in kept & set(ds):
            assert (p, d) in good
    assert bool(kept & set(ps)) == bool(kept & set(ds))
    assert sum((ps.get(u) or ds.get(u) for u in kept), Fraction(0)) == brute(ps, ds, good)


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_the_cover_touches_every_edge_at_the_least_weight(
    world: tuple[dict[str, Fraction], dict[str, Fraction], set[tuple[str, str]]],
) -> None:
    ps, ds, edges = world
    cover = min_weight_cover(ps, ds, edges)
    assert all(p in cover or d in cover for p, d in edges)
    both = ps | ds
    names = sorted(both)
    least = min(
        sum((both[n] for n in chosen), Fraction(0))
        for i in range(len(names) + 1)
        for chosen in combinations(names, i)
        if all(p in chosen or d in chosen for p, d in edges)
    )
    assert sum((both[n] for n in cover), Fraction(0)) == least


def test_of_two_equal_choices_the_incumbents_stay() -> None:
    ps = {"p0": weight(2, False), "p1": weight(2, True)}
    ds = {"d0": weight(2, True), "d1": weight(2, False)}
    good = {("p0", "d1"), ("p1", "d0")}
    assert best_set(ps, ds, good) == {"p1", "d0"}


def test_one_bad_edge_costs_the_pod_that_is_the_smaller_share_of_its_role() -> None:
    ps = {"p0": weight(1, True)}
    ds = {f"d{i}": weight(4, True) for i in range(4)}
    good = {("p0", d) for d in ds if d != "d2"}
    assert best_set(ps, ds, good) == {"p0", "d0", "d1", "d3"}


def test_nothing_is_ready_where_no_pair_is_wired() -> None:
    assert best_set({"p": Fraction(1)}, {"d": Fraction(1)}, set()) == frozenset()


def test_a_hundred_by_a_hundred_with_one_dead_prefill_is_decided_in_a_moment() -> None:
    ps = {f"p{i:03}": weight(100, True) for i in range(100)}
    ds = {f"d{i:03}": weight(100, True) for i in range(100)}
    good = {(p, d) for p in ps for d in ds if p != "p042"}
    assert best_set(ps, ds, good) == (set(ps) | set(ds)) - {"p042"}
