"""What is handed over when: pages after their event, metadata rows before success, and rows that do not match."""

from __future__ import annotations

import threading

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll

from tests.sglang.plugin_request import Request
from tests.sglang.plugin_world import World, pair, wait_for


class Later:
    """An event of the engine's stream: the pages get their bytes when it happens."""

    def __init__(self, write: object) -> None:
        self._write, self.happened, self.looked = write, threading.Event(), threading.Event()

    def query(self) -> bool:
        self.looked.set()
        return self.happened.is_set()

    def happen(self) -> None:
        self._write()  # type: ignore[operator]
        self.happened.set()


def test_pages_that_an_earlier_forward_pass_still_writes_are_awaited(here: World) -> None:
    """Early send of a cached prefix under overlap scheduling; SGLang's NIXL backend drops the event."""
    prefill, decode = pair(here)
    request = Request(61, prefill, decode, prompt=4)
    request.begin()
    request.ask()
    request.asked()
    (one,), (pool,) = request.senders, prefill.pools
    event = Later(lambda: pool.fill(61, request.source[:2]))
    pool.set_row(1, 61, 9)
    one._early_send_wait_event = event
    one.send(np.array(request.source[:2], dtype=np.int32), None, 8)
    pool.fill(61, request.source[2:], 2)
    one.send(np.array(request.source[2:], dtype=np.int32), None, 8)
    assert event.looked.wait(30)
    assert not any(a.any() for a in decode.pools[0].parts.values()), "bytes went before they were written"
    event.happen()
    request.finish()
    assert request.wrong() == []


def test_metadata_rows_are_there_when_success_is_seen(here: World) -> None:
    prefill, decode = pair(here)
    request = Request(62, prefill, decode, prompt=2)
    request.begin()
    request.ask()
    request.asked()
    request.send(token=1234)
    (one,), (pool,) = request.receivers, decode.pools
    while (state := one.poll()) != KVPoll.Success:
        assert state in (KVPoll.WaitingForInput, KVPoll.Transferring)
        assert pool.row(1) == (0, 0)
    assert pool.row(1) == (1234, 62)


def test_room_0_is_refused_since_sglang_can_not_tell_it_from_an_empty_row(here: World) -> None:
    prefill, decode = pair(here)
    request = Request(0, prefill, decode, prompt=2)
    request.begin()
    request.ask()
    assert request.receivers[0].poll() == KVPoll.Failed
    assert "bootstrap_room 0" in request.reason(request.receivers[0])


def test_metadata_buffers_of_one_side_only_fail_by_name(here: World) -> None:
    """An option that adds a buffer on one side misaligns the others in SGLang, and the request hangs."""
    prefill, decode = pair(here)
    (manager,) = decode.managers
    held = manager.buffers
    manager.buffers = type(held)(held.addresses[:2], held.row_bytes[:2], held.rows)
    request = Request(63, prefill, decode, prompt=2)
    request.begin()
    request.ask()
    request.asked()
    request.send()
    wait_for(lambda: request.receivers[0].poll() == KVPoll.Failed, "decode's refusal")
    assert "prefill has 3 metadata buffers, decode 2" in request.reason(request.receivers[0])
