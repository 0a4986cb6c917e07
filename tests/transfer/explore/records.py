"""What a world remembers of what its engines asked for and what was posted."""

from __future__ import annotations

from dataclasses import dataclass

from pdtransfer.agent.fake import FakeHandle
from pdtransfer.peers import PeerKey
from pdtransfer.session.api import Identity
from pdtransfer.session.transfers import ReceiveTransfer, SendTransfer

from .network import Where
from .ranks import Rank

LegId = tuple[Identity, PeerKey, PeerKey]
"""Identities name incarnations, which are whole engines: with the places of both ranks, one leg."""


@dataclass(eq=False)
class Flight:
    """One posted handle. `state`: active, done, lost (errored: may land at any time), late (did)."""

    number: int
    source: Rank
    target: Rank | None
    handle: FakeHandle
    leg: LegId
    pages: tuple[int, ...]
    slots: tuple[int, ...]
    state: str = "active"


@dataclass(eq=False)
class Receipt:
    """One attempt of a decode engine. `freed`: the engine took its pages back."""

    rank: Rank
    room: int
    attempt: int
    pages: tuple[int, ...]
    transfer: ReceiveTransfer
    sources: tuple[Where, ...]
    freed: bool = False
    marked: bool = False
    """It failed, its pages came back and the engine wrote into them."""


@dataclass(eq=False)
class Sending:
    """One send of a prefill engine."""

    rank: Rank
    sender: SendTransfer
    given: int = 0
