"""Numbered facts of NIXL (NIXL_FACTS.md) that the session is built against, forced with the double."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kv_world import PAGES, ask, give, until

from pdtransfer.agent.nixl import ERROR_CLASSES
from pdtransfer.agent.port import AgentFailure
from pdtransfer.contract.base import MemoryKind, Role
from pdtransfer.contract.layout import Region, RegionKind
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.session.api import TransferState
from pdtransfer.session.probe import choose_samples

SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED


@pytest.fixture(autouse=True)
def probe_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdtransfer.session.wiring.REPROBE", 0.05)
    monkeypatch.setattr("pdtransfer.session.wiring.LOST", 0.05)


def spy(agent: Any, name: str) -> list[tuple[Any, ...]]:
    """Arguments of every call of one of the agent's methods from now on."""
    calls: list[tuple[Any, ...]] = []
    real = getattr(agent, name)

    def called(*args: Any, **more: Any) -> Any:
        calls.append(args)
        return real(*args, **more)

    setattr(agent, name, called)
    return calls


def test_fact_4_no_transfer_waits_for_a_notification(world):
    """Completion travels on the control channel after DONE, so one that is lost or late costs nothing."""
    (prefill,), (decode,) = world.pair()
    prefill.agent.faults.drop_notification = True
    receiver = ask(decode, 1, [4, 5])
    sender = give(prefill, 1, [1, 2])
    assert receiver.wait(30) is SUCCESS and sender.wait(30) is SUCCESS
    assert decode.pool.holds(1, [4, 5])


def test_fact_6_nothing_is_deregistered_before_the_agent_is_gone(world):
    (prefill,), (decode,) = world.pair()
    calls = [spy(rank.agent, "deregister") for rank in (prefill, decode)]
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert receiver.wait(30) is SUCCESS
    for rank in (prefill, decode):
        rank.endpoint.close()
        assert not rank.agent.alive
    assert calls == [[], []]


@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 1), (1, 2)])
def test_fact_8_each_prepared_list_holds_one_memory_kind(world, p, d):
    prefill, decode = [world.rank(Role.PREFILL, t, p, memory="mixed") for t in range(p)], []
    lists = [spy(rank.agent, "prepare") for rank in prefill]
    decode = [world.rank(Role.DECODE, t, d, memory="mixed") for t in range(d)]
    lists += [spy(rank.agent, "prepare") for rank in decode]
    world.wire(prefill, decode)
    receivers = [ask(rank, 1, [4, 5]) for rank in decode]
    for rank in prefill:
        give(rank, 1, [1, 2])
    assert [r.wait(30) for r in receivers] == [SUCCESS] * d
    spans = [
        (array.ctypes.data, array.ctypes.data + array.nbytes, rank.pool.kind_of(layer))
        for rank in (*prefill, *decode)
        for (layer, _), array in rank.pool.arrays.items()
    ]
    checked = {"VRAM": 0, "DRAM": 0}
    for calls in lists:
        for _, table, kind in calls:
            for address in np.asarray(table)[:, 0].tolist():
                held = [k for low, high, k in spans if low <= address < high]
                if held:  # else scratch or an arena
                    assert held == [kind.value]
                    checked[held[0]] += 1
    assert checked["VRAM"] and checked["DRAM"], "the test saw no list of the pool"


@pytest.mark.parametrize("kind", ERROR_CLASSES)
@pytest.mark.parametrize("call", ["post", "poll"])
def test_fact_9_each_error_class_fails_its_request_by_name_and_the_next_one_succeeds(world, kind, call):
    (prefill,), (decode,) = world.pair()
    real, left = getattr(prefill.agent, call), [1]

    def once(*args: Any, **more: Any) -> Any:
        if left:
            left.pop()
            raise AgentFailure(kind, "injected", posted=call == "poll")
        return real(*args, **more)

    setattr(prefill.agent, call, once)
    receiver = ask(decode, 1, [4])
    sender = give(prefill, 1, [1])
    assert receiver.wait(30) is FAILED and sender.wait(30) is FAILED
    assert not left and kind in str(receiver.error) and kind in str(sender.error)
    assert prefill.endpoint.failed is None and decode.endpoint.failed is None
    if kind == "nixlRemoteDisconnectError":  # until the connection is made anew, requests are refused by name
        assert until(lambda: prefill.endpoint.counters.get("peer_reloads", 0) >= 1)
    assert until(lambda: all(r.endpoint.verdicts[0].state is VerdictState.WIRED for r in (prefill, decode)))
    again = ask(decode, 2, [6])
    give(prefill, 2, [2])
    assert again.wait(30) is SUCCESS, again.error
    assert decode.pool.holds(2, [6])


