"""What one rank registers with each of its agents: the whole pool, probes' scratch, staging arenas."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdtransfer.agent.port import AgentPort, Descriptors
from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.card import RankCard
from pdtransfer.errors import LayoutMismatch
from pdtransfer.peers import real_kind


def register_pool(agent: AgentPort, card: RankCard) -> None:
    """Every region, each once, in the memory kind where it really lies."""
    for kind in MemoryKind:
        rows = [
            (r.address, r.item_bytes * r.items, r.device)
            for r in card.layout.regions
            if r.memory is not None and real_kind(card, r.memory) is kind
        ]
        if rows:
            agent.register(merged(rows), kind)


def merged(rows: Sequence[tuple[int, int, int]]) -> Descriptors:
    """Address, bytes, device of regions for registration, each once, ordered."""
    if not rows:
        raise LayoutMismatch("nothing to register")
    return np.array(sorted(set(rows)), dtype=np.uint64)
