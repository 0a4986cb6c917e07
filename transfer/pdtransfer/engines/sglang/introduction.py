"""Decode's side of an introduction: the cards behind a bootstrap address, made peers, and found fit or not.

Under an operator the roster has the cards; the registry then only tells where SGLang's messages reach the ranks,
and it must be of the incarnation that is rostered."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pdtransfer.contract.pairing import peers_of
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.engines.sglang.rank import Rank
from pdtransfer.engines.sglang.registry import NotOurs, NotReachable, Registry, fetch

log = logging.getLogger(__name__)
FETCH_S = 5.0
JUDGED_S = 3.0
"""How long a first contact waits until the ranks have found each other fit: the first request then fails by the
rule's name, if they do not."""


def find(rank: Rank, address: str, introduce: Callable[[Registry], None]) -> Registry:
    """The registry at an address, its ranks made peers. Raises NotReachable or NotOurs, PeerNotRostered."""
    registry = fetch(address, FETCH_S)
    if rank.rostered:
        _compare(rank, address, registry)
        return registry
    # What requests call this engine, whatever it calls itself.
    cards = [r.card.model_copy(update={"bootstrap": address}) for r in registry.ranks]
    rank.introduce(cards, whole=True)
    mine = peers_of(rank.card, cards)
    if not mine:
        raise NotOurs(f"no rank of the prefill engine at {address} holds KV that this decode rank needs")
    introduce(registry)
    until = time.monotonic() + JUDGED_S
    while time.monotonic() < until:
        verdicts = [rank.verdict(c) for c in mine]
        refused = next((v for v in verdicts if v is not None and v.state is VerdictState.REFUSED), None)
        if refused is not None:
            raise NotOurs(f"the prefill engine at {address} does not fit: {refused.reason}: {refused.message}")
        if all(v is not None and v.state is VerdictState.WIRED for v in verdicts):
            return registry
        time.sleep(0.01)
    log.warning("the ranks behind %s are still being probed after %.0f s", address, JUDGED_S)
    return registry


def _compare(rank: Rank, address: str, registry: Registry) -> None:
    rostered = {(c.pod_uid, c.rank): c.incarnation for c in rank.cards_behind(address)}
    there = {(r.card.pod_uid, r.card.rank): r.card.incarnation for r in registry.ranks}
    for place, incarnation in rostered.items():
        found = there.get(place)
        if found != incarnation:
            raise NotReachable(
                f"pod {place[0]} rank {place[1]}: the roster names incarnation {incarnation}, at {address} "
                f"is {found or 'none'}"
            )
