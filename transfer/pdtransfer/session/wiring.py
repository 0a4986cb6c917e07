"""Peers of one rank: loaded into the agent, connected, shaken hands with, probed; verdicts about them.

Decode dials, prefill accepts; one control connection a pair. Only cards of the roster are talked
to: a certificate of the cluster's CA opens the connection, the roster decides who may stay. A peer
that leaves the roster is kept (its connection too) until nothing of it is in flight and no fence
is owed.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
import random
import ssl
import time
from collections.abc import Sequence
from typing import Any, Protocol

from pydantic import BaseModel

from pdtransfer.agent.hca import Hca
from pdtransfer.agent.port import AgentFailure
from pdtransfer.contract.base import Role
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.verdict import Verdict, VerdictState
from pdtransfer.errors import (
    ChecksumMismatch,
    LayoutMismatch,
    PeerNotRostered,
    PeerReplaced,
    PeerUnreachable,
    TransferError,
)
from pdtransfer.peers import Peer, PeerKey, first_verdict, refusal, roster_change, same_peer
from pdtransfer.session.channel import Channel, renew, server_context, stamp
from pdtransfer.session.core import Core
from pdtransfer.session.frames import MAX_HELLO, Frame, FrameError, Hello, Refused, Welcome
from pdtransfer.session.handshake import admit, greet
from pdtransfer.session.probe import Prober

logger = logging.getLogger(__name__)

BACKOFF = (0.05, 2.0)
"""Seconds between dials: first and longest."""
REPROBE = 1.0
"""Seconds before a connected peer that failed its probe is probed again."""
DEATH_PROGRESS = 0.2
"""Seconds of progress before a dead peer's bytes count as landed."""


class Hooks(Protocol):
    """What the request layer wants to know."""

    def on_connected(self, peer: Peer) -> None: ...
    def on_peer_gone(self, peer: Peer, error: TransferError) -> None: ...
    def on_drained(self, peer: Peer) -> None: ...
    def owes(self, peer: Peer) -> bool: ...
    def drained(self, agent_name: str) -> bool: ...
    def on_frame(self, peer: Peer, frame: Frame) -> None: ...


