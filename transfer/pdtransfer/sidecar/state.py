"""The pure transitions between states of a sidecar (`model.PodState`).

Each takes a state and returns the next one with the effects the caller must carry out (lines to send
to ranks, connections to close). Nothing here reads a clock or does I/O. Invariants
(tests/sidecar/test_sidecar_state.py): the roster key never goes back, equal keys mean equal content,
a new incarnation clears roster and verdicts, a replaced incarnation never comes back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pdtransfer.contract.link import Drain, Failed, Heartbeat, Hello, Peers, Probe, Refuse, Verdicts
from pdtransfer.contract.metrics import checked
from pdtransfer.contract.roster import RosterKey, RosterRefusal
from pdtransfer.sidecar.model import (
    KEEP_REFUSED,
    KEEP_RETIRED,
    REFUSED_FOR,
    Close,
    Effect,
    FailedEntry,
    HeldRoster,
    Identity,
    PodState,
    Push,
    RankEntry,
    Refused,
    Send,
    Step,
)


def _refusal(state: PodState, hello: Hello) -> tuple[str, str] | None:
    """(reason, message) why this Hello is not taken, or None."""
    me, card = state.identity, hello.card
    if card.cluster_uid != me.cluster_uid:
        return "OtherCluster", f"the card names PDCluster {card.cluster_uid!r}, this is {me.cluster_uid!r}"
    if card.pod_uid != me.pod_uid:
        return "OtherPod", f"the card names pod {card.pod_uid!r}, this is {me.pod_uid!r}"
    if card.role is not me.role:
        return "OtherRole", f"the engine runs as {card.role.value}, the pod is {me.role.value}"
    if not card.incarnation:
        return "NoIncarnation", "the card names no incarnation"
    if card.incarnation in state.retired:
        return "OldIncarnation", f"incarnation {card.incarnation} was replaced by {state.incarnation}"
    if (broken := card.seal_broken) is not None:
        return "SealBroken", broken
    if card.incarnation == state.incarnation and state.ranks:
        if hello.expected_ranks != state.expected_ranks:
            return "ExpectedRanksDiffer", (
                f"rank {card.rank} expects {hello.expected_ranks} ranks in this pod, "
                f"the others expect {state.expected_ranks}"
            )
        others = [r for r in state.ranks if r.rank != card.rank]
        if len(others) >= state.expected_ranks:
            return "TooManyRanks", (
                f"rank {card.rank} is one more than the {state.expected_ranks} expected "
                f"(registered: {', '.join(str(r.rank) for r in others)})"
            )
    return None


def hello(state: PodState, conn: int, message: Hello, now: float) -> Step:
    """A rank shows its card (first line, or again when its card changed)."""
    card = message.card
    if (why := _refusal(state, message)) is not None:
        state, effects = refuse(state, conn, card.rank, why[0], why[1], now)
        return closed(state, conn), effects
    out: list[Effect] = []
    if card.incarnation != state.incarnation:
        out += [Close(r.conn, f"replaced by incarnation {card.incarnation}") for r in state.ranks if r.conn != conn]
        retired = (*state.retired, state.incarnation) if state.incarnation else state.retired
        state = replace(
            state,
            incarnation=card.incarnation,
            ranks=(),
            roster=None,
            retired=retired[-KEEP_RETIRED:],
        )
    out += [
        Close(r.conn, f"rank {card.rank} connected again")
        for r in state.ranks
        if r.rank == card.rank and r.conn != conn
    ]
    before = state.by_conn(conn)
    entry = RankEntry(conn=conn, card=card, seen=now)
    if before is not None and before.rank == card.rank:
        entry = replace(before, card=card, seen=now)
    kept = [r for r in state.ranks if r.rank != card.rank and r.conn != conn]
    state = replace(
        state,
        expected_ranks=message.expected_ranks,
        ranks=tuple(sorted([*kept, entry], key=lambda r: r.rank)),
        refused=tuple(r for r in state.refused if r.rank != card.rank),
        revision=state.revision + 1,
    )
    if state.roster is not None:
        out.append(_peers(conn, state.roster, card.rank))
    if state.draining:
        out.append(Send(conn, Drain()))
    return state, tuple(out)


def refuse(state: PodState, conn: int, rank: int | None, reason: str, message: str, now: float) -> Step:
    """Turn a connection away with a reason, and remember it for /v1/cards and /readyz."""
    others = [
        r
        for r in state.refused
        if (r.rank, r.reason, r.message) != (rank, reason, message) and now - r.at < REFUSED_FOR
    ]
    refused = (*others, Refused(rank, reason, message, now))[-KEEP_REFUSED:]
    state = replace(state, refused=refused, revision=state.revision + 1)
    return state, (Send(conn, Refuse(reason=reason, message=message)), Close(conn, reason))


def heartbeat(state: PodState, conn: int, message: Heartbeat, now: float) -> PodState:
    """Still alive. From a connection that is not registered: nothing."""
    state = _update(state, conn, seen=now, inflight=message.inflight)
    if message.metrics is not None:
        metrics, bad = checked(message.metrics)
        state = _update(state, conn, metrics=metrics, bad_samples=bad)
    return state


def verdicts(state: PodState, conn: int, message: Verdicts, now: float) -> PodState:
    """The rank's verdicts, whole. Those that speak for another rank or incarnation are dropped."""
    entry = state.by_conn(conn)
    if entry is None:
        return state
    own = tuple(v for v in message.verdicts if v.rank == entry.rank and v.incarnation == entry.card.incarnation)
    return _update(state, conn, seen=now, verdicts=own)


