"""Pauses of the core's thread: they end with the loop's news, and are short where Linux would stretch them."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from pdtransfer.session.naps import EAGER, SPINS, Napper


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def test_the_pace_is_yields_then_short_naps_then_longer_ones(loop, monkeypatch):
    napper, naps = Napper(loop), []
    monkeypatch.setattr(napper, "nap", naps.append)
    for quiet in (0, SPINS, SPINS + 1, EAGER - 1, EAGER, 10 * EAGER):
        napper.pace(quiet)
    assert naps == [50e-6, 50e-6, 500e-6, 500e-6]


@pytest.mark.skipif(sys.platform != "linux", reason="ppoll")
def test_a_call_from_another_thread_ends_a_nap(loop):
    """Told by what ended the nap, not by how long it took: a busy machine may stand still in between."""
    napper = Napper(loop)
    told = threading.Thread(target=lambda: loop.call_soon_threadsafe(lambda: None))
    told.start()
    told.join()  # the call is there before the nap begins: nothing depends on how fast a thread starts
    napper.nap(0.9)
    assert napper._news
    loop.call_soon(loop.stop)
    loop.run_forever()
    began = time.monotonic()
    napper.nap(0.1)  # negative control: with the news taken, the nap goes on to its end
    assert not napper._news and time.monotonic() - began >= 0.1


def test_a_loop_without_a_pollable_selector_is_slept_for():
    class Bare:
        _selector = None

    began = time.monotonic()
    Napper(Bare()).nap(0.01)  # type: ignore[arg-type]
    assert time.monotonic() - began >= 0.01


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_only_the_thread_that_naps_loses_its_timer_slack(loop):
    libc, get = ctypes.CDLL(None), 30  # PR_GET_TIMERSLACK
    before, found = libc.prctl(get), []

    def run() -> None:
        Napper(loop).sharpen()
        found.append(libc.prctl(get))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [1] and libc.prctl(get) == before > 1
