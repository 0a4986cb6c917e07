"""Control connections without sockets: every frame between two ranks waits in a pool until an
action delivers, drops or doubles it, in any order.

The real dialling, handshake and connection code runs on top (`Connections`, `greet`, `admit`); only
streams and back-off sleeps are replaced. Frames of the handshake itself pass at once."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from pdtransfer.contract.card import RankCard
from pdtransfer.peers import Peer, PeerKey
from pdtransfer.session import channel as channel_module
from pdtransfer.session import connections as connections_module
from pdtransfer.session.connections import Connections
from pdtransfer.session.frames import Failed, Frame, Hello, Ping, Pong, ProbeFrame, Refused, Welcome

from .virtual import Standin

if TYPE_CHECKING:
    from .world import World

LIFETIME = 2.0
"""A connection whose other side is silent ends after `Timeouts.connect`: nothing older arrives."""
Where = tuple[PeerKey, str]
"""A rank: its place and its incarnation."""

_dialling: contextvars.ContextVar[tuple[Where, Peer]] = contextvars.ContextVar("dialling")


@dataclass(eq=False)
class Message:
    """One frame under way. `sender_end` and `receiver_end` are the two ends of its connection."""

    sender: Where
    receiver: Where
    frame: Frame
    receiver_end: End
    sent_at: float
    doubled: bool = False

    @cached_property
    def label(self) -> str:
        """For action lists."""
        attempt = getattr(self.frame, "attempt", "")
        words = [f"{self.frame.t}.{attempt}"]
        if isinstance(self.frame, Failed):
            words += [self.frame.reason, "settled" if self.frame.settled else "unsettled"]
        extra = {k: getattr(self.frame, k) for k in ("ticket", "total", "slot", "first_page") if hasattr(self.frame, k)}
        words += [f"{k}={v}" for k, v in extra.items()]
        source = getattr(self.frame, "source", "")
        ends = [f"{place[1]}/{incarnation}" for place, incarnation in (self.sender, self.receiver)]
        return " ".join([*words, f"({source})", ">".join(ends)])


class End:
    """What the session holds as a `Channel`: one end of a connection."""

    certificate_names = None

    def __init__(self, network: Network) -> None:
        self.network = network
        self.other: End = self
        self.here: Where | None = None
        self.closed_here = False
        self.ended = False
        self.last_words = False
        """The other side ended it: the end shows when nothing of it is under way."""
        self.heard = 0.0
        self._inbox: list[Frame] = []
        self._news = asyncio.Event()

    @property
    def closing(self) -> bool:
        return self.ended

    def send(self, frame: BaseModel) -> bool:
        """Handshake frames pass at once, all others wait in the pool."""
        if self.ended or self.here in self.network.dead:
            return False
        if isinstance(frame, Hello):
            self.here = ((frame.pod_uid, frame.rank), frame.incarnation)
        if isinstance(frame, Hello | Welcome | Refused | Ping | Pong):
            if isinstance(frame, Refused) and frame.drained:
                # An ended connection is never read again, so neither is what the asking side sent
                # before it was told that nothing of it is in flight.
                self.network.forget(self.other.here, self.here)
            self.other._inbox.append(frame)  # type: ignore[arg-type]
            self.other._news.set()
        elif not isinstance(frame, ProbeFrame):
            assert self.here is not None and self.other.here is not None
            self.network.post(Message(self.here, self.other.here, frame, self.other, self.network.now()))  # type: ignore[arg-type]
        return True

    async def serve(self, handle: Callable[[Frame], None]) -> None:
        """Until the end; frames are delivered by the world."""
        while await self.receive() is not None:
            pass

    async def receive(self, limit: int = 0) -> Frame | None:
        """Handshake frames, then the end; everything else is delivered by the world."""
        while not self._inbox:
            if self.ended:
                return None
            self._news.clear()
            await self._news.wait()
        return self._inbox.pop(0)

    async def keep_alive(self, limit: float) -> None:
        """The world ends connections, not time."""
        await asyncio.Event().wait()

    def close(self) -> None:
        """End it from this side: what was sent before arrives before the other side sees the end."""
        self.closed_here = True
        self.see_end()
        self.other.last_words = True
        self.network.see_ends()

    def see_end(self) -> None:
        """Nothing comes any more."""
        self.ended = True
        self._news.set()

    def break_(self) -> None:
        """The network ends it for both sides, with what was under way."""
        self.see_end()
        self.other.see_end()


@dataclass(eq=False)
class Gate:
    """A dialling rank that waits for its next try."""

    rank: Where
    peer: Peer
    opened: asyncio.Event = field(default_factory=asyncio.Event)


class _Server:
    """A control listener."""

    def __init__(self, network: Network, port: int) -> None:
        self._network = network
        self._port = port
        self.sockets = [self]

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", self._port)

    def close(self) -> None:
        self._network.listeners.pop(self._port, None)


class Network:
    """Listeners by port, waiting dials, and the messages under way."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listeners: dict[int, Callable[[End], None]] = {}
        self.gates: list[Gate] = []
        self.pool: list[Message] = []
        self.dead: set[Where] = set()
        self.ends: list[End] = []
        self.on_post: Callable[[Message], None] = lambda message: None

    def now(self) -> float:
        return self.world.loop.now

    def post(self, message: Message) -> None:
        if message.sender not in self.dead:
            self.pool.append(message)
            self.on_post(message)

    def forget(self, sender: Where | None, receiver: Where | None) -> None:
        """Messages of this direction are never read."""
        self.pool = [m for m in self.pool if not (m.sender == sender and m.receiver == receiver)]
        self.see_ends()

    def expire(self) -> None:
        """No message stays under way longer than connections without an answer are kept."""
        oldest = self.now() - LIFETIME * self.world.bounds.timeouts.connect
        late = [m for m in self.pool if m.sent_at < oldest]
        self.pool = [m for m in self.pool if m.sent_at >= oldest]
        self.world.lossy |= bool(late)
        self.see_ends()

    def die(self, where: Where) -> None:
        """The process is gone: its connections end, its port refuses. What it sent is under way."""
        self.dead.add(where)
        self.listeners.pop(self.world.port_of(where[0]), None)
        for end in [e for e in self.ends if e.here == where and not e.ended]:
            end.close()

    def take(self, message: Message) -> None:
        """It is under way no more."""
        self.pool.remove(message)
        self.see_ends()

    def see_ends(self) -> None:
        """Ends whose other side is gone see it once nothing of it is under way."""
        coming = {m.receiver_end for m in self.pool}
        for end in self.ends:
            if end.last_words and not end.ended and end not in coming:
                end.see_end()

    def connected(self, a: Where, b: Where) -> list[End]:
        """The near ends of the open connections of two ranks."""
        return [e for e in self.ends if not e.ended and e.here == a and e.other.here == b]

    async def connect(self, host: str, port: int, tls: None, server_name: str) -> End:
        """Dial: the listening rank's own code welcomes or refuses."""
        accept = self.listeners.get(port)
        if accept is None:
            raise ConnectionRefusedError(f"nobody listens at port {port}")
        near, far = End(self), End(self)
        near.other, far.other = far, near
        far.here = _where(accept.__self__._owner.card)  # type: ignore[attr-defined]
        self.ends = [e for e in self.ends if not (e.ended and e.other.ended)] + [near, far]
        accept(far)
        return near

    async def listen(self, accept: Callable[[End], None], host: str, port: int, tls: None, handshake: float) -> _Server:
        self.listeners[port] = accept
        return _Server(self, port)

    async def back_off(self, seconds: float) -> None:
        """A dial's pause: it ends when an action opens the gate."""
        where, peer = _dialling.get()
        gate = Gate(where, peer)
        self.gates.append(gate)
        try:
            await gate.opened.wait()
        finally:
            self.gates.remove(gate)

    def changes(self) -> list[tuple[Any, str, Any]]:
        """What is replaced in the session while this network is used."""
        from pdtransfer.session import handshake, wiring

        return [
            (handshake, "connect", self.connect),
            (connections_module, "listen", self.listen),
            (connections_module, "asyncio", Standin(asyncio, sleep=self.back_off)),
            (wiring, "Connections", GatedConnections),
        ]


def _where(card: RankCard) -> Where:
    return ((card.pod_uid, card.rank), card.incarnation)


class GatedConnections(Connections):
    """The real ones; each dial remembers whose it is."""

    async def dial(self, peer: Peer) -> None:
        _dialling.set((_where(self._owner.card), peer))
        await super().dial(peer)


assert channel_module.Channel  # the double above stands for this class
