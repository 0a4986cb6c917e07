"""Real NIXL, each transport: a source is stopped (SIGSTOP) in mid-write, the decode rank times out, and its pages
are another request's only after a fence. A canary in them shows every late byte.

What fences is not alike. Over TCP and shared memory without CMA the receiving agent takes part in every write, so
its destruction fences. Over CMA the source writes into the other process by itself: its acknowledgement or its death
fence, a new agent does not."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from nixl_ranks import RankProcess, Ranks, released_by, stop

from pdtransfer.contract.card import RankCard

pytestmark = pytest.mark.nixl

PAGES = 60_000
"""Each of 4 regions, 2 K of 256 and 2 V of 512 bytes; in random order, so every one is a piece of its own."""
CANARY, KV = 7, 3
TCP, SHARED, CMA = "tcp", "^cma", ""
"""UCX_TLS: sockets; shared memory whose bytes the receiver copies; UCX's choice, which is CMA here."""
NAMES = {TCP: "tcp", SHARED: "shared-memory-without-cma", CMA: "cma"}
TIMES = {"waiting": 10, "transfer": 1.5, "settle": 0.5, "connect": 1.5, "probe": 10}
NEVER = {"quarantine": 600}
SOON = {"quarantine": 0.5, "rotation": 5}
every_transport = pytest.mark.parametrize("tls", [TCP, SHARED, CMA], ids=NAMES.values())
revocable = pytest.mark.parametrize("tls", [TCP, SHARED], ids=[NAMES[TCP], NAMES[SHARED]])


def start(
    ranks: Ranks, role: str, tls: str, times: dict, *, pod: str = "", tp: int = 1, **config: object
) -> RankProcess:
    # Pages this small would go through slots, and be free at once; here they are what is written.
    config = {"strategy": "sliced", **config} if role == "decode" else config
    options = {"timeouts": {**TIMES, **times}, "config": config, "bootstrap": f"{pod}:1" if pod else "127.0.0.1:8998"}
    rank = RankProcess(role, 0, tp, f"{role}-{pod}-1", "DRAM", "", tls, pages=PAGES, pod=pod, options=options)
    ranks.all.append(rank)
    return rank


def wire(decode: RankProcess, *sources: RankProcess) -> None:
    for rank in (*sources, decode):
        rank.card = RankCard.model_validate_json(rank.answer()["card"])
        rank.ask("paint", value=CANARY if rank is decode else KV)
    for source in sources:
        source.tell("peers", cards=[decode.card.model_dump_json()])
    decode.tell("peers", cards=[s.card.model_dump_json() for s in sources])
    for rank in (*sources, decode):
        wired = rank.answer()
        assert wired["wired"], wired


def pair(
    ranks: Ranks, tls: str, times: dict, *, decode_tp: int = 1, **config: object
) -> tuple[RankProcess, RankProcess]:
    prefill = start(ranks, "prefill", tls, times)
    decode = start(ranks, "decode", tls, times, tp=decode_tp, **config)
    wire(decode, prefill)
    return prefill, decode


def stop_in_mid_write(prefill: RankProcess, decode: RankProcess, room: int, seed: int = 1, **where: object) -> dict:
    """Stopped while its bytes come; how the receive failed, and its `room`. Where the decode rank gets no core while
    everything is written, it stops the source too late: then once more, in another room."""
    for tried in range(room, room + 8000, 1000):
        decode.ask("paint", value=CANARY)
        decode.ask("receive", room=tried, first=0, count=PAGES, shuffle=seed, **where)
        prefill.ask("send", room=tried, first=0, count=PAGES, shuffle=seed + 1)
        at_stop = decode.ask("stop", pid=prefill.process.pid, value=CANARY, every=61, least=4)
        assert at_stop["landed"] >= 4, at_stop
        stop(prefill.process.pid)  # until every thread of it has
        if decode.ask("painted", value=CANARY)["others"] < 4 * PAGES:
            failed = decode.ask("wait", room=tried, timeout=60)  # `quarantine` and all that is longer come later
            assert failed["state"] == "Failed" and failed["kind"] in ("DeadlineExceeded", "PeerUnreachable"), failed
            return {**failed, "room": tried}
        os.kill(prefill.process.pid, signal.SIGCONT)
        decode.ask("wait", room=tried)
        assert releasable(decode, tried, 60)
    raise AssertionError("it had always written everything")


