"""Negative controls: the exploration finds each of eight bugs of such protocols, and one of staging."""

from __future__ import annotations

import pytest

from explore.search import explore
from explore.seeded import SEEDED
from explore.virtual import replaced


@pytest.mark.parametrize("bug", SEEDED, ids=lambda b: b.name)
def test_a_seeded_bug_is_found_by_a_short_path(bug):
    with replaced(*bug.changes()):
        found = explore(bug.bounds, states=4000, shortest=True)
    print(f"{bug.name}: {found}")
    assert found.path is not None, f"{bug.name} was not found: {found}"
    assert len(found.path) <= bug.longest
    assert bug.shows in str(found.violation)
    without = explore(bug.bounds, states=found.states + 1, shortest=True)
    assert without.path is None, f"{bug.name} shows without the bug: {without}"
