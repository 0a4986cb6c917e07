"""One rank's endpoint: what an engine makes, and the only place where the parts meet."""

from __future__ import annotations

import base64
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from pdtransfer.agent.hca import usable_hcas
from pdtransfer.agent.port import AgentPort
from pdtransfer.contract.base import MemoryKind, Role
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.metrics import Samples
from pdtransfer.contract.verdict import Verdict, VerdictState
from pdtransfer.errors import BadInput, Draining, PeerUnreachable, TransferError
from pdtransfer.peers import key_of, real_kind
from pdtransfer.session import validate
from pdtransfer.session.api import Asked, EndpointConfig, PoolRegion
from pdtransfer.session.calibrate import copy_rates
from pdtransfer.session.core import Core
from pdtransfer.session.depot import Depot
from pdtransfer.session.destination import DestinationSide
from pdtransfer.session.exchange import Exchange
from pdtransfer.session.gauges import Gauges
from pdtransfer.session.memory import register_pool
from pdtransfer.session.rotation import Rotation
from pdtransfer.session.routes import Routes
from pdtransfer.session.source import SourceSide
from pdtransfer.session.transfers import ReceiveTransfer, SendTransfer
from pdtransfer.session.wiring import Wiring
from pdtransfer.staging.device import use_device

logger = logging.getLogger(__name__)

AgentFactory = Callable[[str, EndpointConfig], AgentPort]


def nixl_agent(name: str, config: EndpointConfig) -> AgentPort:
    """The default agent: NIXL with the backend of the configuration."""
    from pdtransfer.agent.nixl import NixlAgent

    return NixlAgent(name, net_devices=config.net_devices, plugin=config.nixl_plugin, parameters=config.nixl_params)


