"""Exchange of cards through a folder instead of a sidecar: for tests and for use without Kubernetes.

Each rank writes `<pod uid>-<rank>.json` and reads the others'. A pod that comes back under the same UID
replaces its files; a rank that ends on purpose removes its own.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from pydantic import ValidationError

from pdtransfer.contract.card import RankCard
from pdtransfer.contract.pairing import peers_of
from pdtransfer.session.api import Endpoint

log = logging.getLogger(__name__)
INTERVAL_S = 0.2


class StaticPeers:
    """Keeps the endpoint's peers equal to the cards in the folder that this rank exchanges KV with."""

    def __init__(self, folder: Path, endpoint: Endpoint) -> None:
        self._folder = folder
        self._endpoint = endpoint
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="static-peers", daemon=True)
        self.failed: BaseException | None = None
        self._applied: tuple[RankCard, ...] | None = None
        self._shown: RankCard | None = None

    def start(self) -> StaticPeers:
        """Show the card and begin to follow the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._show()
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop and take the card away."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(2 * INTERVAL_S + 1)
        if self._shown is not None:
            self._file(self._shown).unlink(missing_ok=True)

    def _file(self, card: RankCard) -> Path:
        return self._folder / f"{card.pod_uid}-{card.rank}.json"

    def _show(self) -> None:
        card = self._endpoint.card
        if card == self._shown:
            return
        path = self._file(card)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(card.model_dump_json(), encoding="utf-8")
        draft.replace(path)
        self._shown = card

    def _run(self) -> None:
        try:
            while not self._stop.wait(INTERVAL_S):
                try:
                    self._follow()
                except Exception:
                    log.exception("the folder of cards %s could not be followed; trying again", self._folder)
        except BaseException as error:
            self.failed = error
            raise

    def _follow(self) -> None:
        self._show()
        card = self._endpoint.card
        others = [c for c in map(_read, sorted(self._folder.glob("*.json"))) if c is not None]
        peers = peers_of(card, [c for c in others if c.cluster_uid == card.cluster_uid])
        if peers != self._applied:
            log.info("peers: %s", [f"{p.role.value} {p.pod_uid} rank {p.rank} {p.incarnation}" for p in peers])
            self._endpoint.apply_peers(peers)
            self._applied = peers


def _read(path: Path) -> RankCard | None:
    try:
        return RankCard.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValidationError, OSError) as error:
        log.warning("%s is no card: %s", path, error)
        return None
