"""Answers of the sidecar, computed from its state: PodCards, PodVerdicts and readiness. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdtransfer.contract.card import FailedRank, PodCards, RefusedRank
from pdtransfer.contract.verdict import PodVerdicts, Verdict, VerdictState
from pdtransfer.sidecar.model import REFUSED_FOR, STALE_AFTER, PeerRef, PodState, Refused

MAX_LINES = 24
"""Lines of a readiness answer: it lands in `kubectl describe`."""


@dataclass(frozen=True)
class Readiness:
    """`missing` is why the pod is not ready (empty: it is), `notes` what is odd but no reason."""

    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        return not self.missing

    @property
    def text(self) -> str:
        """Body of /readyz."""
        lines = [*(self.missing or ("ready",)), *(f"note: {n}" for n in self.notes)]
        if len(lines) > MAX_LINES:
            lines = [*lines[:MAX_LINES], f"... and {len(lines) - MAX_LINES} more"]
        return "\n".join(lines) + "\n"


def stale_ranks(state: PodState, now: float) -> tuple[int, ...]:
    """Ranks whose socket is open but that said nothing for STALE_AFTER seconds."""
    return tuple(r.rank for r in state.ranks if now - r.seen > STALE_AFTER)


def current_refusals(state: PodState, now: float) -> tuple[Refused, ...]:
    """Refusals of the last REFUSED_FOR seconds."""
    return tuple(r for r in state.refused if now - r.at < REFUSED_FOR)


def failed_ranks(state: PodState) -> tuple[FailedRank, ...]:
    """Ranks of the present incarnation that say that they failed, in order."""
    mine = {f.rank: f.message for f in state.failed if f.incarnation == state.incarnation or not state.incarnation}
    return tuple(FailedRank(rank=rank, message=message) for rank, message in sorted(mine.items()))


def pod_cards(state: PodState, now: float) -> PodCards:
    """Answer of GET /v1/cards."""
    return PodCards(
        cluster_uid=state.identity.cluster_uid,
        pod_uid=state.identity.pod_uid,
        role=state.identity.role,
        incarnation=state.incarnation,
        expected_ranks=state.expected_ranks,
        cards=tuple(r.card for r in state.ranks),
        roster_term=state.key.term,
        roster_counter=state.key.counter,
        roster_hash=state.roster_hash,
        stale_ranks=stale_ranks(state, now),
        refused=tuple(
            RefusedRank(rank=r.rank, reason=r.reason, message=r.message)
            for r in sorted(current_refusals(state, now), key=lambda r: (r.rank is not None, r.rank or 0, r.reason))
        ),
        failed=failed_ranks(state),
    )


def pod_verdicts(state: PodState) -> PodVerdicts:
    """Answer of GET /v1/verdicts."""
    return PodVerdicts(
        cluster_uid=state.identity.cluster_uid,
        pod_uid=state.identity.pod_uid,
        role=state.identity.role,
        incarnation=state.incarnation,
        roster_term=state.key.term,
        roster_counter=state.key.counter,
        roster_hash=state.roster_hash,
        verdicts=tuple(v for r in state.ranks for v in r.verdicts),
        draining=state.draining,
        inflight=sum(r.inflight for r in state.ranks),
    )


def readiness(state: PodState, now: float, wiring: bool, tls_problem: str = "", tls_warning: str = "") -> Readiness:
    """Ready means: every expected rank is connected and, with wiring, at least one whole peer pod is
    wired (every pair the roster names with it is Wired by the local rank). A late heartbeat is a note,
    and so is a refusal while every expected rank is there (a stray client must not unready a pod)."""
    missing: list[str] = []
    if tls_problem:
        missing.append(f"control API has no usable certificate: {tls_problem}")
    if state.draining:
        missing.append("draining: no new transfers are taken")
    missing += [f"rank {f.rank} failed: {f.message}" for f in failed_ranks(state)]
    notes = [f"rank {r} has sent no heartbeat for more than {STALE_AFTER:g} s" for r in stale_ranks(state, now)]
    if tls_warning:
        notes.append(f"certificates: {tls_warning}")
    refusals = [
        f"{'a rank' if r.rank is None else f'rank {r.rank}'} was refused: {r.reason}: {r.message}"
        for r in current_refusals(state, now)
    ]
    gone = _ranks_missing(state, wiring)
    if gone:
        missing += [*refusals, *gone]
    else:
        notes += refusals
    if wiring:
        missing += _wiring_missing(state)
    return Readiness(tuple(missing), tuple(notes))


def _ranks_missing(state: PodState, wiring: bool) -> list[str]:
    have = {r.rank for r in state.ranks}
    if state.expected_ranks == 0:
        # Without wiring an engine may have no link to the sidecar at all.
        return ["no rank registered yet"] if wiring else []
    out: list[str] = []
    if len(have) < state.expected_ranks:
        gone = [r for r in range(state.expected_ranks) if r not in have]
        if all(r < state.expected_ranks for r in have):
            out += [f"rank {r} not registered" for r in gone]
        else:  # a later node of a group: its ranks do not start at 0
            out.append(f"{len(have)} of {state.expected_ranks} ranks registered")
    return out


def _wiring_missing(state: PodState) -> list[str]:
    if state.roster is None:
        return ["no roster yet"]
    pairs: dict[str, list[tuple[int, PeerRef]]] = {}
    for rank, ref in state.roster.pairs:
        pairs.setdefault(ref.pod_uid, []).append((rank, ref))
    if not pairs:
        return ["the roster names no peer"]
    known = {(v.rank, v.peer_pod_uid, v.peer_incarnation, v.peer_rank): v for r in state.ranks for v in r.verdicts}
    out: list[str] = []
    for wanted in pairs.values():
        bad = [
            line
            for rank, ref in wanted
            if (line := _unwired(rank, ref, known.get((rank, ref.pod_uid, ref.incarnation, ref.rank))))
        ]
        if not bad:
            return []
        out += bad
    return ["no peer pod is wired", *out]


def _unwired(rank: int, ref: PeerRef, verdict: Verdict | None) -> str:
    if verdict is not None and verdict.state is VerdictState.WIRED:
        return ""
    state = "not probed" if verdict is None else verdict.state.value.lower()
    why = ": ".join(w for w in (verdict.reason, verdict.message) if w) if verdict is not None else ""
    return f"peer {ref.pod_name or ref.pod_uid} rank {ref.rank} {state} from rank {rank}" + (f": {why}" if why else "")
