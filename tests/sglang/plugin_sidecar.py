"""A sidecar reduced to a socket that speaks the contract's lines (contract/link.py): takes cards and failures, hands
out peers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdtransfer.contract.base import Role
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.link import Failed, Hello, Peers, rank_messages
from pdtransfer.contract.pairing import peers_of
from tests.sglang.plugin_world import Engine, wait_for


class Sidecar:
    """Takes Hellos, hands out peers."""

    def __init__(self, path: Path) -> None:
        self.cards: dict[tuple[str, int], RankCard] = {}
        self.failed: dict[int, Failed] = {}
        """By rank, of ranks that said so."""
        self._lines: dict[tuple[str, int], socket.socket] = {}
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen()
        self._counter = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            for line in lines:
                message = rank_messages.validate_json(line)
                if isinstance(message, Hello):
                    place = (message.card.pod_uid, message.card.rank)
                    self._lines[place] = connection
                    self.cards[place] = message.card
                elif isinstance(message, Failed):
                    self.failed[message.rank] = message

    def roster(self, cards: Sequence[RankCard], to: Role | None = None) -> None:
        """Everyone's peers among these, or those of one side."""
        self._counter += 1
        for place, card in list(self.cards.items()):
            if card.role is not (to or card.role):
                continue
            message = Peers(term=1, counter=self._counter, roster_hash="h", peers=peers_of(card, cards))
            self._lines[place].sendall(message.model_dump_json().encode() + b"\n")

    def close(self) -> None:
        self._server.close()


def shown(sidecar: Sidecar, count: int) -> list[RankCard]:
    """The cards, once so many are there."""
    wait_for(lambda: len(sidecar.cards) == count, f"{count} cards")
    return list(sidecar.cards.values())


def wired(*engines: Engine) -> None:
    """Waits until each rank of these has peers and is wired with all of them."""

    def all_wired() -> bool:
        managers: list[Any] = [m for e in engines for m in e.managers]
        return all(m.rank.peers and all(m.rank.wired(c) for c in m.rank.peers) for m in managers)

    wait_for(all_wired, "the wiring")