@pytest.mark.parametrize("kind", ERROR_CLASSES)
@pytest.mark.parametrize("call", ["add_peer", "connect", "prepare"])
def test_fact_9_each_error_class_while_wiring_is_a_verdict_and_never_the_endpoints_end(world, kind, call):
    prefill, decode = world.rank(Role.PREFILL), world.rank(Role.DECODE)
    real, left = getattr(decode.agent, call), [1]

    def once(*args: Any, **more: Any) -> Any:
        if left:
            left.pop()
            raise AgentFailure(kind, "injected", posted=False)
        return real(*args, **more)

    setattr(decode.agent, call, once)
    prefill.endpoint.apply_peers([decode.endpoint.card])
    decode.endpoint.apply_peers([prefill.endpoint.card])
    assert until(lambda: not left)
    # An agent that can't be reached is tried again; what NIXL refuses is refused.
    if call == "add_peer" and kind not in ("nixlBackendError", "nixlRemoteDisconnectError"):
        assert until(lambda: decode.endpoint.verdicts[0].state is VerdictState.REFUSED)
        assert kind in decode.endpoint.verdicts[0].message
        decode.endpoint.apply_peers([])
        decode.endpoint.apply_peers([prefill.endpoint.card])
    assert decode.endpoint.wait_wired(30), decode.endpoint.verdicts
    assert decode.endpoint.failed is None


def test_fact_10_peers_are_connected_when_they_are_wired_and_kinds_are_registered_in_one_call(world):
    (prefill,), (decode,) = world.pair(memory="mixed")
    for rank, other in ((prefill, decode), (decode, prefill)):
        assert rank.agent.connected == {other.agent.name}  # before any request
        pools = [(kind, rows) for kind, rows in rank.agent.regions if len(rows) > 1]
        assert sorted((kind, len(rows)) for kind, rows in pools) == [(MemoryKind.DRAM, 2), (MemoryKind.VRAM, 2)]


def test_fact_11_what_holds_the_interpreter_lock_is_called_at_set_up_only(world):
    """getLocalMD holds it: a rank's metadata is made once, not for each peer or request."""
    (prefill,), (decode,) = world.pair()
    calls = [spy(rank.agent, "metadata") for rank in (prefill, decode)]
    for room in range(3):
        receiver = ask(decode, room, [4 + room])
        give(prefill, room, [1])
        assert receiver.wait(30) is SUCCESS
    again = world.rank(Role.DECODE, incarnation="decode-2", card=lambda c: c.model_copy(update={"pod_uid": "other"}))
    world.wire([prefill], [decode, again])
    assert calls == [[], []]


def test_fact_17_a_lane_is_claimed_only_with_its_evidence(world):
    """No API tells the lanes: without an HCA's counters nothing is called RDMA."""
    _, (decode,) = world.pair()
    (verdict,) = decode.endpoint.verdicts
    assert verdict.transport != "RDMA" or "port counters" in verdict.evidence
    assert verdict.evidence.startswith("checksummed READ and WRITE") and verdict.checksum_ok


def test_fact_18_the_probe_reads_first_and_last_pages_of_the_real_pool(world):
    prefill, decode = world.rank(Role.PREFILL), world.rank(Role.DECODE)
    read: set[int] = set()
    decode.agent.on_land = lambda handle: read.update(np.asarray(handle.source)[:, 0].tolist())
    world.wire([prefill], [decode])
    expected = {
        array.ctypes.data + page * array[0].nbytes for array in prefill.pool.arrays.values() for page in (0, PAGES - 1)
    }
    assert expected <= read


def test_fact_18_each_memory_kind_is_sampled_at_both_ends_of_what_was_registered(world):
    """One pool may hold several allocations: the first and the last regions of each kind are read."""
    card = world.rank(Role.PREFILL).endpoint.card
    regions = tuple(
        Region(layer=i, kind=RegionKind.KEY, item_bytes=256, items=7, memory=kind, address=4096 * (i + 1))
        for i, kind in enumerate([MemoryKind.VRAM] * 10 + [MemoryKind.DRAM] * 10)
    )
    layout = card.layout.model_copy(update={"regions": regions})
    samples = choose_samples(card.model_copy(update={"layout": layout}))
    got = {(s.region, s.page) for s in samples}
    ends = (0, 9, 10, 19)
    assert {(region, page) for region in ends for page in (0, 6)} <= got
    assert len(samples) == len(got) <= 16
