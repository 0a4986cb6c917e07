"""Two operators, two pods, lost and late writes, restarts: every order, over the real `wire()`.

Explored breadth-first. Safety: in a pod the content of an older look never follows that of a newer
one by a later term, and two pods never hold rosters of one key that were made from different sights.
The negative control gives both operators the same term, and must find a violation.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import cache

from domain_makers import UID, make_cards

from pdoperator.domain.observed import ClusterObject, Observed, PodAnswer, PodSeen
from pdoperator.domain.view import look
from pdoperator.domain.wiring import wire
from pdtransfer.contract.base import Role
from pdtransfer.contract.card import PodCards

ROLES = {"p": Role.PREFILL, "d": Role.DECODE}
Key = tuple[int, int]


@dataclass(frozen=True)
class Held:
    """A pod: its incarnation, the key it holds, the roster's hash, and which sight it was made from."""

    incarnation: int = 0
    key: Key = (0, 0)
    hash: str = ""
    sight: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Put:
    pod: str
    incarnation: int
    key: Key
    hash: str
    sight: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Operator:
    term: int
    pending: tuple[Put, ...] = ()
    counter: Key = (0, 0)
    looks: int = 0


@dataclass(frozen=True)
class State:
    pods: tuple[tuple[str, Held], ...]
    operators: tuple[Operator, ...]
    restarts: int = 0

    def pod(self, name: str) -> Held:
        return dict(self.pods)[name]

    def with_pod(self, name: str, held: Held) -> State:
        return replace(self, pods=tuple((n, held if n == name else h) for n, h in self.pods))

    def with_operator(self, i: int, op: Operator) -> State:
        return replace(self, operators=tuple(op if j == i else o for j, o in enumerate(self.operators)))


def seen(name: str) -> PodSeen:
    return PodSeen(
        name=name, uid=name, role=ROLES[name].value, replica=0, revision="r", attempt=0, phase="Running",
        deleting=False, node="n", ip="10.0.0.1", ready=False, containers_ready=False, scheduled=True,
        unschedulable_message="", kv_wired="", kv_wired_since=0.0, created=0.0,
    )  # fmt: skip


@cache
def cards(name: str, incarnation: int, key: Key, held: str) -> PodCards:
    return PodCards(
        cluster_uid=UID,
        pod_uid=name,
        role=ROLES[name],
        incarnation=f"i{incarnation}",
        expected_ranks=1,
        cards=make_cards(name, ROLES[name], f"i{incarnation}", 1),
        roster_term=key[0],
        roster_counter=key[1],
        roster_hash=held,
    )


@cache
def decide_puts(sight: tuple[tuple[str, Held], ...], term: int, counter: Key) -> tuple[tuple[Put, ...], Key]:
    """What the real code writes for what it sees."""
    answers = {n: PodAnswer(cards=cards(n, h.incarnation, h.key, h.hash)) for n, h in sight}
    observed = Observed(
        now=0.0,
        cluster=ClusterObject("c", "ns", UID, 1, {}, None),
        pods=tuple(seen(n) for n in ROLES),
        answers=answers,
        term=term,
    )
    wiring = wire(observed, look(observed, False), lambda p, d: True, {}, counter)
    members = tuple(sorted((n, h.incarnation) for n, h in sight))
    puts = tuple(
        Put(
            p.pod_name,
            int(p.roster.incarnation[1:]),
            (p.roster.key.term, p.roster.key.counter),
            p.roster.hash,
            members,
        )
        for p in wiring.puts
    )
    return puts, max(counter, (wiring.term, wiring.counter))


def steps(s: State) -> list[tuple[str, State]]:
    out: list[tuple[str, State]] = []
    for i, op in enumerate(s.operators):
        if not op.pending and op.looks < 2:
            for sight in (s.pods, s.pods[:1], s.pods[1:]):
                puts, counter = decide_puts(sight, op.term, op.counter)
                after = replace(op, pending=puts, counter=counter, looks=op.looks + 1)
                out.append((f"op{i} looks at {[n for n, _ in sight]}", s.with_operator(i, after)))
        if op.pending:
            first, rest = op.pending[0], op.pending[1:]
            dropped = s.with_operator(i, replace(op, pending=rest))
            out.append((f"op{i} loses a write", dropped))
            out.append((f"op{i} writes {first.key} to {first.pod}", deliver(dropped, first)))
    if s.restarts < 2:
        for name, held in s.pods:
            fresh = replace(held, incarnation=held.incarnation + 1)
            out.append((f"{name} restarts", replace(s.with_pod(name, fresh), restarts=s.restarts + 1)))
    return out


def deliver(s: State, put: Put) -> State:
    """The pod's rule (sidecar): wrong incarnation, lower key, same key with other content are refused."""
    held = s.pod(put.pod)
    if put.incarnation != held.incarnation or put.key < held.key:
        return s
    if put.key == held.key and put.hash != held.hash:
        return s
    return s.with_pod(put.pod, replace(held, key=put.key, hash=put.hash, sight=put.sight))


def violation(before: State, after: State) -> str:
    for name, held in after.pods:
        if held.key < before.pod(name).key:
            return f"{name}: key went back"
    sights = {}
    for _, held in after.pods:
        if held.hash and sights.setdefault(held.key, held.sight) != held.sight:
            return f"one key {held.key}, two sights"
    return ""


def explore(terms: tuple[int, int], limit: int) -> tuple[int, list[str]]:
    """(states seen, trace of the first violation or [])."""
    start = State(tuple((n, Held()) for n in ROLES), tuple(Operator(t) for t in terms))
    came: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    while queue and len(came) < limit:
        here = queue.popleft()
        for label, there in steps(here):
            wrong = violation(here, there)
            if wrong:
                trace = [wrong, label]
                at: State | None = here
                while at is not None and came[at] is not None:
                    at, what = came[at]  # type: ignore[misc]
                    trace.append(what)
                return len(came), trace
            if there not in came:
                came[there] = (here, label)
                queue.append(there)
    return len(came), []


def test_two_operators_of_different_terms_never_mix_their_rosters() -> None:
    limit = 60_000
    count, trace = explore((1, 2), limit)
    assert trace == [], "\n".join(reversed(trace))
    assert 1_000 < count < limit, "the whole small world was explored"


def test_the_check_finds_the_fault_when_both_operators_have_one_term() -> None:
    _, trace = explore((1, 1), 25_000)
    assert trace, "the negative control must fail"
    assert "one key" in trace[0]


def test_an_operator_that_sees_a_higher_term_writes_nothing() -> None:
    sight = (("p", Held(key=(5, 1), hash="x")), ("d", Held()))
    puts, _ = decide_puts(sight, 4, (0, 0))
    assert puts == ()


def test_equal_content_is_not_written_again_by_a_later_term() -> None:
    first, _ = decide_puts((("p", Held()), ("d", Held())), 1, (0, 0))
    held = {p.pod: Held(0, p.key, p.hash) for p in first}
    puts, _ = decide_puts(tuple(held.items()), 2, (0, 0))
    assert puts == ()