def releasable(decode: RankProcess, room: int, timeout: float) -> bool:
    until = time.monotonic() + timeout
    while not decode.ask("wait", room=room, timeout=0)["releasable"]:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def late_pages(prefill: RankProcess, decode: RankProcess, go_on: bool = True) -> int:
    """The pages are reused, the source goes on: how many of them hold another byte once its writes have ended."""
    decode.ask("paint", value=CANARY)
    if go_on:
        os.kill(prefill.process.pid, signal.SIGCONT)
        until = time.monotonic() + 2  # those that errored never end, as far as it knows
        while prefill.ask("counters")["inflight"] and time.monotonic() < until:
            time.sleep(0.05)
    time.sleep(0.5)
    return int(decode.ask("painted", value=CANARY)["others"])


def serves(prefill: RankProcess, decode: RankProcess, room: int, whole: bool = True, **where: object) -> None:
    """`whole`: every decode rank that prefill waits for is here."""
    until = time.monotonic() + 90
    while True:  # the source may have to load the peer anew first
        decode.ask("receive", room=room, pages=[7, 3], **where)
        prefill.ask("send", room=room, pages=[1, 2])
        ends = [rank.ask("wait", room=room) for rank in ((decode, prefill) if whole else (decode,))]
        if all(end["state"] == "Success" for end in ends):
            break
        assert time.monotonic() < until, ends
        room += 1000
        time.sleep(0.2)
    assert decode.ask("check", room=room, pages=[7, 3])["holds"]


@every_transport
def test_late_bytes_land_until_the_source_has_acknowledged_and_none_after_that(ranks, tls):
    """With its negative control: pages that are reused when the receive fails, as if the deadline were a fence,
    are overwritten."""
    prefill, decode = pair(ranks, tls, NEVER)
    late = 0
    for room in range(1, 6):  # over CMA a stop may fall between two posts, with nothing in flight
        failed = stop_in_mid_write(prefill, decode, room, seed=room)
        assert not failed["releasable"] and not releasable(decode, failed["room"], 0.5)
        late = late_pages(prefill, decode)
        print(f"{NAMES[tls]}: {late} region pages landed late")
        assert releasable(decode, failed["room"], 60)
        assert late_pages(prefill, decode, go_on=False) == 0
        serves(prefill, decode, 100 + room)
        if late:
            break
    assert late > 0
    counters = decode.ask("counters")
    assert counters.get("agent") == 0 and counters["quarantined_bytes"] == 0


@every_transport
def test_a_source_that_is_killed_while_it_is_stopped_is_seen_dead_and_nothing_lands_after_that(ranks, tls):
    prefill, decode = pair(ranks, tls, NEVER)
    failed = stop_in_mid_write(prefill, decode, 1)
    assert not failed["releasable"] and not releasable(decode, failed["room"], 1.0)
    prefill.process.kill()
    assert releasable(decode, failed["room"], 60)
    assert late_pages(prefill, decode, go_on=False) == 0
    assert released_by(decode, "source_end") and decode.ask("counters")["quarantined_bytes"] == 0


@pytest.mark.parametrize(
    ("tls", "parameters"),
    [
        pytest.param(TCP, {}, id=NAMES[TCP]),
        pytest.param(SHARED, {}, id=NAMES[SHARED]),
        # NIXL's own threads write, and progress the receiver.
        pytest.param(TCP, {"num_threads": "2", "num_workers": "3"}, id="tcp-threads"),
    ],
)
def test_a_source_that_stays_stopped_is_fenced_by_a_new_agent_and_nothing_lands_when_it_goes_on(ranks, tls, parameters):
    prefill, decode = pair(ranks, tls, SOON, nixl_params=parameters)
    failed = stop_in_mid_write(prefill, decode, 1)
    assert releasable(decode, failed["room"], 60)
    assert released_by(decode, "rotation") and decode.ask("counters")["agent"] == 1, decode.ask("counters")
    assert prefill.process.poll() is None
    assert late_pages(prefill, decode) == 0
    serves(prefill, decode, 2)
    assert prefill.ask("wait", room=failed["room"])["state"] == "Failed"
    until = time.monotonic() + 90
    while prefill.ask("counters")["inflight"]:
        assert time.monotonic() < until, prefill.ask("counters")
    assert decode.ask("close") == {"closed": True}


def test_over_cma_a_new_agent_is_no_fence_so_the_pages_wait_for_the_source(ranks):
    prefill, decode = pair(ranks, CMA, SOON, quarantine_cap=1 << 30)
    failed = stop_in_mid_write(prefill, decode, 1)
    assert not failed["releasable"] and not releasable(decode, failed["room"], 2.0)
    counters = decode.ask("counters")
    assert counters["agent"] == 0 and counters["failed"] == ""
    os.kill(prefill.process.pid, signal.SIGCONT)
    assert releasable(decode, failed["room"], 60)
    assert late_pages(prefill, decode, go_on=False) == 0
    serves(prefill, decode, 2)


