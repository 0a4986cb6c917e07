"""Peers of one rank: loaded into the agent, connected, probed; verdicts about them.

Only cards of the roster are talked to. A peer that leaves the roster is kept (its connection too)
until nothing of it is in flight and no fence is owed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from pydantic import BaseModel

from pdtransfer.agent.hca import Hca
from pdtransfer.contract.base import Role
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.verdict import Verdict, VerdictState
from pdtransfer.errors import PeerReplaced, PeerUnreachable, TransferError
from pdtransfer.peers import Peer, PeerKey, first_verdict, judged, key_of, refusal, roster_change, same_peer, unwired
from pdtransfer.reach import is_dead, revocable, same_namespace
from pdtransfer.session.connections import Connections
from pdtransfer.session.core import Core
from pdtransfer.session.deaths import Deaths
from pdtransfer.session.frames import Frame, ProbeFrame, Rotated
from pdtransfer.session.loader import Loader, unload
from pdtransfer.session.moves import Moves
from pdtransfer.session.probe import Prober
from pdtransfer.session.proofs import Proofs
from pdtransfer.session.selfcheck import SelfCheck

logger = logging.getLogger(__name__)

REPROBE = 1.0
"""Seconds before a connected peer that failed its probe is probed again."""
LOST = 5.0
"""Seconds before a peer whose agent could not be reached is loaded again."""


class Hooks(Protocol):
    """What the request layer wants to know."""

    def on_connected(self, peer: Peer) -> None: ...
    def on_peer_gone(self, peer: Peer, error: TransferError) -> None: ...
    def on_drained(self, peer: Peer) -> None: ...
    def on_forgotten(self, peer: Peer) -> None: ...
    def owes(self, peer: Peer) -> bool: ...
    def drained(self, first_agent: str) -> bool: ...
    def uses(self, peer: Peer, generation: int) -> bool: ...
    def on_loaded(self, peer: Peer) -> None: ...
    def on_unloaded(self, peer: Peer, card: RankCard) -> None: ...
    def on_agents_destroyed(self, peer: Peer, oldest: int) -> None: ...
    def on_frame(self, peer: Peer, frame: Frame) -> None: ...


class Wiring:
    """Peers and verdicts. Runs in the core's thread; `verdicts` may be read from any."""

    hooks: Hooks

    def __init__(self, core: Core, card: RankCard, hcas: tuple[Hca, ...] = ()) -> None:
        self._core = core
        self.card = card
        self._peers: dict[PeerKey, Peer] = {}
        self._retired: list[Peer] = []
        self.loader = Loader(core, self._refusal, self._loaded)
        self.connections = Connections(core, self)
        self.prober = Prober(core, lambda: self.card, hcas)
        self.proofs = Proofs(core, self.prober, self)
        self.self_check = SelfCheck(core, self.prober.scratch)
        self._moves = Moves(core, self, lambda: self.hooks)
        self._deaths = Deaths(core, lambda: self.card, self.on_drained)
        self.verdicts: tuple[Verdict, ...] = ()
        core.ticks.append(self._tick)

    @property
    def peers(self) -> Mapping[PeerKey, Peer]:
        """Who the roster names."""
        return self._peers

    def connected(self) -> list[Peer]:
        """Those of `known` with a control connection."""
        return [p for p in self.known() if p.channel is not None]

    def known(self) -> list[Peer]:
        """These, and those that it named and that are not let go."""
        return [*self._peers.values(), *self._retired]

    def revocable(self, card: RankCard) -> bool:
        """Destroying this rank's agent stops every write of that peer."""
        process = card.process
        dead = process is not None and same_namespace(self.card, card) and is_dead(process)
        return dead or revocable(self.card, card)

    def current(self, key: PeerKey, card: RankCard) -> Peer:
        """The peer behind a card; it may still wait for its turn to be loaded. Raises PeerReplaced when the
        roster names another one by now, PeerUnreachable when it could not be wired."""
        peer = self._peers.get(key)
        if peer is None or peer.card.incarnation != card.incarnation:
            raise PeerReplaced("the roster changed", peer=f"{card.pod_name or card.pod_uid}/{card.rank}")
        if not (peer.loaded or peer.loading):
            raise unwired(peer)
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
        for card in change.rotated:
            self._moves.adopt(self._peers[key_of(card)], card)
        self._publish()

    def _add(self, card: RankCard) -> None:
        if self._take_back(card):
            return
        peer = Peer(card, first_verdict(self.card, card))
        self._peers[peer.key] = peer
        self.loader.want(peer)

    def _loaded(self, peer: Peer, why: tuple[str, str] | None) -> None:
        """It was loaded, or loaded again, or why not."""
        if why is not None:
            known = peer.reload or peer.lost
            peer.probed_at = time.monotonic()
            self.judge(peer, VerdictState.UNREACHABLE if known else VerdictState.REFUSED, *why)
            if not known:  # for good: who asked it before its turn need not wait
                self.hooks.on_peer_gone(peer, unwired(peer))
        elif peer.channel is not None:
            self.proofs.start(peer)
        elif self.card.role is Role.DECODE and not any(not t.done() for t in peer.tasks):
            self._dial(peer)

    async def loaded(self, peer: Peer) -> None:
        """Wait until the agent was told of it."""
        await self.loader.loaded(peer)

    def _refusal(self, peer: Peer) -> tuple[str, str] | None:
        try:
            return refusal(self.card, peer.card)
        except Exception as error:  # one card that breaks the checks must not cost all peers
            logger.exception("%s: the card of %s can not be checked", self._core.name, peer.label)
            return "BadCard", f"it can not be checked: {error!r}"

    def _dial(self, peer: Peer) -> None:
        peer.tasks.append(self._core.spawn(self.connections.dial(peer), f"dial-{peer.label}"))

    def _take_back(self, card: RankCard) -> bool:
        """A peer that left the roster and comes back before it was let go is the same peer (its
        agent is still loaded, its fences are still owed)."""
        peer = next((p for p in self._retired if not p.dead and same_peer(p.card, card)), None)
        if peer is None:
            return False
        self._retired.remove(peer)
        self._peers[peer.key] = peer
        peer.retired, peer.since = False, time.monotonic()
        self._moves.adopt(peer, card)
        if not peer.loaded:
            self.loader.want(peer)  # it left before its turn, or was refused
        elif peer.channel is not None:
            self.proofs.start(peer)
        elif self.card.role is Role.DECODE:
            for task in peer.tasks:
                task.cancel()
            peer.probing = False
            peer.tasks.clear()
            self._dial(peer)
        return True

    def reload(self, peer: Peer) -> None:
        """NIXL's connection to the peer broke: only remove and add mend it."""
        peer.reload = True
        self.self_check.failed()

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
                self.proofs.start(peer)

    # --- connections (connections.Owner) ----------------------------------------------------

    def wants(self, peer: Peer) -> bool:
        """It lives, and the roster or a fence wants it."""
        return not peer.dead and (not peer.retired or self.hooks.owes(peer))

    def on_connected(self, peer: Peer) -> None:
        """Repeat what the peer may have missed, and prove that bytes move."""
        self.hooks.on_connected(peer)
        if not peer.retired:
            self.proofs.start(peer)

    def on_disconnected(self, peer: Peer) -> None:
        """Who waits for its answer waits no more."""
        self.prober.on_disconnected(peer)

    def on_drained(self, peer: Peer) -> None:
        """Its writes can not land any more."""
        self.hooks.on_drained(peer)

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        """A frame of a rostered peer, or of one that owes a fence."""
        if isinstance(frame, ProbeFrame):
            self.prober.on_frame(peer, frame)
        elif isinstance(frame, Rotated):
            self._moves.on_news(peer, frame)
        else:
            self.hooks.on_frame(peer, frame)

    # --- agents that change ------------------------------------------------------------------

    def on_own_agent(self, loaded: Collection[str]) -> None:
        """This rank took a new agent, which knows those peers by their agents' names."""
        for peer in self.known():
            peer.loaded, peer.reload, peer.broken = peer.card.agent_name in loaded, False, False
            if not peer.loaded and not peer.retired:
                self.loader.want(peer)
            elif peer.channel is not None and not peer.retired:
                self.proofs.start(peer)

    def fences(self, peer: Peer) -> bool:
        """The end of its agent stops every write of this rank to it."""
        return revocable(peer.card, self.card)

    def on_loaded(self, peer: Peer) -> None:
        """A peer's new agent was loaded."""
        self.hooks.on_loaded(peer)
        if peer.channel is not None and not peer.retired:
            self.proofs.start(peer)

    # --- verdicts, retirement ---------------------------------------------------------------

    def judge(self, peer: Peer, state: VerdictState, reason: str, message: str, **proof: Any) -> None:
        """A new finding about a peer of the roster."""
        if not peer.retired:
            peer.verdict = judged(peer.verdict, state, reason, message, **proof)
            self._publish()

    def _publish(self) -> None:
        self.verdicts = tuple(p.verdict for p in self._peers.values())
        self._core.changed()

    def drained(self, first_agent: str) -> bool:
        """Nothing flies to an unrostered rank's agents, and nothing will: its old connection is cut first."""
        for peer in self._retired:
            if peer.card.first_agent == first_agent and peer.channel is not None:
                peer.channel.close()
        return self.hooks.drained(first_agent)

    def _tick(self, now: float) -> None:
        known = self.known()
        self._moves.tick(known, now)
        self._deaths.tick((p for p in known if self.hooks.owes(p)), now)
        for peer in list(self._retired):
            if (self.hooks.owes(peer) and not peer.dead) or any(map(self._core.mover.flies_to, peer.agents)):
                continue
            self._retired.remove(peer)
            if peer.channel is not None:
                peer.channel.close()
            for task in peer.tasks:
                task.cancel()
            self.prober.forget(peer)
            self.hooks.on_forgotten(peer)
            self._moves.forget(peer)
            if peer.loaded:
                self.hooks.on_unloaded(peer, peer.card)
                unload(self._core, peer)
        for peer in self._peers.values():
            if (peer.reload or peer.lost) and not self._core.mover.flies_to(peer.card.agent_name):
                if now - peer.probed_at > (REPROBE if peer.reload else LOST):
                    self.loader.want(peer)
            elif (
                peer.channel is not None
                and peer.verdict.state in (VerdictState.UNREACHABLE, VerdictState.PROBING)
                and now - peer.probed_at > REPROBE
            ):
                self.proofs.start(peer)
            if peer.channel is None and peer.loaded and now - peer.since > self._core.timeouts.connect:
                peer.since = now
                if self.card.role is Role.PREFILL:
                    self.judge(peer, VerdictState.UNREACHABLE, PeerUnreachable.reason, "decode does not connect")
                self.hooks.on_peer_gone(peer, PeerUnreachable(peer.gone, peer=peer.label))
