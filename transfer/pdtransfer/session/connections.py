"""Control connections between ranks: decode dials, prefill accepts, one connection a pair.

A certificate of the CA that names this PDCluster opens a connection, the roster decides who may stay:
the first frame must name a rostered rank's place, incarnation and agent (a random name that only the
operator and that rank's own peers are told).
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Mapping
from typing import Protocol

from pdtransfer.contract.card import RankCard
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.errors import LayoutMismatch, PeerNotRostered, PeerReplaced, PeerUnreachable, TransferError
from pdtransfer.peers import Peer, PeerKey
from pdtransfer.session.channel import Channel, listen, renew, server_context, stamp
from pdtransfer.session.core import Core
from pdtransfer.session.frames import MAX_HELLO, Frame, FrameError, Hello, Refused, Welcome
from pdtransfer.session.handshake import admit, greet

logger = logging.getLogger(__name__)

BACKOFF = (0.05, 2.0)
"""Seconds between dials: first and longest."""
MAX_STRANGERS = 512
"""Accepted connections that have not said who they are."""


class Owner(Protocol):
    """Who holds the peers and wants to know about their connections."""

    card: RankCard

    @property
    def peers(self) -> Mapping[PeerKey, Peer]: ...
    def wants(self, peer: Peer) -> bool:
        """A connection to it is still of use."""

    async def loaded(self, peer: Peer) -> None:
        """Wait until the agent was told of it."""

    def drained(self, first_agent: str) -> bool: ...
    def judge(self, peer: Peer, state: VerdictState, reason: str, message: str) -> None: ...
    def on_connected(self, peer: Peer) -> None: ...
    def on_disconnected(self, peer: Peer) -> None: ...
    def on_drained(self, peer: Peer) -> None: ...
    def on_frame(self, peer: Peer, frame: Frame) -> None: ...


class Connections:
    """Runs in the core's thread."""

    def __init__(self, core: Core, owner: Owner) -> None:
        self._core = core
        self._owner = owner
        self._server: asyncio.Server | None = None
        self._strangers = 0
        core.on_stop.append(self.close)

    async def listen(self) -> int:
        """Open the control listener; returns its port."""
        config = self._core.config
        if config.tls_dir is None:
            logger.warning("%s: the control channel is PLAIN TEXT (no tls_dir): tests only", self._core.name)
        seen = stamp(config.tls_dir) if config.tls_dir is not None else ()
        tls = server_context(config.tls_dir)
        self._server = await listen(
            self._opened, config.listen_host, config.control_port, tls, self._core.timeouts.connect
        )
        if tls is not None:
            self._core.spawn(renew(tls, str(config.tls_dir), seen), "tls-renew")
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stop listening: from now on the control port refuses."""
        if self._server is not None:
            self._server.close()

    async def dial(self, peer: Peer) -> None:
        """Connect, stay connected, until the peer is dead or nothing is wanted of it."""
        owner, pause = self._owner, BACKOFF[0]
        while owner.wants(peer):
            try:
                hands = greet(owner.card, peer, self._core.config, owner.on_drained)
                channel = await asyncio.wait_for(hands, self._core.timeouts.connect)
            except Exception as error:
                self._judge_dial(peer, error)
            else:
                began = time.monotonic()
                await self._stay(peer, channel)
                if time.monotonic() - began > BACKOFF[1]:
                    pause = BACKOFF[0]  # not where each one breaks at once
            await asyncio.sleep(pause * random.uniform(0.7, 1.3))
            pause = min(BACKOFF[1], pause * 2)

    def _judge_dial(self, peer: Peer, error: Exception) -> None:
        state = VerdictState.UNREACHABLE
        if isinstance(error, PeerNotRostered):
            # Rosters reach the two sides one after the other: for a while that is no finding.
            young = time.monotonic() - peer.known_at < self._core.timeouts.probe
            self._owner.judge(peer, VerdictState.PROBING if young else state, error.reason, error.message)
        elif isinstance(error, TransferError):
            bad = isinstance(error, PeerReplaced | LayoutMismatch)
            self._owner.judge(peer, VerdictState.REFUSED if bad else state, error.reason, error.message)
        else:
            peer.refused_since |= isinstance(error, ConnectionRefusedError)
            self._core.count("deadlines_total", isinstance(error, TimeoutError), state="connect")
            if not isinstance(error, OSError | TimeoutError | FrameError):
                logger.exception("%s: %s can not be dialled", self._core.name, peer.label)
            reason = "TLSFailed" if isinstance(error, ssl.SSLError) else PeerUnreachable.reason
            self._owner.judge(peer, state, reason, f"{type(error).__name__}: {error}")

    def _opened(self, channel: Channel) -> None:
        self._core.spawn(self._accept(channel), "accepted")

    async def _accept(self, channel: Channel) -> None:
        try:
            peer = await self._welcome(channel)
            if peer is not None:
                await self._stay(peer, channel)
        except (TimeoutError, FrameError) as error:
            logger.warning("%s: a control connection was dropped: %s", self._core.name, error)
        except Exception as error:
            self._core.crash(error)
        finally:
            channel.close()

    async def _welcome(self, channel: Channel) -> Peer | None:
        """Whom the dialling side is; None when it was refused or said nothing."""
        if self._strangers >= MAX_STRANGERS:
            self._core.count("connections_refused_total")
            return None
        self._strangers += 1
        try:
            hello = await asyncio.wait_for(channel.receive(MAX_HELLO), self._core.timeouts.connect)
        finally:
            self._strangers -= 1
        if not isinstance(hello, Hello):
            return None
        mine = self._owner.card
        names, wanted = channel.certificate_names, self._core.config.server_name
        answer: Peer | Refused
        if names is not None and wanted not in names:
            # One CA may serve many PDClusters: the chain alone lets nobody in.
            answer = Refused(reason="OtherCluster", message=f"the certificate does not name {wanted}")
        else:
            answer = admit(mine, self._owner.peers, self._owner.drained, hello)
            while isinstance(answer, Peer) and answer.loading:
                # Frames are taken of loaded peers only; the dialling side waits for its own limit.
                await asyncio.wait_for(self._owner.loaded(answer), self._core.timeouts.connect)
                answer = admit(mine, self._owner.peers, self._owner.drained, hello)
        if isinstance(answer, Refused):
            self._core.count("connections_refused_total")
            channel.send(answer)
            return None
        channel.send(
            Welcome(pod_uid=mine.pod_uid, incarnation=mine.incarnation, rank=mine.rank, agent_name=mine.agent_name)
        )
        return answer

    async def _stay(self, peer: Peer, channel: Channel) -> None:
        """Serve a connection until it ends."""
        old, peer.channel = peer.channel, channel
        if old is not None:
            old.close()
            self._owner.on_disconnected(peer)
        peer.ended_there = peer.refused_since = False
        keep = self._core.spawn(channel.keep_alive(self._core.timeouts.connect), "keep-alive")
        self._owner.on_connected(peer)
        try:
            await channel.serve(lambda frame: self._owner.on_frame(peer, frame))
        except FrameError as error:
            self._core.count("frame_errors_total")
            logger.warning("%s: %s sent no frame: %s", self._core.name, peer.label, error)
        except Exception:
            # One peer's frame must not end the transfers with all others.
            self._core.count("frame_errors_total")
            logger.exception("%s: a frame of %s could not be handled", self._core.name, peer.label)
        finally:
            keep.cancel()
            if peer.channel is channel:
                peer.channel = None
                peer.ended_there = not channel.closed_here
                peer.since = time.monotonic()
                self._owner.on_disconnected(peer)
                self._owner.judge(
                    peer, VerdictState.UNREACHABLE, PeerUnreachable.reason, "the control connection ended"
                )
            channel.close()
