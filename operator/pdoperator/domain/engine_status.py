"""Effective settings of a role's engine for the status: what running ranks report, else what the spec works out to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdoperator.api.spec import PDClusterSpec
from pdoperator.api.status import RewriteStatus, RoleEngineStatus
from pdoperator.domain.facts import role_facts
from pdoperator.domain.picture import Picture
from pdoperator.domain.view import rank_cards
from pdtransfer.contract.base import EngineType, Role
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.compat.observed import facts_from_cards
from pdtransfer.contract.effective import Effective, effective, effective_values
from pdtransfer.contract.effective.rewrite import Value
from pdtransfer.contract.effective.shown import ALWAYS, DECODE, HICACHE, NIXL, PREFILL
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.launch_defaults import LAUNCH_DEFAULTS

FIELDS: Mapping[str, str] = {**ALWAYS, **DECODE, **PREFILL, **HICACHE, **NIXL}
"""Name of a setting in the status -> fact."""
OF_CARDS = ("pageSize", "kvCacheDtype", "attentionDataParallelSize", "attentionTensorParallelSize", *NIXL)
"""Settings that every card tells."""
OF_REFERENCE = (*OF_CARDS, "hostKV")
"""Settings that the Reference engine has."""


def engine_status(spec: PDClusterSpec | None, role: Role, cards: Sequence[RankCard]) -> RoleEngineStatus | None:
    """Of the engine that `spec` asks for (None: it can not be read) and whose ranks show `cards` (empty: not started).
    None where neither tells anything."""
    asked = _asked(spec, role)
    running = facts_from_cards(cards, asked) if cards else None
    facts = running or asked
    if facts is None:
        return None
    settings = {name: value for name, value in effective_values(facts).items() if _tells(name, value)}
    if facts.engine is EngineType.REFERENCE:
        settings = {name: value for name, value in settings.items() if name in OF_REFERENCE}
    observed: tuple[str, ...] = ()
    if running is not None:
        observed = tuple(n for n in settings if running.resolved or n in OF_CARDS)
        more = _of_pools(cards, running)
        settings |= more
        observed += tuple(more)
    rewrites = _rewrites(asked, effective(facts)) if asked is not None else ()
    return RoleEngineStatus(
        settings={name: _text(value) for name, value in sorted(settings.items())},
        observed=tuple(sorted(observed)) or None,
        rewrites=rewrites or None,
    )


def current_cards(pic: Picture, role: Role) -> tuple[RankCard, ...]:
    """Cards of a pod of the current revision (of any where the spec can not be read); empty where none shows any."""
    revision = pic.revisions.get(role)
    peers = (p for p in pic.view.side(role) if revision is None or p.pod.revision == revision)
    return next((rank_cards(p) for p in peers), ())


def _asked(spec: PDClusterSpec | None, role: Role) -> RoleFacts | None:
    if spec is None:
        return None
    try:
        return role_facts(spec, role)
    except ValueError:
        return None


def _of_pools(cards: Sequence[RankCard], running: RoleFacts) -> dict[str, Value]:
    """What only a started rank knows: its KV pool, and the arenas beside it (MiB of one rank)."""
    kinds = "+".join(sorted(k.value for k in running.memory_kinds or ()))
    mark = " (emulated)" if any(c.layout.emulated_vram for c in cards) else ""
    staging = sum(arena.slot_bytes * arena.slots for arena in cards[0].staging)
    told: dict[str, Value] = {
        "kvMemory": kinds + mark if kinds else None,
        "maxTotalTokens": running.max_total_tokens,
        "stagingMiB": staging >> 20 if staging else None,
    }
    return {name: value for name, value in told.items() if value is not None}


def _tells(name: str, value: Value) -> bool:
    """Not what is unknown, nor a size of 0, which leaves the size to the ratio."""
    return value is not None and not (name == "hicacheSizeGB" and not value)


def _rewrites(asked: RoleFacts, now: Effective) -> tuple[RewriteStatus, ...]:
    """Settings that somebody set and that are not so: the engine's rewrites, or what ranks report otherwise."""
    reasons = {r.field: r for r in effective(asked).rewrites}
    found = []
    for name, fact in FIELDS.items():
        before, after = getattr(asked, fact), getattr(now.facts, fact)
        if before is None or after is None or before == after or before == LAUNCH_DEFAULTS.get(fact, "auto"):
            continue
        modelled = reasons.get(fact)
        known = modelled is not None and modelled.effective == after
        found.append(
            RewriteStatus(
                name=name,
                asked=_text(before),
                effective=_text(after),
                reason=modelled.why if modelled is not None and known else "the running ranks report it so",
            )
        )
    return tuple(found)


def _text(value: object) -> str:
    """A value as the spec would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value in (None, "") else str(value)[:256]
