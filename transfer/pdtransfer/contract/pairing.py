"""Which prefill ranks and decode ranks meet: only pairs whose head and stage ranges overlap.

Source: rank mapping of SGLang's common/conn.py, section 2 of the rules (D = P, D > P, D < P),
stated here in terms of head slices so that replication (more ranks than heads) falls out of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdtransfer.contract.card import RankCard
from pdtransfer.contract.layout import RankLayout


def heads_meet(prefill: RankLayout, decode: RankLayout) -> bool:
    """True when `decode` needs KV heads that `prefill` should send.

    With replicated heads several prefill ranks hold what one decode rank needs; the one sender is
    chosen by TP rank so that each byte is sent once and the senders share the load."""
    p, d = prefill.coordinates, decode.coordinates
    if p.cp:
        return False  # every context-parallel rank ends up with the whole prompt's rows: the first one sends
    if prefill.heads is None or decode.heads is None:
        # One copy on every rank: decode rank r asks prefill rank r * P // D.
        return p.tp == d.tp * p.tp_size // d.tp_size
    lo = max(prefill.heads.first, decode.heads.first)
    hi = min(prefill.heads.first + prefill.heads.count, decode.heads.first + decode.heads.count)
    if lo >= hi:
        return False
    copies = p.tp_size * prefill.heads.count // prefill.heads.total
    if copies <= 1:
        return True
    # `copies` neighbouring prefill ranks hold the same heads: spread the decode ranks over them.
    return p.tp % copies == (d.tp * p.tp_size // d.tp_size) % copies


def layers_meet(prefill: RankLayout, decode: RankLayout) -> bool:
    """True when the two pipeline stages hold a common layer."""
    return bool(set(prefill.layers) & set(decode.layers))


def meet(prefill: RankLayout, decode: RankLayout) -> bool:
    """True when this prefill rank sends KV to this decode rank."""
    return heads_meet(prefill, decode) and layers_meet(prefill, decode)


def peers_of(card: RankCard, others: Iterable[RankCard]) -> tuple[RankCard, ...]:
    """The cards among `others` (of the opposite role) that `card` exchanges KV with."""
    if card.role.value == "prefill":
        found = (o for o in others if o.role is card.role.other and meet(card.layout, o.layout))
    else:
        found = (o for o in others if o.role is card.role.other and meet(o.layout, card.layout))
    return tuple(sorted(found, key=lambda c: (c.pod_uid, c.incarnation, c.rank)))
