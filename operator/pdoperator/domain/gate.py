"""Which pods may be ready together: within an island every prefill is wired to every decode.

Pure arithmetic over a bipartite graph. The set to keep is what is left after the cheapest vertex
cover of the edges that are not good (König: minimum-weight vertex cover of a bipartite graph equals
maximum flow, found here by augmenting paths); neither side may end up empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from fractions import Fraction

INCUMBENT_BONUS = Fraction(1, 10)
"""How much more a pod that is ready now counts, so that ties never move capacity."""


def weight(wanted: int, incumbent: bool) -> Fraction:
    """Share of its role that a pod stands for, with the incumbents' bonus."""
    return Fraction(1, max(1, wanted)) * (1 + (INCUMBENT_BONUS if incumbent else 0))


def min_weight_cover(
    left: Mapping[str, Fraction], right: Mapping[str, Fraction], edges: Collection[tuple[str, str]]
) -> frozenset[str]:
    """Minimum-weight vertex cover of a bipartite graph. Names of both sides are distinct."""
    source, sink = ("source", ""), ("sink", "")
    Node = tuple[str, str]
    capacity: dict[Node, dict[Node, Fraction]] = {source: {}, sink: {}}

    def arc(a: Node, b: Node, amount: Fraction) -> None:
        capacity.setdefault(a, {})[b] = amount
        capacity.setdefault(b, {}).setdefault(a, Fraction(0))

    touched_left = sorted({p for p, _ in edges})
    touched_right = sorted({d for _, d in edges})
    infinite = sum(left.values(), Fraction(0)) + sum(right.values(), Fraction(0)) + 1
    for p in touched_left:
        arc(source, ("l", p), left[p])
    for d in touched_right:
        arc(("r", d), sink, right[d])
    for p, d in sorted(set(edges)):
        arc(("l", p), ("r", d), infinite)

    while True:
        came: dict[Node, Node] = {}
        queue: deque[Node] = deque([source])
        while queue and sink not in came:
            here = queue.popleft()
            for there, room in capacity[here].items():
                if room > 0 and there not in came and there != source:
                    came[there] = here
                    queue.append(there)
        if sink not in came:
            break
        path: list[tuple[Node, Node]] = []
        node = sink
        while node != source:
            path.append((came[node], node))
            node = came[node]
        amount = min(capacity[a][b] for a, b in path)
        for a, b in path:
            capacity[a][b] -= amount
            capacity[b][a] += amount

    reachable = {source}
    queue = deque([source])
    while queue:
        here = queue.popleft()
        for there, room in capacity[here].items():
            if room > 0 and there not in reachable:
                reachable.add(there)
                queue.append(there)
    cover = {p for p in touched_left if ("l", p) not in reachable}
    cover |= {d for d in touched_right if ("r", d) in reachable}
    return frozenset(cover)


def best_set(
    prefills: Mapping[str, Fraction], decodes: Mapping[str, Fraction], good: Collection[tuple[str, str]]
) -> frozenset[str]:
    """Heaviest set of pods in which every prefill has a good edge to every decode, with at least one
    of each; empty when no good edge exists. `good` holds (prefill, decode) names."""
    edges = {(p, d) for p, d in good if p in prefills and d in decodes}
    if not edges:
        return frozenset()
    bad = {(p, d) for p in prefills for d in decodes} - edges
    kept = (set(prefills) | set(decodes)) - min_weight_cover(prefills, decodes, bad)
    if kept & set(prefills) and kept & set(decodes):
        return frozenset(kept)

    # The cheapest cover gave up a whole side: force one good pair in, and take the best of those.
    best: tuple[Fraction, tuple[str, ...]] | None = None
    for p0, d0 in sorted(edges):
        ps = {p: w for p, w in prefills.items() if (p, d0) in edges}
        ds = {d: w for d, w in decodes.items() if (p0, d) in edges}
        inner = {(p, d) for p in ps for d in ds if (p, d) not in edges}
        rest = (set(ps) | set(ds)) - min_weight_cover(ps, ds, inner)
        total = sum((ps.get(n) or ds.get(n) or Fraction(0) for n in rest), Fraction(0))
        candidate = (-total, tuple(sorted(rest)))
        if best is None or candidate < best:
            best = candidate
    return frozenset(best[1]) if best else frozenset()
