"""Small KV pools with known bytes, and endpoints over the shipped fake agent, for these tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from places import HOST, Place, address_of

from pdtransfer.agent.fake import FakeAgent, FakeHub
from pdtransfer.agent.nixl import NixlAgent
from pdtransfer.agent.port import AgentPort, Descriptors
from pdtransfer.contract.base import EngineType, Role
from pdtransfer.contract.card import EngineFacts, RankCard
from pdtransfer.contract.fingerprint import ModelIdentity
from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout
from pdtransfer.contract.pairing import peers_of
from pdtransfer.session.api import EndpointConfig, PoolRegion, Timeouts
from pdtransfer.session.endpoint import RankEndpoint
from pdtransfer.session.frames import Request
from pdtransfer.session.transfers import ReceiveTransfer, SendTransfer

PAGES = 32
LAYERS = 2
HEADS = 4
TOKENS = 4
DIMS = {"K": 8, "V": 16}
BOOTSTRAP = "127.0.0.1:8998"
QUICK = Timeouts(waiting=20.0, transfer=20.0, settle=0.3, connect=5.0, probe=15.0)
"""Long enough for a machine that stands still for seconds: a test whose subject is a deadline has its own."""


@dataclass
class Always:
    """A ready event that is set."""

    def wait(self, timeout: float) -> bool:
        return True


READY = Always()


def golden(room: int, page: int, layer: int, kind: str) -> np.ndarray:
    """Bytes of one prompt page over all heads: (tokens, heads, dim) uint16, from a seeded generator."""
    rng = np.random.default_rng([room, page, layer, ord(kind)])
    return rng.integers(1, 65535, (TOKENS, HEADS, DIMS[kind]), dtype=np.uint16)


@dataclass
class Pool:
    """One rank's pool as arrays, (pages, tokens, heads of the rank, dim)."""

    tp: int
    tp_size: int
    memory: str = "DRAM"
    layers: tuple[int, ...] = tuple(range(LAYERS))
    stage: tuple[int, int] = (0, 1)
    pages: int = PAGES
    place: Place = HOST
    arrays: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for layer in self.layers:
            for kind, dim in DIMS.items():
                shape = (self.pages, TOKENS, self.heads, dim)
                self.arrays[layer, kind] = self.place.array(shape, np.uint16, self.kind_of(layer))

    @property
    def heads(self) -> int:
        return HEADS // self.tp_size

    @property
    def regions(self) -> list[PoolRegion]:
        return [
            PoolRegion(layer, kind, address_of(a), a[0].nbytes, self.pages, self.kind_of(layer))
            for (layer, kind), a in self.arrays.items()
        ]

    def kind_of(self, layer: int) -> str:
        """`mixed`: even layers VRAM, odd ones DRAM."""
        return self.memory if self.memory != "mixed" else ("VRAM", "DRAM")[layer % 2]

    def share(self, page: np.ndarray) -> np.ndarray:
        """This rank's heads of a page of all heads."""
        return page[:, self.tp * self.heads : (self.tp + 1) * self.heads]

    def fill(self, room: int, pages: Sequence[int]) -> None:
        for (layer, kind), array in self.arrays.items():
            for i, page in enumerate(pages):
                array[page] = self.share(golden(room, i, layer, kind))

    def holds(self, room: int, pages: Sequence[int], first_page: int = 0) -> bool:
        return all(
            np.array_equal(array[page], self.share(golden(room, first_page + i, layer, kind)))
            for (layer, kind), array in self.arrays.items()
            for i, page in enumerate(pages)
        )

    def untouched(self, pages: Sequence[int]) -> bool:
        """Every other page is still zero."""
        others = sorted(set(range(self.pages)) - set(pages))
        return all(not array[others].any() for array in self.arrays.values())


def template(role: Role, pool: Pool, incarnation: str, *, pod: str = "", emulated: bool = False) -> RankCard:
    layout = RankLayout(
        page_tokens=TOKENS,
        kv_dtype="bfloat16",
        heads=HeadSlice(first=pool.tp * pool.heads, count=pool.heads, total=HEADS),
        coordinates=RankCoordinates(tp=pool.tp, tp_size=pool.tp_size, pp=pool.stage[0], pp_size=pool.stage[1]),
        emulated_vram=emulated,
    )
    return RankCard(
        cluster_uid="cluster-1",
        pod_uid=pod or f"{role.value}-pod",
        role=role,
        incarnation=incarnation,
        model=ModelIdentity(
            name="tiny", dtype="bfloat16", layers=LAYERS, total_kv_heads=HEADS, head_dim=8, v_head_dim=16
        ),
        layout=layout,
        engine=EngineFacts(type=EngineType.REFERENCE, version="1"),
        agent_name="",
        bootstrap=BOOTSTRAP if role is Role.PREFILL else "",
    )


@dataclass
class Rank:
    """One endpoint with its pool and its fake agents, oldest first."""

    endpoint: RankEndpoint
    pool: Pool
    agents: list[FakeAgent]

    @property
    def agent(self) -> FakeAgent:
        return self.agents[-1]


