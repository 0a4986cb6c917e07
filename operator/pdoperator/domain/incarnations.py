"""Which start of each pod's engine was seen last. It is kept in status: an operator that was away while an engine
started again compares with it and tells PeerReplaced, until a status with the new one is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdoperator.domain.picture import Picture
from pdoperator.domain.view import engine_pods

_LONGEST = 250
"""Incarnations come out of pods: one that is longer than status takes is cut."""


def told(status: Mapping[str, Any]) -> dict[str, str]:
    """Pod UID -> incarnation as the status has it; entries that can't be read are dropped."""
    kept = status.get("incarnations")
    return {str(uid): i for uid, i in kept.items() if isinstance(i, str)} if isinstance(kept, dict) else {}


def seen(pic: Picture) -> dict[str, str]:
    """Pod UID -> incarnation of every pod that shows complete cards."""
    return {p.uid: p.cards.incarnation[:_LONGEST] for p in pic.view.peers}


def kept(pic: Picture) -> dict[str, str]:
    """What status shall hold: of every pod that is there the newest, also while its engine loads or is not reached."""
    newest = told(pic.observed.cluster.status) | seen(pic)
    there = {p.uid for p in engine_pods(pic.observed)}
    return {uid: newest[uid] for uid in sorted(newest) if uid in there}
