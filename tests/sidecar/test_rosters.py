"""The compact form of a roster says what the contract's model says."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from sidecar_kit import peer, roster

from pdtransfer.contract.link import Peers, sidecar_messages
from pdtransfer.sidecar import rosters

NAMES = st.sampled_from(["peer-1", "peer-2", "pärchen-\u4e2d", 'quo"te', "z"])
CARDS = st.builds(lambda n, i, r: peer(r, n, i), NAMES, st.sampled_from(["p1", "p2"]), st.integers(0, 1))
PEERS = st.dictionaries(st.sampled_from([0, 1, 2, 9, 10, 11, 100]), st.lists(CARDS, max_size=4), max_size=5)


@settings(max_examples=60, deadline=None)
@given(PEERS, st.integers(0, 9), st.integers(0, 9), st.sampled_from(["i1", 'i"2', "ï3"]))
def test_hash_pairs_and_lines_are_those_of_the_contract(
    peers: dict[int, list], term: int, counter: int, incarnation: str
) -> None:
    r = roster((term, counter), peers, incarnation=incarnation)
    held = rosters.parse(r.model_dump_json().encode())
    assert held.hash == r.hash and held.key == r.key
    assert sorted((n, p.pod_uid, p.incarnation, p.rank) for n, p in held.pairs) == sorted(
        (n, c.pod_uid, c.incarnation, c.rank) for n, cards in r.peers.items() for c in cards
    )
    assert set(held.lines) == set(r.peers)
    for rank, line in held.lines.items():
        assert line.endswith(b"\n") and line.count(b"\n") == 1
        told = sidecar_messages.validate_json(line)
        order = sorted(r.peers[rank], key=lambda c: (c.pod_uid, c.incarnation, c.agent_name))
        assert told == Peers(term=term, counter=counter, roster_hash=r.hash, peers=tuple(order))