class Wiring:
    """Peers and verdicts. Runs in the core's thread; `verdicts` may be read from any."""

    hooks: Hooks

    def __init__(self, core: Core, card: RankCard, hcas: tuple[Hca, ...] = ()) -> None:
        self._core = core
        self.card = card
        self._peers: dict[PeerKey, Peer] = {}
        self._retired: list[Peer] = []
        self._server: asyncio.Server | None = None
        self.prober = Prober(core, lambda: self.card, hcas)
        self.verdicts: tuple[Verdict, ...] = ()
        core.ticks.append(self._tick)
        core.on_stop.append(self.close)

    async def listen(self) -> int:
        """Open the control listener; returns its port."""
        config = self._core.config
        if config.tls_dir is None:
            logger.warning("%s: the control channel is PLAIN TEXT (no tls_dir): tests only", self._core.name)
        seen = stamp(config.tls_dir) if config.tls_dir is not None else ()
        self._tls = server_context(config.tls_dir)
        self._server = await asyncio.start_server(self._accept, config.listen_host, config.control_port, ssl=self._tls)
        if self._tls is not None:
            self._core.spawn(renew(self._tls, str(config.tls_dir), seen), "tls-renew")
        return int(self._server.sockets[0].getsockname()[1])

    def current(self, key: PeerKey, card: RankCard) -> Peer | None:
        """The peer behind a card, if it is still the one the roster names and is not refused."""
        peer = self._peers.get(key)
        if peer is None or peer.card.incarnation != card.incarnation or not peer.loaded:
            return None
        return peer

    def send(self, peer: Peer, frame: BaseModel) -> bool:
        """Send on the peer's connection if there is one (after a reconnect things are repeated)."""
        return peer.channel is not None and bool(peer.channel.send(frame))

    # --- the roster -------------------------------------------------------------------------

    def apply(self, cards: Sequence[RankCard]) -> None:
        """Add, replace and remove until the held peers are these."""
        change = roster_change({k: p.card for k, p in self._peers.items()}, cards)
        for key in change.removed:
            replaced = any((c.pod_uid, c.rank) == key for c in change.added)
            self._retire(self._peers.pop(key), replaced)
        for card in change.added:
            self._add(card)
        self._publish()

    def _add(self, card: RankCard) -> None:
        if self._take_back(card):
            return
        peer = Peer(card, first_verdict(self.card, card))
        self._peers[peer.key] = peer
        why = refusal(self.card, card) or self._load(peer)
        if why is not None:
            self._judge(peer, VerdictState.REFUSED, *why)
        elif self.card.role is Role.DECODE:
            peer.tasks.append(self._core.spawn(self._dial(peer), f"dial-{peer.label}"))

    def _take_back(self, card: RankCard) -> bool:
        """A peer that left the roster and comes back before it was let go is the same peer (its
        agent is still loaded, its fences are still owed)."""
        peer = next((p for p in self._retired if not p.dead and same_peer(p.card, card)), None)
        if peer is None:
            return False
        self._retired.remove(peer)
        self._peers[peer.key] = peer
        peer.retired, peer.since = False, time.monotonic()
        if peer.channel is not None:
            self._start_probe(peer)
        elif self.card.role is Role.DECODE:
            for task in peer.tasks:
                task.cancel()
            peer.probing = False
            peer.tasks = [self._core.spawn(self._dial(peer), f"dial-{peer.label}")]
        return True

    def _load(self, peer: Peer) -> tuple[str, str] | None:
        """Hand the card to the agent; None when it took it."""
        agent, card = self._core.agent, peer.card
        try:
            name = agent.add_peer(base64.b64decode(card.nixl_metadata, validate=True))
        except (AgentFailure, binascii.Error) as error:
            return "AgentError", str(error)
        if name != card.agent_name:
            agent.remove_peer(name)
            return "AgentError", f"the metadata is agent {name}'s, the card says {card.agent_name}"
        peer.loaded = True
        with contextlib.suppress(AgentFailure):  # the probe will say what is wrong
            agent.connect(name)
        return None

    def reload(self, peer: Peer) -> None:
        """NIXL's connection to the peer broke: only remove and add mend it (nixl-facts 2)."""
        peer.reload = True

    def _reload_now(self, peer: Peer) -> None:
        peer.reload = peer.loaded = False
        self._core.count("peer_reloads")
        with contextlib.suppress(AgentFailure):
            self._core.agent.remove_peer(peer.card.agent_name)
        why = self._load(peer)
        if why is not None:
            self._judge(peer, VerdictState.REFUSED, *why)
        elif peer.channel is not None:
            self._start_probe(peer)

    def _retire(self, peer: Peer, replaced: bool) -> None:
        peer.retired = True
        self._retired.append(peer)
        word = "another incarnation took its place" if replaced else "the roster names it no more"
        self.hooks.on_peer_gone(peer, PeerReplaced(word, peer=peer.label, rank=peer.card.rank))
        self._core.changed()

    def probe_again(self, pod_uids: Sequence[str]) -> None:
        """Probe these pods' ranks (all when empty)."""
        for peer in self._peers.values():
            if peer.channel is not None and (not pod_uids or peer.card.pod_uid in pod_uids):
                self._start_probe(peer)

    # --- connections ------------------------------------------------------------------------

    async def _dial(self, peer: Peer) -> None:
        """Connect, stay connected, until the peer is dead or nothing is wanted of it."""
        pause = BACKOFF[0]
        while not peer.dead and (not peer.retired or self.hooks.owes(peer)):
            try:
                hands = greet(self.card, peer, self._core.config, self.hooks.on_drained)
                channel = await asyncio.wait_for(hands, self._core.timeouts.connect)
            except PeerNotRostered as error:
                # Rosters reach the two sides one after the other: for a while that is no finding.
                young = time.monotonic() - peer.known_at < self._core.timeouts.probe
                state = VerdictState.PROBING if young else VerdictState.UNREACHABLE
                self._judge(peer, state, error.reason, error.message)
            except TransferError as error:
                bad = isinstance(error, PeerReplaced | LayoutMismatch)
                state = VerdictState.REFUSED if bad else VerdictState.UNREACHABLE
                self._judge(peer, state, error.reason, error.message)
            except (OSError, TimeoutError, ssl.SSLError, FrameError) as error:
                if isinstance(error, ConnectionRefusedError):
                    peer.refused_since = True
                reason = "TLSFailed" if isinstance(error, ssl.SSLError) else PeerUnreachable.reason
                self._judge(peer, VerdictState.UNREACHABLE, reason, f"{type(error).__name__}: {error}")
            else:
                pause = BACKOFF[0]
                await self._stay(peer, channel)
            self._consider_death(peer)
            await asyncio.sleep(pause * random.uniform(0.7, 1.3))
            pause = min(BACKOFF[1], pause * 2)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        try:
            hello = await asyncio.wait_for(channel.receive(MAX_HELLO), self._core.timeouts.connect)
            if not isinstance(hello, Hello):
                return
            answer = admit(self.card, self._peers, self._drained, hello)
            if isinstance(answer, Refused):
                self._core.count("connections_refused")
                channel.send(answer)
                return
            channel.send(
                Welcome(
                    pod_uid=self.card.pod_uid,
                    incarnation=self.card.incarnation,
                    rank=self.card.rank,
                    agent_name=self.card.agent_name,
                )
            )
            await self._stay(answer, channel)
        except (TimeoutError, FrameError) as error:
            logger.warning("%s: a control connection was dropped: %s", self._core.name, error)
        except asyncio.CancelledError:
            pass  # the endpoint closes; asyncio's server logs a cancelled handler as an error
        except Exception as error:
            self._core.crash(error)
        finally:
            channel.close()

    async def _stay(self, peer: Peer, channel: Channel) -> None:
        """Serve a connection until it ends."""
        old, peer.channel = peer.channel, channel
        if old is not None:
            old.close()
            self.prober.on_disconnected(peer)
        peer.ended_there = peer.refused_since = False
        keep = self._core.spawn(channel.keep_alive(self._core.timeouts.connect), "keep-alive")
        self.hooks.on_connected(peer)
        if not peer.retired:
            self._start_probe(peer)
        try:
            while (frame := await channel.receive()) is not None:
                if not channel.answer_ping(frame):
                    self.hooks.on_frame(peer, frame)
        except FrameError as error:
            self._core.count("frame_errors")
            logger.warning("%s: %s sent no frame: %s", self._core.name, peer.label, error)
        except Exception:
            # One peer's frame must not end the transfers with all others.
            self._core.count("frame_errors")
            logger.exception("%s: a frame of %s could not be handled", self._core.name, peer.label)
        finally:
            keep.cancel()
            if peer.channel is channel:
                peer.channel = None
                peer.ended_there = not channel.closed_here
                peer.since = time.monotonic()
                self.prober.on_disconnected(peer)
                if not peer.retired:
                    self._judge(peer, VerdictState.UNREACHABLE, PeerUnreachable.reason, "the control connection ended")
            channel.close()

    def _start_probe(self, peer: Peer) -> None:
        if peer.probing or not peer.loaded:
            return
        peer.probing, peer.probed_at = True, time.monotonic()
        if peer.verdict.state is not VerdictState.WIRED:
            self._judge(peer, VerdictState.PROBING, "Probing", peer.verdict.message)
        peer.tasks = [t for t in peer.tasks if not t.done()]
        peer.tasks.append(self._core.spawn(self._probe(peer), f"probe-{peer.label}"))

    async def _probe(self, peer: Peer) -> None:
        channel = peer.channel
        try:
            result = await self.prober.probe(peer)
        except TransferError as error:
            if isinstance(error, AgentFailure):
                self.reload(peer)
            if peer.channel is channel and not peer.retired:
                bad = isinstance(error, ChecksumMismatch | LayoutMismatch)
                state = VerdictState.REFUSED if bad else VerdictState.UNREACHABLE
                self._judge(peer, state, error.reason, error.message)
                self._core.count("probes_failed")
            return
        finally:
            peer.probing = False
        if peer.channel is not channel or peer.retired:
            return
        emulated = "; VRAM emulated on host memory" if self.card.layout.emulated_vram else ""
        note = (
            ""
            if result.stable_samples == result.samples
            else (f"{result.samples - result.stable_samples} of {result.samples} sampled pages changed meanwhile")
        )
        self._judge(
            peer,
            VerdictState.WIRED,
            "Verified",
            note,
            bytes_moved=result.nbytes,
            seconds=result.seconds,
            checksum_ok=True,
            transport=result.lane.transport,
            evidence=f"checksummed READ and WRITE; {result.lane.evidence}{emulated}",
        )
        self._core.count("probes_succeeded")

    # --- verdicts, death, retirement --------------------------------------------------------

    def _judge(self, peer: Peer, state: VerdictState, reason: str, message: str, **proof: Any) -> None:
        if peer.retired:
            return
        fields: dict[str, Any] = {
            "bytes_moved": 0,
            "seconds": 0.0,
            "checksum_ok": False,
            "transport": "",
            "evidence": "",
            **proof,
        }
        fields |= {"state": state, "reason": reason, "message": message, "at": time.time()}
        peer.verdict = peer.verdict.model_copy(update=fields)
        self._publish()

    def _publish(self) -> None:
        self.verdicts = tuple(p.verdict for p in self._peers.values())
        self._core.changed()

    def _drained(self, agent_name: str) -> bool:
        """Nothing flies to an unrostered agent, and nothing will: its old connection is cut first."""
        for peer in self._retired:
            if peer.card.agent_name == agent_name and peer.channel is not None:
                peer.channel.close()
        return self.hooks.drained(agent_name)

    def _consider_death(self, peer: Peer) -> None:
        """A retired peer whose side ended the connection, and whose control port then refuses us
        or belongs to another incarnation, is a dead process. A roster entry that is gone, or a
        connection that we ended, proves nothing."""
        if peer.retired and peer.ended_there and peer.refused_since and not peer.dead:
            peer.dead = True
            self._core.spawn(self._bury(peer), f"bury-{peer.label}")

    async def _bury(self, peer: Peer) -> None:
        self._core.hot(1)
        await asyncio.sleep(DEATH_PROGRESS)
        self._core.hot(-1)
        self.hooks.on_drained(peer)

    def _tick(self, now: float) -> None:
        for peer in list(self._retired):
            if (self.hooks.owes(peer) and not peer.dead) or self._core.mover.flies_to(peer.card.agent_name):
                continue
            self._retired.remove(peer)
            if peer.channel is not None:
                peer.channel.close()
            for task in peer.tasks:
                task.cancel()
            self.prober.forget(peer)
            if peer.loaded:
                with contextlib.suppress(AgentFailure):
                    self._core.agent.remove_peer(peer.card.agent_name)
        for peer in self._peers.values():
            if peer.reload and not self._core.mover.flies_to(peer.card.agent_name):
                if now - peer.probed_at > REPROBE:
                    self._reload_now(peer)
            elif (
                peer.channel is not None
                and peer.verdict.state in (VerdictState.UNREACHABLE, VerdictState.PROBING)
                and now - peer.probed_at > REPROBE
            ):
                self._start_probe(peer)
            if peer.channel is None and peer.loaded and now - peer.since > self._core.timeouts.connect:
                peer.since = now
                if self.card.role is Role.PREFILL:
                    self._judge(peer, VerdictState.UNREACHABLE, PeerUnreachable.reason, "decode does not connect")
                self.hooks.on_peer_gone(peer, PeerUnreachable("the control connection is gone", peer=peer.label))

    def close(self) -> None:
        """Stop listening: from now on the control port refuses."""
        if self._server is not None:
            self._server.close()