def _update(state: PodState, conn: int, **changes: object) -> PodState:
    if state.by_conn(conn) is None:
        return state
    ranks = tuple(replace(r, **changes) if r.conn == conn else r for r in state.ranks)  # type: ignore[arg-type]
    return replace(state, ranks=ranks)


def failed(state: PodState, conn: int, message: Failed, now: float) -> Step:
    """A rank says that it failed: it has no card any more. One of an incarnation that was replaced is turned away."""
    if message.incarnation in state.retired:
        told = f"incarnation {message.incarnation} was replaced by {state.incarnation}"
        return refuse(state, conn, message.rank, "OldIncarnation", told, now)
    entry = FailedEntry(conn, message.rank, message.incarnation, message.message)
    state = closed(state, conn)
    return replace(state, failed=(*state.failed, entry), revision=state.revision + 1), ()


def closed(state: PodState, conn: int) -> PodState:
    """The connection ended: its card is gone. Incarnation and roster stay, the rank may come back."""
    if not state.knows(conn):
        return state
    ranks = tuple(r for r in state.ranks if r.conn != conn)
    lives = tuple(f for f in state.failed if f.conn != conn)
    return replace(state, ranks=ranks, failed=lives, revision=state.revision + 1)


def _peers(conn: int, roster: HeldRoster, rank: int) -> Push:
    line = roster.lines.get(rank)
    if line is None:
        nobody = Peers(term=roster.key.term, counter=roster.key.counter, roster_hash=roster.hash)
        line = nobody.model_dump_json().encode() + b"\n"
    return Push(conn, line)


@dataclass(frozen=True)
class Taken:
    """The roster is in force now. `changed` is False when it already was (nothing to do or keep)."""

    state: PodState
    effects: tuple[Effect, ...]
    changed: bool


Reason = Literal["LowerKey", "SameKeyOtherContent", "OtherPod", "OtherIncarnation", "OtherCluster"]


def put_roster(state: PodState, roster: HeldRoster) -> Taken | RosterRefusal:
    """Take a roster written by the operator, or say why not."""

    def no(reason: Reason, message: str) -> RosterRefusal:
        return RosterRefusal(
            reason=reason,
            message=message,
            term=state.key.term,
            counter=state.key.counter,
            hash=state.roster_hash,
            incarnation=state.incarnation,
        )

    me = state.identity
    if roster.cluster_uid != me.cluster_uid:
        return no("OtherCluster", f"the roster is for PDCluster {roster.cluster_uid}, this is {me.cluster_uid}")
    if roster.pod_uid != me.pod_uid:
        return no("OtherPod", f"the roster is for pod {roster.pod_uid}, this is {me.pod_uid}")
    if not state.incarnation:
        return no("OtherIncarnation", "no engine rank has registered yet")
    if roster.incarnation != state.incarnation:
        return no(
            "OtherIncarnation",
            f"the roster is for incarnation {roster.incarnation}, the engine is {state.incarnation}",
        )
    if roster.key < state.key:
        return no("LowerKey", f"key {_text(roster.key)} is lower than {_text(state.key)}, which is held")
    if roster.key == state.key and state.key_hash:
        if roster.hash != state.key_hash:
            return no("SameKeyOtherContent", f"key {_text(roster.key)} is held with other content")
        return Taken(state, (), changed=False)
    sends = tuple(_peers(r.conn, roster, r.rank) for r in state.ranks)
    after = replace(state, roster=roster, key=roster.key, key_hash=roster.hash, revision=state.revision + 1)
    return Taken(after, sends, changed=True)


def _text(key: RosterKey) -> str:
    return f"({key.term}, {key.counter})"


def drain(state: PodState) -> Step:
    """Refuse new transfers from now on; final for this pod, whatever engine runs in it."""
    return replace(state, draining=True), tuple(Send(r.conn, Drain()) for r in state.ranks)


def probe(state: PodState, pod_uids: tuple[str, ...]) -> Step:
    """Ask every rank to probe these peers again (all when empty)."""
    return state, tuple(Send(r.conn, Probe(pod_uids=pod_uids)) for r in state.ranks)


def restored(identity: Identity, roster: HeldRoster | None, draining: bool) -> PodState:
    """State of a sidecar that starts, with what its predecessor in this pod had kept. The roster is in
    force again only if the ranks that register carry the same incarnation."""
    state = PodState(identity=identity, draining=draining)
    if roster is None or (roster.cluster_uid, roster.pod_uid) != (identity.cluster_uid, identity.pod_uid):
        return state
    return replace(state, incarnation=roster.incarnation, roster=roster, key=roster.key, key_hash=roster.hash)
