"""Transitions of the sidecar's state: tables and properties."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from sidecar_kit import CLUSTER, POD, card, peer, roster, verdict

from pdtransfer.contract.base import Role
from pdtransfer.contract.link import Drain, Heartbeat, Hello, Peers, Refuse, Verdicts, sidecar_messages
from pdtransfer.contract.roster import Roster, RosterRefusal
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.sidecar import model as m
from pdtransfer.sidecar import rosters, views
from pdtransfer.sidecar import state as s

ME = m.Identity(cluster_uid=CLUSTER, pod_uid=POD, role=Role.PREFILL)
EMPTY = m.PodState(identity=ME)


def two_ranks() -> m.PodState:
    state, _ = s.hello(EMPTY, 1, Hello(card=card(0), expected_ranks=2), 0.0)
    state, _ = s.hello(state, 2, Hello(card=card(1), expected_ranks=2), 0.0)
    return state


def held(r: Roster) -> m.HeldRoster:
    return rosters.parse(r.model_dump_json().encode())


def pushed(effects: Sequence[m.Effect]) -> dict[int, Peers]:
    """What is told to each connection about its peers."""
    return {e.conn: sidecar_messages.validate_json(e.line) for e in effects if isinstance(e, m.Push)}


def take(state: m.PodState, r: object) -> m.PodState:
    result = s.put_roster(state, held(r))
    assert isinstance(result, s.Taken), result
    return result.state


def test_first_roster_is_pushed_to_each_rank_only_with_its_part() -> None:
    r = roster()
    result = s.put_roster(two_ranks(), held(r))
    assert isinstance(result, s.Taken)
    sent = pushed(result.effects)
    assert {c: [p.rank for p in msg.peers] for c, msg in sent.items()} == {1: [0], 2: [1]}
    assert all((msg.term, msg.counter, msg.roster_hash) == (1, 1, r.hash) for msg in sent.values())


def test_roster_ordering_table() -> None:
    now = take(two_ranks(), roster((2, 5)))
    other = {0: (peer(0, "peer-2"),)}
    table = [
        (roster((2, 6)), None),
        (roster((3, 0)), None),
        (roster((2, 5)), None),
        (roster((2, 5), other), "SameKeyOtherContent"),
        (roster((2, 4)), "LowerKey"),
        (roster((1, 99)), "LowerKey"),
        (roster((9, 9), pod_uid="other"), "OtherPod"),
        (roster((9, 9), {}, cluster_uid="other"), "OtherCluster"),
        (roster((9, 9), incarnation="i0"), "OtherIncarnation"),
    ]
    for r, reason in table:
        result = s.put_roster(now, held(r))
        got = result.reason if isinstance(result, RosterRefusal) else None
        assert got == reason, (r.key, got)
        if isinstance(result, RosterRefusal):
            assert (result.term, result.counter, result.incarnation) == (2, 5, "i1")


def test_the_same_roster_again_changes_and_sends_nothing() -> None:
    now = take(two_ranks(), roster())
    again = s.put_roster(now, held(roster()))
    assert again == s.Taken(now, (), changed=False)


def test_new_incarnation_clears_roster_and_verdicts_and_closes_the_old_connections() -> None:
    state = take(two_ranks(), roster((4, 2)))
    state = s.verdicts(state, 1, Verdicts(verdicts=(verdict(0, peer(0)),)), 1.0)
    state, effects = s.hello(state, 3, Hello(card=card(0, incarnation="i2"), expected_ranks=2), 2.0)
    assert {e.conn for e in effects if isinstance(e, m.Close)} == {1, 2}
    assert state.roster is None and [r.conn for r in state.ranks] == [3]
    assert views.pod_verdicts(state).verdicts == ()
    shown = views.pod_cards(state, 2.0)
    # The key stays: an operator that was cut off must not slip in with an older one.
    assert (shown.incarnation, shown.roster_term, shown.roster_counter, shown.roster_hash) == ("i2", 4, 2, "")
    old = roster((4, 1), incarnation="i2")
    assert isinstance(s.put_roster(state, held(old)), RosterRefusal)


def test_a_replaced_incarnation_is_refused_when_it_comes_back() -> None:
    state, _ = s.hello(two_ranks(), 3, Hello(card=card(0, incarnation="i2"), expected_ranks=2), 0.0)
    after, effects = s.hello(state, 4, Hello(card=card(1, incarnation="i1"), expected_ranks=2), 0.0)
    assert after.ranks == state.ranks and after.incarnation == "i2"
    assert [e.message.reason for e in effects if isinstance(e, m.Send)] == ["OldIncarnation"]


def test_refusals_name_the_reason() -> None:
    broken = card(0).model_copy(update={"fingerprint": "0" * 32})
    table = [
        (card(0, cluster_uid="x"), 2, "OtherCluster"),
        (card(0, pod_uid="x"), 2, "OtherPod"),
        (card(0, role=Role.DECODE), 2, "OtherRole"),
        (card(0, incarnation=""), 2, "NoIncarnation"),
        (broken, 2, "SealBroken"),
        (card(0), 3, "ExpectedRanksDiffer"),
        (card(2, tp_size=4), 2, "TooManyRanks"),
    ]
    for c, expected, reason in table:
        before = two_ranks()
        after, effects = s.hello(before, 9, Hello(card=c, expected_ranks=expected), 5.0)
        assert [type(e) for e in effects] == [m.Send, m.Close]
        assert isinstance(effects[0].message, Refuse) and effects[0].message.reason == reason
        assert after.ranks == before.ranks
        assert [(r.rank, r.reason) for r in views.pod_cards(after, 6.0).refused] == [(c.rank, reason)]
        assert views.pod_cards(after, 5.0 + m.REFUSED_FOR).refused == ()


def test_a_rank_that_reconnects_gets_its_peers_and_the_drain_again() -> None:
    state, _ = s.drain(take(two_ranks(), roster()))
    state = s.closed(state, 2)
    assert views.pod_cards(state, 0.0).complete is False
    state, effects = s.hello(state, 7, Hello(card=card(1), expected_ranks=2), 0.0)
    assert pushed(effects) == {7: Peers(term=1, counter=1, roster_hash=roster().hash, peers=(peer(1),))}
    assert effects[-1] == m.Send(7, Drain())
    assert views.pod_cards(state, 0.0).complete


def test_a_reconnect_before_the_old_end_is_seen_closes_the_old_connection() -> None:
    state, effects = s.hello(two_ranks(), 8, Hello(card=card(1), expected_ranks=2), 0.0)
    assert [(e.conn) for e in effects] == [2] and isinstance(effects[0], m.Close)
    assert s.closed(state, 2) == state


def test_a_late_heartbeat_makes_a_rank_stale_and_never_removes_it() -> None:
    state = s.heartbeat(two_ranks(), 1, Heartbeat(inflight=3), 10.0)
    shown = views.pod_cards(state, 10.5)
    assert shown.stale_ranks == (1,) and len(shown.cards) == 2
    assert views.pod_cards(s.heartbeat(state, 2, Heartbeat(), 10.4), 10.5).stale_ranks == ()
    assert views.pod_verdicts(state).inflight == 3


def test_verdicts_that_speak_for_another_rank_or_incarnation_are_dropped() -> None:
    mine, other_rank = verdict(0, peer(0)), verdict(1, peer(0))
    old = verdict(0, peer(0), incarnation="i0")
    state = s.verdicts(two_ranks(), 1, Verdicts(verdicts=(mine, other_rank, old)), 0.0)
    assert views.pod_verdicts(state).verdicts == (mine,)


def test_kept_roster_is_in_force_again_for_the_same_incarnation_only() -> None:
    r = roster((3, 3))
    start = s.restored(ME, held(r), False)
    same, effects = s.hello(start, 1, Hello(card=card(0), expected_ranks=2), 0.0)
    assert same.roster == held(r) and pushed(effects)[1].peers == (peer(0),)
    new, effects = s.hello(start, 1, Hello(card=card(0, incarnation="i2"), expected_ranks=2), 0.0)
    assert new.roster is None and effects == () and (new.key.term, new.key.counter) == (3, 3)
    assert s.restored(ME, held(roster(pod_uid="x")), True).roster is None


# Readiness


def ready(state: m.PodState, wiring: bool = True, now: float = 0.0) -> tuple[str, ...]:
    return views.readiness(state, now, wiring).missing


def test_readiness_says_what_is_missing() -> None:
    assert ready(EMPTY) == ("no rank registered yet", "no roster yet")
    one, _ = s.hello(EMPTY, 1, Hello(card=card(0), expected_ranks=2), 0.0)
    assert ready(one) == ("rank 1 not registered", "no roster yet")
    two = two_ranks()
    assert ready(two) == ("no roster yet",)
    assert ready(take(two, roster(peers={}))) == ("the roster names no peer",)
    state = take(two, roster())
    assert ready(state) == (
        "no peer pod is wired",
        "peer name-of-peer-1 rank 0 not probed from rank 0",
        "peer name-of-peer-1 rank 1 not probed from rank 1",
    )
    state = s.verdicts(state, 1, Verdicts(verdicts=(verdict(0, peer(0)),)), 0.0)
    bad = verdict(1, peer(1), VerdictState.UNREACHABLE)
    state = s.verdicts(state, 2, Verdicts(verdicts=(bad,)), 0.0)
    assert ready(state) == (
        "no peer pod is wired",
        "peer name-of-peer-1 rank 1 unreachable from rank 1: ConnectFailed: no route to host",
    )
    state = s.verdicts(state, 2, Verdicts(verdicts=(verdict(1, peer(1)),)), 0.0)
    assert ready(state) == ()
    assert ready(s.closed(state, 2))[0] == "rank 1 not registered"
    assert ready(s.drain(state)[0]) == ("draining: no new transfers are taken",)


def test_one_whole_wired_peer_pod_is_enough_but_halves_of_two_are_not() -> None:
    a, b = (peer(0, "a"), peer(1, "a")), (peer(0, "b"), peer(1, "b"))
    state = take(two_ranks(), roster(peers={0: (a[0], b[0]), 1: (a[1], b[1])}))
    halves = s.verdicts(state, 1, Verdicts(verdicts=(verdict(0, a[0]),)), 0.0)
    halves = s.verdicts(halves, 2, Verdicts(verdicts=(verdict(1, b[1]),)), 0.0)
    assert ready(halves)[0] == "no peer pod is wired"
    whole = s.verdicts(halves, 2, Verdicts(verdicts=(verdict(1, a[1]),)), 0.0)
    assert ready(whole) == ()


def test_a_rank_that_exchanges_nothing_does_not_hold_readiness_back() -> None:
    state = take(two_ranks(), roster(peers={0: (peer(0),)}))  # MLA, one decode rank: rank 1 sends nothing
    state = s.verdicts(state, 1, Verdicts(verdicts=(verdict(0, peer(0)),)), 0.0)
    assert ready(state) == ()


def test_a_verdict_for_the_peers_former_incarnation_does_not_count() -> None:
    state = take(two_ranks(), roster(peers={0: (peer(0, incarnation="p2"),)}))
    state = s.verdicts(state, 1, Verdicts(verdicts=(verdict(0, peer(0, incarnation="p1")),)), 0.0)
    assert ready(state)[0] == "no peer pod is wired"


def test_without_wiring_only_ranks_that_exist_count() -> None:
    assert ready(EMPTY, wiring=False) == ()
    one, _ = s.hello(EMPTY, 1, Hello(card=card(0), expected_ranks=2), 0.0)
    assert ready(one, wiring=False) == ("rank 1 not registered",)
    assert ready(two_ranks(), wiring=False) == ()


def test_a_stray_client_is_a_note_while_all_ranks_are_there_and_a_reason_otherwise() -> None:
    stray, _ = s.refuse(two_ranks(), 9, None, "BadMessage", "junk", 0.0)
    answer = views.readiness(stray, 1.0, False)
    assert answer.ready and answer.text == "ready\nnote: a rank was refused: BadMessage: junk\n"
    alone, _ = s.refuse(EMPTY, 9, 0, "SealBroken", "why", 0.0)
    assert ready(alone)[0] == "rank 0 was refused: SealBroken: why"


def test_ranks_of_a_later_node_are_counted_not_named() -> None:
    state, _ = s.hello(EMPTY, 1, Hello(card=card(5, tp_size=8), expected_ranks=4), 0.0)
    assert ready(state)[0] == "1 of 4 ranks registered"


# Properties over arbitrary sequences of events

INCARNATIONS = ("i1", "i2", "i3")
events = st.one_of(
    st.tuples(st.just("hello"), st.integers(1, 6), st.integers(0, 1), st.sampled_from(INCARNATIONS)),
    st.tuples(st.just("closed"), st.integers(1, 6)),
    st.tuples(
        st.just("roster"), st.integers(0, 2), st.integers(0, 3), st.sampled_from(INCARNATIONS), st.integers(0, 2)
    ),
    st.tuples(st.just("verdicts"), st.integers(1, 6), st.sampled_from(INCARNATIONS)),
    st.tuples(st.just("drain")),
)
CONTENTS = [{0: (peer(0),)}, {0: (peer(0, "peer-2"),)}, {}]


@settings(max_examples=120, deadline=None)
@given(st.lists(events, max_size=30))
def test_key_never_goes_back_equal_keys_mean_equal_content_and_incarnations_do_not_mix(
    script: list[tuple],
) -> None:
    state = EMPTY
    content_of: dict[tuple[int, int], str] = {}
    gone: set[str] = set()
    for event in script:
        before = state
        match event:
            case ("hello", conn, rank, incarnation):
                state, _ = s.hello(state, conn, Hello(card=card(rank, incarnation=incarnation), expected_ranks=2), 0.0)
            case ("closed", conn):
                state = s.closed(state, conn)
            case ("roster", term, counter, incarnation, content):
                r = roster((term, counter), CONTENTS[content], incarnation=incarnation)
                result = s.put_roster(state, held(r))
                if isinstance(result, s.Taken):
                    state = result.state
                    assert state.incarnation == incarnation
                    assert content_of.setdefault((term, counter), r.hash) == r.hash
            case ("verdicts", conn, incarnation):
                vs = Verdicts(verdicts=(verdict(0, peer(0), incarnation=incarnation),))
                state = s.verdicts(state, conn, vs, 0.0)
            case ("drain",):
                state, _ = s.drain(state)
        assert state.key >= before.key
        assert state.revision >= before.revision and state.draining >= before.draining
        if state.incarnation != before.incarnation:
            assert state.roster is None
            assert all(v == () for v in (r.verdicts for r in state.ranks))
            gone.add(before.incarnation)
        assert state.incarnation not in gone - {""}
        assert all(r.card.incarnation == state.incarnation for r in state.ranks)
        assert all(v.incarnation == state.incarnation for r in state.ranks for v in r.verdicts)
        assert len({r.rank for r in state.ranks}) == len(state.ranks) <= 2
        assert len({r.conn for r in state.ranks}) == len(state.ranks)
        if state.roster is not None:
            assert state.roster.incarnation == state.incarnation and state.roster.hash == state.key_hash
