"""The page ledger: conservation, no early release, as a state machine and step by step."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdtransfer.errors import LayoutMismatch
from pdtransfer.mover.ledger import PageLedger


def test_failed_pages_wait_for_every_writer():
    ledger = PageLedger()
    ledger.acquire("t", [1, 2], ["p0", "p1"], page_bytes=100)
    ledger.quarantine("t")
    assert (ledger.owned_pages, ledger.quarantined_pages, ledger.quarantined_bytes) == (0, 2, 200)
    ledger.writer_settled("t", "p0")
    assert not ledger.releasable("t")
    with pytest.raises(LayoutMismatch, match="page 2 is quarantined after t"):
        ledger.acquire("u", [2], ["p0"])
    ledger.writer_settled("t", "p0")  # a doubled acknowledgement counts once
    assert not ledger.releasable("t")
    ledger.writer_settled("t", "p1")
    assert ledger.releasable("t") and ledger.quarantined_bytes == 0
    ledger.acquire("u", [2], ["p0"])


def test_success_with_a_writer_left_is_a_bug_and_is_not_believed():
    ledger = PageLedger()
    ledger.acquire("t", [1], ["p0"])
    with pytest.raises(RuntimeError, match="writers left"):
        ledger.complete("t")


def test_a_page_has_one_owner():
    ledger = PageLedger()
    ledger.acquire("t", [1], ["p0"])
    with pytest.raises(LayoutMismatch, match="page 1 is owned by t"):
        ledger.acquire("u", [1, 5], ["p0"])
    assert ledger.releasable("u")  # nothing was taken
    ledger.acquire("u", [5], ["p0"])


class Model(RuleBasedStateMachine):
    """An independent model: sets of (page, writer) that may still be written."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PageLedger()
        self.threats: dict[int, tuple[set[int], set[str]]] = {}
        self.failed: set[int] = set()
        self.next = 0

    @rule(pages=st.sets(st.integers(0, 7), min_size=1, max_size=3), writers=st.sets(st.sampled_from("abc"), min_size=1))
    def acquire(self, pages, writers):
        taken = set().union(*(p for p, _ in self.threats.values()), set())
        if pages & taken:
            with pytest.raises(LayoutMismatch):
                self.ledger.acquire(self.next, pages, writers)
        else:
            self.ledger.acquire(self.next, pages, writers)
            self.threats[self.next] = (set(pages), set(writers))
        self.next += 1

    @precondition(lambda self: self.threats)
    @rule(data=st.data(), writer=st.sampled_from("abc"))
    def settle(self, data, writer):
        t = data.draw(st.sampled_from(sorted(self.threats)))
        self.ledger.writer_settled(t, writer)
        self.threats[t][1].discard(writer)
        if t in self.failed and not self.threats[t][1]:
            del self.threats[t]

    @precondition(lambda self: self.threats)
    @rule(data=st.data())
    def fail(self, data):
        t = data.draw(st.sampled_from(sorted(self.threats)))
        self.ledger.quarantine(t)
        self.failed.add(t)
        if not self.threats[t][1]:
            del self.threats[t]

    @precondition(lambda self: any(not w for _, w in self.threats.values()))
    @rule(data=st.data())
    def complete(self, data):
        t = data.draw(st.sampled_from(sorted(t for t, (_, w) in self.threats.items() if not w)))
        self.ledger.complete(t)
        del self.threats[t]

    @invariant()
    def pages_are_conserved_and_never_early(self):
        owned = sum(len(p) for t, (p, _) in self.threats.items() if t not in self.failed)
        held = sum(len(p) for t, (p, _) in self.threats.items() if t in self.failed)
        assert (self.ledger.owned_pages, self.ledger.quarantined_pages) == (owned, held)
        for t in range(self.next):
            assert self.ledger.releasable(t) == (t not in self.threats)


TestLedgerModel = Model.TestCase
TestLedgerModel.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