class World:
    """Ranks of one process over one hub (over real NIXL where their pools are a GPU's); closes what it made."""

    def __init__(self, place: Place = HOST) -> None:
        self.place = place
        self.hub = FakeHub()
        self.ranks: list[Rank] = []

    def rank(
        self,
        role: Role,
        tp: int = 0,
        tp_size: int = 1,
        *,
        incarnation: str = "",
        timeouts: Timeouts = QUICK,
        card: Callable[[RankCard], RankCard] = lambda c: c,
        memory: str = "",
        tls_dir: str | None = None,
        server_name: str | None = None,
        layers: tuple[int, ...] = tuple(range(LAYERS)),
        stage: tuple[int, int] = (0, 1),
        pages: int = PAGES,
        **config_of: object,
    ) -> Rank:
        """`memory`: DRAM, VRAM, mixed, or as the place has it. `config_of`: further fields of EndpointConfig."""
        memory = memory or self.place.memory
        pool = Pool(tp, tp_size, memory, layers, stage, pages, self.place)
        config_of = {"staging_bytes": 1 << 20, "staging_slot_bytes": 1 << 16, **config_of}
        config = EndpointConfig(listen_host="127.0.0.1", timeouts=timeouts, tls_dir=tls_dir, **config_of)  # type: ignore[arg-type]
        if server_name is not None:
            config = replace(config, server_name=server_name)
        made: list[FakeAgent] = []

        def agent(name: str, _: EndpointConfig) -> AgentPort:
            if self.place.gpu:
                return NixlAgent(name, net_devices="lo")
            made.append(self.hub.agent(name))
            made[-1].spares = probes
            return made[-1]

        def probes(local: Descriptors) -> bool:
            """What begins or ends in scratch: probes and the copy within the rank. A rank that is made has no peer."""
            scratch = rank.endpoint._wiring.prober.scratch
            return scratch.address <= int(local[0, 0]) < scratch.address + scratch.memory.nbytes

        emulated = self.place.emulated and memory != "DRAM"
        filled = card(template(role, pool, incarnation or f"{role.value}-1", emulated=emulated))
        rank = Rank(RankEndpoint(filled, pool.regions, config, agent), pool, made)
        self.ranks.append(rank)
        return rank

    def pair(self, prefill_tp: int = 1, decode_tp: int = 1, **options: object) -> tuple[list[Rank], list[Rank]]:
        """Wired ranks of both roles."""
        prefill = [self.rank(Role.PREFILL, t, prefill_tp, **options) for t in range(prefill_tp)]  # type: ignore[arg-type]
        decode = [self.rank(Role.DECODE, t, decode_tp, **options) for t in range(decode_tp)]  # type: ignore[arg-type]
        self.wire(prefill, decode)
        return prefill, decode

    def wire(self, prefill: Sequence[Rank], decode: Sequence[Rank], *, wait: bool = True) -> None:
        for mine, others in ((prefill, decode), (decode, prefill)):
            for rank in mine:
                rank.endpoint.apply_peers(peers_of(rank.endpoint.card, [o.endpoint.card for o in others]))
        for rank in (*prefill, *decode) if wait else ():
            assert rank.endpoint.wait_wired(30), rank.endpoint.verdicts

    def close(self) -> None:
        threads = [threading.Thread(target=r.endpoint.close) for r in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)


def until(condition: Callable[[], object], timeout: float = 20.0) -> bool:
    """True as soon as `condition` holds, False after `timeout` seconds. Generous: only a failure takes so long."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return bool(condition())


def handled(rank: Rank) -> None:
    """Return once the rank's thread has done what was asked of it so far."""
    done = threading.Event()
    rank.endpoint._core.call(done.set)
    assert done.wait(20), "the rank's thread does nothing"


def slots(rank: Rank) -> dict[str, int]:
    """How many slots of a decode rank are free, granted and quarantined."""
    return rank.endpoint._destination.intake.book.counts()


def ask(rank: Rank, room: int, pages: Sequence[int], *, first_page: int = 0, attempt: int = 0) -> ReceiveTransfer:
    """A decode rank asks for a prompt that ends one token before its last page does."""
    tokens = (first_page + len(pages)) * TOKENS - 1
    return rank.endpoint.receive(
        room=room, attempt=attempt, bootstrap=BOOTSTRAP, pages=pages, first_page=first_page, tokens=tokens
    )


def give(
    rank: Rank, room: int, pages: Sequence[int], *, metadata: bytes = b"first token", finish: bool = True
) -> SendTransfer:
    """A prefill rank hands the room's golden bytes over, in two chunks."""
    rank.pool.fill(room, pages)
    sender = rank.endpoint.send(room=room, tokens=len(pages) * TOKENS - 1)
    sender.chunk(pages[:1], 0, READY)
    sender.chunk(pages[1:], 1, READY)
    if finish:
        sender.finish(metadata)
    return sender


def first_request(**changes: object) -> Request:
    """What decode-1 asks prefill-1 for as its first request: room 1, into page 4. `changes` are not validated."""
    request = Request(
        room=1,
        attempt=0,
        source="prefill-1",
        destination="decode-1",
        pages=(4,),
        first_page=0,
        tokens=TOKENS - 1,
        required=1,
    )
    return request.model_copy(update=changes)
