"""A rank ends when a thread that it can not do without has ended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdtransfer.engines.reference.link import Link
from pdtransfer.engines.reference.rank_build import Rank


def rank(endpoint: Exception | None, source: BaseException | None) -> Rank:
    link = Link(SimpleNamespace(failed=endpoint), SimpleNamespace(failed=source))  # type: ignore[arg-type]
    return Rank(0, None, None, None, None, None, link)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("endpoint", "source", "words"),
    [(MemoryError("agent"), None, "endpoint failed: agent"), (None, SystemExit(3), "link to this rank's peers")],
)
def test_a_thread_that_ended_ends_the_rank(endpoint, source, words):
    with pytest.raises(RuntimeError, match=words):
        rank(endpoint, source).check()


def test_a_rank_whose_threads_go_on_goes_on():
    rank(None, None).check()