def test_over_cma_too_much_quarantine_for_too_long_ends_the_rank_by_name(ranks):
    """The last resort: the end of the process is a fence over every transport."""
    prefill, decode = pair(ranks, CMA, SOON, quarantine_cap=1 << 20)
    stop_in_mid_write(prefill, decode, 1)
    until = time.monotonic() + 90
    while not (told := decode.ask("counters")["failed"]):
        assert time.monotonic() < until
    assert "QuarantineOverflow" in told and "none can fence" in told


@revocable
def test_staged_a_late_write_hits_slots_only_and_they_are_free_after_a_new_agent(ranks, tls):
    """Prefill TP 1 to one decode rank of TP 2: slices are unequal, and no write targets a page."""
    small = {"staging_slot_bytes": 64 << 10, "staging_bytes": 256 << 10}  # many turns: it is stopped in mid-write
    prefill, decode = pair(ranks, tls, SOON, decode_tp=2, strategy="staged", **small)
    failed = stop_in_mid_write(prefill, decode, 1)
    assert failed["releasable"]
    assert decode.ask("counters")["quarantined_bytes"] > 0 or decode.ask("counters")["agent"] == 1
    until = time.monotonic() + 90
    while decode.ask("counters")["quarantined_bytes"]:
        assert time.monotonic() < until, decode.ask("counters")
        time.sleep(0.05)
    assert decode.ask("counters")["agent"] == 1
    assert late_pages(prefill, decode) == 0
    serves(prefill, decode, 2, whole=False)


@revocable
def test_a_stopped_source_costs_its_own_requests_only(ranks, tls):
    """Two sources: while one is stopped, times out and is fenced, the other's requests go on without a failure."""
    times = {**SOON, "waiting": 30, "transfer": 5, "connect": 5, "rotation": 30}  # the good ones outlast a slow machine
    good = start(ranks, "prefill", tls, times, pod="good")
    bad = start(ranks, "prefill", tls, times, pod="bad")
    decode = start(ranks, "decode", tls, times)
    wire(decode, good, bad)
    taken, room = PAGES // 2, 100
    rng = random.Random(1)

    def serves_on() -> None:
        nonlocal room
        room += 1
        pages = rng.sample(range(taken, PAGES), 2)
        decode.ask("receive", room=room, pages=pages, bootstrap="good:1")
        good.ask("send", room=room, pages=[1, 2])
        for rank in (good, decode):
            done = rank.ask("wait", room=room)
            assert done["state"] == "Success", done
        assert decode.ask("check", room=room, pages=pages)["holds"]

    serves_on()
    decode.ask("receive", room=1, first=0, count=taken, shuffle=1, bootstrap="bad:1")
    bad.ask("send", room=1, first=0, count=taken, shuffle=2, hold=True)  # it can not be over too early
    while decode.ask("wait", room=1, timeout=0)["state"] == "Waiting":
        pass
    assert decode.ask("wait", room=1, timeout=0)["state"] == "Transferring"
    stop(bad.process.pid)
    served = 0
    until = time.monotonic() + 120
    while (
        served <= 10 or decode.ask("counters")["agent"] == 0 or not decode.ask("wait", room=1, timeout=0)["releasable"]
    ):
        assert time.monotonic() < until, f"{served} requests were served beside the stopped source"
        serves_on()
        served += 1
    failed = decode.ask("wait", room=1, timeout=0)
    assert failed["state"] == "Failed" and "bad" in failed["error"]
    os.kill(bad.process.pid, signal.SIGCONT)
    for _ in range(5):
        serves_on()
    serves(bad, decode, 2, bootstrap="bad:1")


def test_a_prefill_rank_that_only_has_the_first_card_learns_of_the_new_agent_from_the_rank_itself(ranks):
    """No operator: the card names an agent that is gone, so that NIXL can't even load it over TCP."""
    prefill, decode = pair(ranks, TCP, SOON)
    failed = stop_in_mid_write(prefill, decode, 1)
    assert releasable(decode, failed["room"], 60)
    assert decode.ask("counters")["agent"] == 1
    newcomer = start(ranks, "prefill", TCP, SOON, pod="newcomer")
    newcomer.card = RankCard.model_validate_json(newcomer.answer()["card"])
    assert decode.card.generation == 0
    newcomer.tell("peers", cards=[decode.card.model_dump_json()])
    decode.tell("peers", cards=[newcomer.card.model_dump_json()])
    for rank in (newcomer, decode):
        wired = rank.answer()
        assert wired["wired"], wired
    serves(newcomer, decode, 2, bootstrap="newcomer:1")
