"""Ranks of a world: real endpoints whose thread is stepped by hand, over small static pools."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from pdtransfer.agent.fake import FakeAgent
from pdtransfer.contract.base import EngineType, Role
from pdtransfer.contract.card import EngineFacts, RankCard, RankProcess
from pdtransfer.contract.fingerprint import ModelIdentity
from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout
from pdtransfer.peers import PeerKey
from pdtransfer.session.api import EndpointConfig, PoolRegion
from pdtransfer.session.core import Core
from pdtransfer.session.endpoint import RankEndpoint

from .network import Where
from .standins import POISON, Tally

if TYPE_CHECKING:
    from .world import World

HEADS = 2
HEAD_BYTES = 8
POOL_PAGES = 8
PIECE = 8
"""Bytes of the smallest slice of a page."""
BOOTSTRAP = "127.0.0.1:8998"
CANARY = 0xCA
"""What the engine writes into a page that it got back."""


def golden(room: int, page: int) -> int:
    """The byte that fills prompt page `page` of a room."""
    return 16 * room + page + 1


class SteppedCore(Core):
    """The real core without its thread: the world turns it."""

    world: World
    paced: tuple[tuple[Any, str], ...] = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self.metrics, Tally)
        self.tally = self.metrics

    def start(self, setup: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.generations.take(self.make_agent(self.name))
        self._loop.create_task(setup())
        self.world.loop.settle()

    async def turn(self) -> None:
        self.advance()

    def advance(self) -> bool:
        """What one turn of the real pump does."""
        for pacer, name in self.paced:
            setattr(pacer, name, 0.0)  # looks every few milliseconds: that is always now
        self.mover._next_check = 0.0
        moved = self.generations.step()
        for work in self.works:
            moved |= work()
        self._progress()
        self.turns += 1
        now = self.world.loop.now
        for tick in self.ticks:
            tick(now)
        return bool(moved)


@dataclass(eq=False)
class Rank:
    """One process."""

    role: Role
    where: Where
    endpoint: RankEndpoint
    memory: np.ndarray
    agent: FakeAgent
    """The first; a decode rank may take others."""
    alive: bool = True
    died_at: float = 0.0

    @property
    def core(self) -> SteppedCore:
        core = self.endpoint._core
        assert isinstance(core, SteppedCore)
        return core

    @property
    def name(self) -> str:
        """Role and rank, `p0`."""
        return f"{self.role.value[0]}{self.where[0][1]}"


@cache
def _memory(place: PeerKey, generation: int, heads: int) -> np.ndarray:
    """The same addresses in every world, so that cards and plans of one shape can be kept."""
    return np.zeros((POOL_PAGES, heads * HEAD_BYTES), dtype=np.uint8)


@cache
def _template(role: Role, rank: int, of: int, generation: int) -> RankCard:
    heads = HEADS // of
    return RankCard(
        cluster_uid="cluster",
        pod_uid=f"{role.value}-pod",
        role=role,
        incarnation=f"{role.value[0]}{generation}",
        model=ModelIdentity(
            name="tiny", dtype="bfloat16", layers=1, total_kv_heads=HEADS, head_dim=HEAD_BYTES // 2, v_head_dim=4
        ),
        layout=RankLayout(
            page_tokens=1,
            kv_dtype="bfloat16",
            heads=HeadSlice(first=rank * heads, count=heads, total=HEADS),
            coordinates=RankCoordinates(tp=rank, tp_size=of),
        ),
        engine=EngineFacts(type=EngineType.REFERENCE, version="1"),
        agent_name="",
        bootstrap=BOOTSTRAP if role is Role.PREFILL else "",
    )


def make_rank(world: World, role: Role, rank: int, of: int, generation: int) -> Rank:
    """A process at the place of `rank`, listening at that place's port."""
    template = _template(role, rank, of, generation)
    place = (template.pod_uid, template.rank)
    memory = _memory(place, generation, HEADS // of)
    memory[:] = POISON
    config = EndpointConfig(
        listen_host="127.0.0.1",
        control_port=world.port_of(place),
        timeouts=world.bounds.timeouts,
        window_ops=world.bounds.window,
        staging_bytes=world.bounds.slots * PIECE,
        staging_slot_bytes=PIECE,
        strategy=world.bounds.strategy,  # type: ignore[arg-type]
    )
    region = PoolRegion(0, "K", int(memory.ctypes.data), memory[0].nbytes, POOL_PAGES)
    made: list[FakeAgent] = []

    def agent(name: str, _: EndpointConfig) -> FakeAgent:
        made.append(world.hub.agent(name))
        made[-1].faults.stall_all = True  # every handle waits for an action, and for nothing else
        made[-1].faults.delay_polls = 0
        if world.bounds.near:
            pid = 10 * world.port_of(place) + generation
            made[-1].process = RankProcess(host="host", pid_namespace=1, pid=pid, started=1)  # type: ignore[assignment]
        return made[-1]

    endpoint = RankEndpoint(template, [region], config, agent)
    made_rank = Rank(role, (place, template.incarnation), endpoint, memory, made[0])
    wiring = endpoint._wiring
    made_rank.core.paced = ((wiring._deaths, "_next_look"), (endpoint._rotation, "_next_look"))
    return made_rank
