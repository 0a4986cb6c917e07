"""Real NIXL over UCX between processes: byte-exact over TP layouts, and peers that stop or die."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from kv_world import PAGES
from nixl_ranks import released_by, stop

pytestmark = pytest.mark.nixl
SOON = {"timeouts": {"waiting": 5, "transfer": 2, "settle": 0.5, "connect": 3, "probe": 10}}
"""Deadlines that are the subject of a test."""


@pytest.mark.parametrize(
    ("p", "d", "memory", "ucx_tls"),
    [
        (1, 1, ("DRAM", "DRAM"), ""),
        (2, 2, ("DRAM", "DRAM"), ""),
        (2, 1, ("DRAM", "VRAM"), ""),  # VRAM emulated on host memory
        (2, 1, ("DRAM", "DRAM"), "tcp"),
        (1, 2, ("VRAM", "DRAM"), "tcp"),
        (2, 1, ("mixed", "mixed"), "tcp"),
        (1, 2, ("mixed", "mixed"), ""),
    ],
)
def test_random_pages_arrive_byte_exact_and_nothing_else_changes(ranks, p, d, memory, ucx_tls):
    prefill, decode = ranks.start(p, d, memory=memory, ucx_tls=ucx_tls)
    rng = random.Random(p * 10 + d)
    src = rng.sample(range(PAGES), 16)
    taken: list[int] = []
    for room in range(3):
        dst = rng.sample(sorted(set(range(PAGES)) - set(taken)), 5)
        taken += dst
        for rank in decode:
            rank.ask("receive", room=room, pages=dst)
        for rank in prefill:
            rank.ask("send", room=room, pages=src[room * 5 : room * 5 + 5])
        for rank in (*prefill, *decode):
            done = rank.ask("wait", room=room)
            assert done["state"] == "Success", done
        for rank in decode:
            done = rank.ask("wait", room=room)
            assert done["metadata"] == f"room {room}" and done["releasable"]
            checked = rank.ask("check", room=room, pages=dst, all=taken)
            assert checked == {"holds": True, "untouched": True}
    for rank in (*prefill, *decode):
        assert rank.ask("close") == {"closed": True}


def test_a_stopped_source_fails_the_receive_in_time_and_keeps_the_pages(ranks):
    (prefill,), (decode,) = ranks.start(1, 1, options=SOON)
    decode.ask("receive", room=1, pages=[3, 4])
    stop(prefill.process.pid)
    # 5 s of waiting, or 3 s without an answer on the control channel and 3 s to come back; slack for a slow machine.
    failed = decode.ask("wait", room=1, timeout=25)
    assert failed["state"] == "Failed", failed
    assert failed["kind"] in ("DeadlineExceeded", "PeerUnreachable") and not failed["releasable"]
    os.kill(prefill.process.pid, signal.SIGCONT)
    for _ in range(600):
        if decode.ask("wait", room=1, timeout=0)["releasable"]:
            break
        time.sleep(0.1)
    assert decode.ask("wait", room=1, timeout=0)["releasable"]


def test_a_killed_source_fails_the_receive_by_name_and_its_pages_are_free_soon(ranks):
    """They may be so before the receive's end is seen: a death in this PID namespace is looked up."""
    (prefill,), (decode,) = ranks.start(1, 1)
    decode.ask("receive", room=1, pages=[3, 4])
    prefill.process.kill()
    failed = decode.ask("wait", room=1)
    assert (failed["state"], failed["kind"]) == ("Failed", "PeerUnreachable")
    decode.ask("peers", cards=[])
    for _ in range(600):
        if decode.ask("wait", room=1, timeout=0)["releasable"]:
            break
        time.sleep(0.1)
    assert decode.ask("wait", room=1, timeout=0)["releasable"]
    assert released_by(decode, "source_end")  # and by nothing less


def test_a_killed_decode_fails_the_send_and_the_prefill_rank_serves_on(ranks):
    (prefill,), (first, second) = ranks.start(1, 2, options=SOON)
    for rank in (first, second):
        rank.ask("receive", room=1, pages=[3])
    first.process.kill()
    prefill.ask("send", room=1, pages=[1, 2])
    failed = prefill.ask("wait", room=1)
    assert failed["state"] == "Failed"
    assert second.ask("wait", room=1)["state"] == "Failed"
    for _ in range(600):
        if prefill.ask("counters")["inflight"] == 0:
            break
        time.sleep(0.1)
    assert prefill.ask("counters")["inflight"] == 0


def test_a_stopped_decode_rank_fails_the_send_at_its_deadline_and_late_writes_hit_only_quarantine(ranks):
    # 2 s of transfer and 0.5 s to settle; everything else that could end the send takes far longer.
    times = {"waiting": 200, "transfer": 2, "settle": 0.5, "connect": 60, "probe": 60}
    (prefill,), (decode,) = ranks.start(1, 1, ucx_tls="tcp", options={"timeouts": times})
    decode.ask("receive", room=1, pages=[3, 4])
    until = time.monotonic() + 30
    while prefill.ask("counters")["inflight"] != 1:  # the request is there
        assert time.monotonic() < until
    stop(decode.process.pid)
    prefill.ask("send", room=1, pages=[1, 2])
    failed = prefill.ask("wait", room=1, timeout=40)
    assert failed["state"] == "Failed" and failed["kind"] == "DeadlineExceeded", failed
    os.kill(decode.process.pid, signal.SIGCONT)
    for _ in range(600):
        failed = decode.ask("wait", room=1, timeout=0)
        if failed["releasable"]:
            break
        time.sleep(0.1)
    assert failed["state"] == "Failed" and failed["releasable"]
    assert decode.ask("check", room=1, pages=[], all=[3, 4])["untouched"]
