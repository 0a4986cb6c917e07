"""Between the wiring and the request layer: hands frames and news about peers to whom they concern."""

from __future__ import annotations

from pdtransfer.contract.base import Role
from pdtransfer.contract.card import RankCard
from pdtransfer.errors import TransferError
from pdtransfer.peers import Peer
from pdtransfer.session.core import Core
from pdtransfer.session.destination import DestinationSide
from pdtransfer.session.frames import (
    Abort,
    AbortAck,
    Done,
    Failed,
    Frame,
    Moved,
    Request,
    SlotFilled,
    SlotGrant,
    SlotsWanted,
    Started,
)
from pdtransfer.session.rotation import Rotation
from pdtransfer.session.source import SourceSide


class Exchange:
    """`wiring.Hooks` of one rank. Runs in the core's thread."""

    def __init__(
        self, core: Core, role: Role, source: SourceSide, destination: DestinationSide, rotation: Rotation
    ) -> None:
        self._core = core
        self._decode = role is Role.DECODE
        self._source = source
        self._destination = destination
        self._rotation = rotation

    # --- peers ------------------------------------------------------------------------------

    def on_connected(self, peer: Peer) -> None:
        """Say which agent requests are for, then repeat what the peer may have missed; be ready for
        what it asks."""
        self._rotation.on_connected(peer)
        self.on_loaded(peer)
        self._destination.on_connected(peer)

    def on_loaded(self, peer: Peer) -> None:
        """Its agent is loaded and will be written to."""
        if not self._decode and peer.loaded:
            self._source.on_connected(peer)

    def on_peer_gone(self, peer: Peer, error: TransferError) -> None:
        """Transfers with it fail."""
        self._source.on_peer_gone(peer, error)
        self._destination.on_peer_gone(peer, error)

    def on_drained(self, peer: Peer) -> None:
        """Its writes can not land any more."""
        self._destination.on_drained(peer)

    def on_forgotten(self, peer: Peer) -> None:
        """It was let go for good."""
        self._source.forget(peer)
        self._destination.forget(peer)
        self._rotation.forget(peer)

    def owes(self, peer: Peer) -> bool:
        """A fence is wanted from it."""
        return self._destination.owes(peer)

    def drained(self, first_agent: str) -> bool:
        """Ours to that rank can not land any more."""
        return self._source.drained(first_agent)

    def uses(self, peer: Peer, generation: int) -> bool:
        """That agent of the peer is written to, or will be."""
        return self._source.uses(peer, generation)

    def on_unloaded(self, peer: Peer, card: RankCard) -> None:
        """An agent of it was forgotten."""
        self._source.on_unloaded(card)

    def on_agents_destroyed(self, peer: Peer, oldest: int) -> None:
        """Its agents before that generation are gone."""
        self._source.on_agents_destroyed(peer, oldest)

    # --- frames -----------------------------------------------------------------------------

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        """Hand a frame to whom it concerns; frames of the wrong direction are counted only."""
        if self._decode:
            self._for_decode(peer, frame)
        elif isinstance(frame, Request):
            self._source.askers.on_request(peer, frame)
        elif isinstance(frame, Abort):
            self._source.askers.on_abort(peer, frame)
        elif isinstance(frame, SlotGrant):
            self._source.on_grant(peer, frame)
        else:
            self._core.count("stray_frames_total")

    def _for_decode(self, peer: Peer, frame: Frame) -> None:
        if isinstance(frame, Started):
            self._destination.on_started(peer, frame)
        elif isinstance(frame, Done):
            self._destination.on_done(peer, frame)
        elif isinstance(frame, Failed):
            self._destination.on_failed(peer, frame)
        elif isinstance(frame, AbortAck):
            self._destination.on_abort_ack(peer, frame)
        elif isinstance(frame, SlotsWanted | SlotFilled):
            self._destination.on_slots(peer, frame)
        elif isinstance(frame, Moved):
            self._rotation.on_moved(peer, frame.generation)
        else:
            self._core.count("stray_frames_total")
