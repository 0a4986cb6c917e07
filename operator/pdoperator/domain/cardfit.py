"""Fit of running pods on their real layouts, once per pair of distinct layouts."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.facts import spec_facts
from pdoperator.domain.revision import role_revisions
from pdoperator.domain.view import Peer, View, rank_cards
from pdtransfer.contract import compat
from pdtransfer.contract.base import Role
from pdtransfer.contract.facts import RoleFacts

_Key = tuple[str, ...]


@dataclass
class CardFit:
    """Reports by pair of layouts. A cache for one decide(), nothing more."""

    spec: PDClusterSpec | None
    _reports: dict[tuple[_Key, _Key], compat.Report] = field(default_factory=dict)
    _facts: dict[Role, tuple[str, RoleFacts]] | None = None
    _keys: dict[str, _Key] = field(default_factory=dict)

    def _spec_facts(self, peer: Peer) -> RoleFacts | None:
        """Facts that this pod was launched with; None for pods of an older revision."""
        if self.spec is None:
            return None
        if self._facts is None:
            try:
                facts = spec_facts(self.spec)
            except ValueError:
                return None
            revisions = role_revisions(self.spec)
            self._facts = {role: (revisions[role], f) for role, f in zip(Role, facts, strict=True)}
        revision, told = self._facts[peer.role]
        return told if peer.pod.revision == revision else None

    def _key(self, peer: Peer) -> _Key:
        if peer.uid not in self._keys:
            cards = rank_cards(peer)
            self._keys[peer.uid] = (
                peer.pod.revision,
                cards[0].fingerprint,
                cards[0].engine.model_dump_json(),
                *(c.layout_hash for c in cards),
            )
        return self._keys[peer.uid]

    def report(self, prefill: Peer, decode: Peer) -> compat.Report:
        """Report of check_cards for these two pods."""
        key = (self._key(prefill), self._key(decode))
        if key not in self._reports:
            # Cards tell who moves the KV; the spec may name another backend already.
            self._reports[key] = compat.check_cards(
                rank_cards(prefill),
                rank_cards(decode),
                rank_cards(prefill)[0].engine.backend,
                prefill_spec=self._spec_facts(prefill),
                decode_spec=self._spec_facts(decode),
            )
        return self._reports[key]

    def fits(self, prefill: Peer, decode: Peer) -> bool:
        """True when these two pods may be wired."""
        return self.report(prefill, decode).fits

    def reports(self, view: View, revisions: dict[Role, str]) -> list[tuple[Peer, Peer, compat.Report]]:
        """One report per pair of distinct layouts among pods of the current revisions."""
        seen: set[tuple[_Key, _Key]] = set()
        out = []
        for p in view.side(Role.PREFILL):
            for d in view.side(Role.DECODE):
                if p.pod.revision != revisions.get(Role.PREFILL) or d.pod.revision != revisions.get(Role.DECODE):
                    continue
                key = (self._key(p), self._key(d))
                if key not in seen:
                    seen.add(key)
                    out.append((p, d, self.report(p, d)))
        return out
