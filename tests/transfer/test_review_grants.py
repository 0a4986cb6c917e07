"""How many slots a leg takes: what it asked for, and one of each arena that decode may lend with the request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.card import StagingArena
from pdtransfer.errors import TransferError
from pdtransfer.session.frames import SlotGrant
from pdtransfer.session.stager import Stage, Stager

VRAM, DRAM = MemoryKind.VRAM, MemoryKind.DRAM


def test_slots_that_came_with_the_request_do_not_count_against_those_of_another_arena() -> None:
    failed: list[TransferError] = []
    metrics = SimpleNamespace(observe=lambda *args, **labels: None)
    core: Any = SimpleNamespace(works=[], metrics=metrics, wake=lambda: None)
    wiring: Any = SimpleNamespace(send=lambda peer, frame: True)
    stager = Stager(core, wiring, None, lambda leg, error: failed.append(error))  # type: ignore[arg-type]
    arenas = tuple(StagingArena(memory=kind, address=1, slot_bytes=1, slots=8) for kind in (VRAM, DRAM))
    card = SimpleNamespace(staging=arenas)
    request = SimpleNamespace(ids={"room": 1, "attempt": 0, "source": "p", "destination": "d"})
    leg: Any = SimpleNamespace(card=card, request=request, filled={}, error=None, peer=SimpleNamespace(label="d"))
    stage = Stage(leg, None)  # type: ignore[arg-type]

    def grant(arena: MemoryKind, ticket: int) -> None:
        stager.on_grant(stage, SlotGrant(**request.ids, arena=arena, slot=0, ticket=ticket))

    grant(VRAM, 1), grant(DRAM, 2)  # with the request
    stager.want(stage, VRAM, 3)  # the first layers' chunk needs device memory only
    grant(VRAM, 3), grant(VRAM, 4)
    assert not failed
    for ticket in range(5, 20):
        grant(VRAM, ticket)
    assert failed
    assert sum(map(len, stage.grants.values())) <= 3 + len(arenas)