class RankEndpoint:
    """`Endpoint` over one rank's KV pool.

    `card_template` is the rank's card without agent fields; its layout's regions are taken from
    `pool`. The constructor returns when the pool is registered and the control listener is open;
    `card` is then complete and sealed."""

    def __init__(
        self,
        card_template: RankCard,
        pool: Sequence[PoolRegion],
        config: EndpointConfig,
        agent_factory: AgentFactory = nixl_agent,
    ) -> None:
        card_template, self._config = validate.template(card_template), validate.config(config)
        regions = validate.regions(pool, lambda kind: real_kind(card_template, kind))
        name = f"{card_template.role.value}-{card_template.rank}-{uuid.uuid4().hex}"
        layout = card_template.layout.model_copy(update={"regions": regions})
        self._card = card_template.model_copy(update={"layout": layout, "agent_name": name})
        devices = {r.device for r in regions if r.memory and real_kind(self._card, r.memory) is MemoryKind.VRAM}

        def make_agent(named: str) -> AgentPort:
            for device in sorted(devices)[:1]:
                use_device(device)
            return agent_factory(named, config)

        self._core = Core(name, config, make_agent)
        self._hcas = usable_hcas()
        self._wiring = Wiring(self._core, self._card, self._hcas)
        self._depot = Depot()
        self._source = SourceSide(self._core, self._wiring, self._depot)
        self._destination = DestinationSide(self._core, self._wiring, self._depot)
        self._rotation = Rotation(self._core, self._wiring, self._destination, self._register, self._show)
        role = self._card.role
        self._wiring.hooks = Exchange(self._core, role, self._source, self._destination, self._rotation)
        Gauges(self._core, self._wiring, self._source, self._destination, self._depot)
        self._roster: tuple[RankCard, ...] = ()
        self._routes = Routes(self._card, ())
        self._draining = False
        self._core.start(self._setup)

    # --- start ------------------------------------------------------------------------------

    async def _setup(self) -> None:
        agent = self._core.agent
        if self._card.layout.emulated_vram:
            logger.warning("%s: VRAM is emulated on host memory, no figure is a GPU's", self._card.agent_name)
        self._depot.build(self._card, self._config)
        self._wiring.prober.copies = copy_rates(self._depot, self._depot.told)  # while the arenas are idle
        self._register(agent)
        self._destination.intake.open()
        port = await self._wiring.connections.listen()
        host = self._config.advertise_host
        card = self._card.model_copy(
            update={
                "nixl_metadata": base64.b64encode(agent.metadata()).decode(),
                "control": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
                "transports": agent.transports,
                "process": agent.process,
                "engine": self._card.engine.model_copy(update=self._nixl(agent)),
                "devices": tuple(h.name for h in self._hcas),
                "staging": self._depot.told,
            }
        )
        self._show(card.sealed())

    def _nixl(self, agent: AgentPort) -> dict[str, object]:
        """What of NIXL the card tells."""
        parameters = tuple(sorted(self._config.nixl_params.items()))
        return {"nixl_plugins": agent.plugins, "nixl_plugin": self._config.nixl_plugin, "nixl_params": parameters}

    def _register(self, agent: AgentPort) -> None:
        """All memory that peers read or write, with this rank's first agent or a later one."""
        register_pool(agent, self._card)
        agent.register(self._wiring.prober.scratch.descriptors, MemoryKind.DRAM)
        self._depot.register(agent)

    def _show(self, card: RankCard) -> None:
        self._card = self._wiring.card = card
        self._routes = Routes(card, self._roster)
        self._core.changed()

    # --- Endpoint ---------------------------------------------------------------------------

    @property
    def card(self) -> RankCard:
        """This rank's sealed card."""
        return self._card

    @property
    def failed(self) -> Exception | None:
        """Why the endpoint's thread ended, if it did so by itself."""
        return self._core.failed

    @property
    def age(self) -> float:
        """Seconds since the endpoint's thread last turned: it grows while a call in that thread hangs."""
        return self._core.age

    def crash(self, reason: str) -> None:
        """End it because of `reason`, from any thread. `failed` is set at once; transfers fail as soon as the
        endpoint's thread turns, which one that hangs does not."""
        if self._core.failed is None:
            logger.error("%s: the endpoint is ended: %s", self._core.name, reason)
            self._core.failed = TransferError(f"the endpoint failed: {reason}", peer=self._core.name)
        self._core.call(self._core.crash, None)

    @property
    def draining(self) -> bool:
        """True once it takes no new transfers. Final."""
        return self._draining

    def apply_peers(self, peers: Sequence[RankCard]) -> None:
        """The whole set of wired peers; returns at once."""
        roster = validate.cards("peers", peers)
        self._core.call(self._wiring.apply, roster)  # first: a request to one of them is taken up after it
        self._roster = roster
        self._routes = Routes(self._card, roster)

    def probe(self, pod_uids: Sequence[str] = ()) -> None:
        """Probe these pods' ranks again (all when empty)."""
        self._core.call(self._wiring.probe_again, validate.names("pod_uids", pod_uids))

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """One verdict a peer."""
        return self._wiring.verdicts

    def on_change(self, callback: Callable[[], None]) -> None:
        """Called from the endpoint's thread when something changed."""
        self._core.listen(callback)

    def receive(
        self,
        *,
        room: int,
        attempt: int,
        bootstrap: str,
        pages: Sequence[int],
        first_page: int = 0,
        tokens: int,
        memory: MemoryKind | None = None,
        pools: Mapping[str, Sequence[int]] | None = None,
        group: int | None = None,
    ) -> ReceiveTransfer:
        """Ask for a room's KV into `pages` (prompt pages `first_page ..`), and `pools` for other page
        spaces; `memory` where a layer is registered in both kinds; `group` is prefill's data-parallel rank
        (None: by the room). Raises BadInput, which names the argument."""
        room = self._alive(room, Role.DECODE)
        attempt = validate.whole("attempt", attempt, 0, 1 << 63, room=room)
        bootstrap = validate.words("bootstrap", bootstrap, room=room)
        pages = validate.pages("pages", pages, room=room)
        first_page = validate.whole("first_page", first_page, 0, 1 << 40, room=room)
        tokens = validate.whole("tokens", tokens, 1, 1 << 40, room=room)
        memory = validate.memory("memory", memory, room=room)
        pools = validate.pools("pools", pools, room=room)
        if group is not None:
            group = validate.whole("group", group, 0, 1 << 20, room=room)
        sources = self._routes.of(room, bootstrap, group)
        refused = {(v.peer_pod_uid, v.peer_rank): v for v in self.verdicts if v.state is VerdictState.REFUSED}
        for card in sources:
            verdict = refused.get(key_of(card))
            if verdict is not None and verdict.peer_incarnation == card.incarnation:
                raise PeerUnreachable(f"{verdict.reason}: {verdict.message}", room=room, peer=bootstrap)
        return self._destination.open(room, attempt, sources, pages, first_page, tokens, memory, pools)

    def send(self, *, room: int, tokens: int) -> SendTransfer:
        """Begin sending a room; chunks follow. Raises BadInput, which names the argument."""
        room = self._alive(room, Role.PREFILL)
        tokens = validate.whole("tokens", tokens, 1, 1 << 40, room=room)
        sender = SendTransfer(room, tokens, lambda what, *args: self._core.call(self._source.command, what, *args))
        self._core.track(sender.cell)
        self._core.call(self._source.command, "open", sender)
        return sender

    def asked(self, room: int) -> Asked | None:
        """What decode ranks want of a room, opened or not; None while nobody asked. Cheap, from any thread."""
        requests = self._source.asked(room)
        if not requests:
            return None
        last = max(requests, key=lambda r: r.attempt)
        first, required = max(r.first_page for r in requests), max(r.required for r in requests)
        return Asked(len(requests), required, first, last.tokens, last.attempt, last.destination)

    def expect(self, room: int) -> None:
        """The engine will send this room: that it died before is over, decode may ask (again)."""
        self._core.call(self._source.expect, validate.whole("room", room, -(1 << 63), 1 << 63))

    def _alive(self, room: int, role: Role) -> int:
        """The room, when this rank takes transfers of that side."""
        room = validate.whole("room", room, -(1 << 63), 1 << 63)
        if self._card.role is not role:
            does = "send" if role is Role.PREFILL else "receive"
            raise BadInput(f"{does}: this is a {self._card.role.value} rank, only {role.value} ranks {does}", room=room)
        if self._core.failed is not None:
            raise self._core.failed
        if self._draining and not (role is Role.PREFILL and self._source.asked(room)):
            # What decode asked for before is in flight: it is sent, or aborted so that decode hears of it.
            raise Draining("this rank takes no new transfers", room=room)
        return room

    @property
    def inflight(self) -> int:
        """Transfers that are not settled."""
        return self._source.inflight + self._destination.inflight

    @property
    def counters(self) -> Mapping[str, float]:
        """Counters and gauges in short, for people and tests."""
        return {
            **self._core.metrics.flat(),
            "thread_age_seconds": self._core.age,
            "inflight": float(self.inflight),
            "quarantined_bytes": float(self._destination.quarantined_bytes),
        }

    @property
    def metrics(self) -> Samples:
        """Everything measured since the start, for the sidecar."""
        self._core.metrics.gauge("thread_age_seconds", self._core.age)
        return self._core.metrics.snapshot()

    def drain(self) -> None:
        """Finish what is in flight, refuse what is new."""
        self._draining = True
        self._core.call(setattr, self._source.askers, "draining", True)

    def close(self) -> None:
        """End everything; transfers that are not terminal fail."""
        self._draining = True
        if not self._core.stop(self._config.timeouts.settle + 5.0):
            logger.error("%s: the endpoint's thread did not end in time", self._core.name)

    def wait_wired(self, timeout: float) -> bool:
        """Block until every peer of the last roster is Wired (for scripts and tests)."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            wired = {
                (v.peer_pod_uid, v.peer_rank, v.peer_incarnation)
                for v in self.verdicts
                if v.state is VerdictState.WIRED
            }
            if {(*key_of(c), c.incarnation) for c in self._roster} <= wired:
                return True
            time.sleep(0.01)
        return False
