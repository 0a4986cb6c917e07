"""When a decode rank takes a new agent, and when it gives up. Pure; every row was worked out by hand."""

from __future__ import annotations

import pytest

from pdtransfer.session.quarantine import Limits, Quarantine

LIMITS = Limits(cap=100, grace=15.0, age=60.0)
NOW = 1000.0


def waits(nbytes: int, seconds: float | None, revocable: float | None) -> Quarantine:
    since = None if seconds is None else NOW - seconds
    return Quarantine(nbytes, since, None if revocable is None else NOW - revocable)


@pytest.mark.parametrize(
    ("found", "failed", "verdict"),
    [
        (waits(0, None, None), False, "wait"),
        (waits(50, 59, 59), False, "wait"),
        (waits(50, 61, 61), False, "rotate"),
        (waits(50, 61, 61), True, "rotate"),  # again, after a pause
        (waits(101, 14, 14), False, "wait"),  # a living source acknowledges within the grace
        (waits(101, 16, 16), False, "rotate"),
        (waits(100, 16, 16), False, "wait"),  # the cap is what may be
        (waits(101, 16, 16), True, "rotate"),
        (waits(101, 61, 61), True, "overflow"),
        (waits(101, 61, 61), False, "rotate"),
        (waits(50, 3600, None), False, "wait"),  # nothing helps, and it is little
        (waits(101, 59, None), False, "wait"),
        (waits(101, 61, None), False, "overflow"),
        (waits(101, 61, 5), False, "wait"),  # part of it a new agent would free, soon
        (waits(101, 61, 16), False, "rotate"),
        (waits(50, 3600, 5), False, "wait"),  # the old part is not what a new agent frees
    ],
)
def test_what_is_done_about_a_quarantine(found, failed, verdict):
    assert found.judge(NOW, LIMITS, failed=failed) == verdict
