"""Which prefill ranks a room is asked of: found once for each roster, bootstrap address and group."""

from __future__ import annotations

from collections.abc import Sequence

from pdtransfer.contract.base import Role
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.pairing import meet
from pdtransfer.errors import PeerNotRostered
from pdtransfer.peers import coverage_gap

Route = tuple[RankCard, ...]


class Routes:
    """For one roster and one decode rank; a new one of either makes a new object."""

    def __init__(self, mine: RankCard, roster: Sequence[RankCard]) -> None:
        self._mine = mine
        self._roster = tuple(roster)
        self._behind: dict[str, Route] = {}
        self._groups: dict[tuple[int, ...], tuple[Route, str | None]] = {}
        """By the cards' places in the roster: the group, and what it lacks."""

    def behind(self, bootstrap: str) -> Route:
        """Prefill ranks behind `bootstrap` that this rank reads from. Raises PeerNotRostered."""
        found = self._behind.get(bootstrap)
        if found is None:
            mine = self._mine.layout
            cards = [c for c in self._roster if c.role is Role.PREFILL and c.bootstrap == bootstrap]
            found = tuple(sorted((c for c in cards if meet(c.layout, mine)), key=lambda c: (c.pod_uid, c.rank)))
            if not found:
                # Not kept: the addresses come from requests, and those that are wrong have no end.
                raise PeerNotRostered("the roster names no prefill rank at this bootstrap address", peer=bootstrap)
            self._behind[bootstrap] = found
        return found

    def of(self, room: int, bootstrap: str, group: int | None = None) -> Route:
        """The ranks to ask: one data-parallel group (None: room modulo their number, SGLang's rule), and
        together they must hold every region and head of this rank. Raises PeerNotRostered."""
        cards = self.behind(bootstrap)
        ranks = tuple(
            c
            for c in cards
            if c.layout.coordinates.dp == (room % c.layout.coordinates.dp_size if group is None else group)
        )
        key = tuple(id(c) for c in ranks)
        held = self._groups.get(key)
        if held is None:
            held = self._groups[key] = (ranks, coverage_gap(ranks, self._mine))
        if held[1] is not None:
            raise PeerNotRostered(held[1], room=room, peer=bootstrap)
        return held[0]
