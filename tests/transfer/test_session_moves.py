"""Requests that succeed, over the fake agent: every layout, order of the two sides, pages and prefix."""

from __future__ import annotations

import threading

import pytest
from kv_world import TOKENS, ask, give, handled, until
from places import DEVICES, EMULATED

from pdtransfer.contract.base import Role
from pdtransfer.session.api import TransferState

SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED


@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 2), (2, 1), (1, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("early", ["request", "chunks"])
def test_every_byte_arrives_and_nothing_else_changes(world, place, p, d, early):
    prefill, decode = world.pair(p, d)
    src, dst = [5, 1, 9], [30, 7, 2]
    if early == "request":
        receivers = [ask(r, 7, dst) for r in decode]
        senders = [give(r, 7, src) for r in prefill]
    else:
        senders = [give(r, 7, src) for r in prefill]
        for rank in prefill:
            handled(rank)
        receivers = [ask(r, 7, dst) for r in decode]
    for transfer in (*senders, *receivers):
        assert transfer.wait(30) is SUCCESS, transfer.error
    for rank, receiver in zip(decode, receivers, strict=True):
        assert rank.pool.holds(7, dst) and rank.pool.untouched(dst)
        assert receiver.metadata == b"first token" and receiver.pages_releasable
    assert until(lambda: sum(r.endpoint.inflight for r in (*prefill, *decode)) == 0)


@pytest.mark.parametrize("place", DEVICES, indirect=True)
@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("kinds", [("mixed", "mixed"), ("mixed", "DRAM"), ("VRAM", "mixed"), ("DRAM", "VRAM")])
def test_device_and_host_regions_in_one_request_arrive_whole_and_emulation_shows(world, place, p, d, kinds):
    prefill = [world.rank(Role.PREFILL, t, p, memory=kinds[0]) for t in range(p)]
    decode = [world.rank(Role.DECODE, t, d, memory=kinds[1]) for t in range(d)]
    world.wire(prefill, decode)
    for side, kind in zip((prefill, decode), kinds, strict=True):
        for rank in side:
            layout = rank.endpoint.card.layout
            assert {r.memory for r in layout.regions} == {"mixed": {"VRAM", "DRAM"}}.get(kind, {kind})
            assert layout.emulated_vram == (place.emulated and kind != "DRAM")
    for rank in (*prefill, *decode):
        for verdict in rank.endpoint.verdicts:
            assert verdict.emulated_vram == ("emulated" in verdict.evidence) == place.emulated
    receivers = [ask(r, 7, [30, 7, 2]) for r in decode]
    for rank in prefill:
        give(rank, 7, [5, 1, 9])
    for rank, receiver in zip(decode, receivers, strict=True):
        assert receiver.wait(30) is SUCCESS, receiver.error
        assert rank.pool.holds(7, [30, 7, 2]) and rank.pool.untouched([30, 7, 2])


@pytest.mark.parametrize(("p", "d"), [(2, 1), (1, 2), (2, 2)])
def test_pipeline_stages_send_their_layers(world, p, d):
    def stages(role, count):
        return [world.rank(role, layers=((i,) if count == 2 else (0, 1)), stage=(i, count)) for i in range(count)]

    prefill, decode = stages(Role.PREFILL, p), stages(Role.DECODE, d)
    world.wire(prefill, decode)
    receivers = [ask(r, 3, [8, 9]) for r in decode]
    senders = [give(r, 3, [1, 2]) for r in prefill]
    for transfer in (*senders, *receivers):
        assert transfer.wait(30) is SUCCESS, transfer.error
    assert all(r.pool.holds(3, [8, 9]) and r.pool.untouched([8, 9]) for r in decode)


def test_data_parallel_prefill_ranks_are_chosen_by_room(world):
    def dp(rank: int):
        def change(card):
            at = card.layout.coordinates.model_copy(update={"dp": rank, "dp_size": 2})
            return card.model_copy(update={"layout": card.layout.model_copy(update={"coordinates": at})})

        return change

    prefill = [world.rank(Role.PREFILL, card=dp(i)) for i in range(2)]
    decode = world.rank(Role.DECODE)
    world.wire(prefill, [decode])
    receiver = ask(decode, 5, [8])  # 5 mod 2: rank 1
    sender = give(prefill[1], 5, [1])
    assert receiver.wait(30) is SUCCESS and sender.wait(30) is SUCCESS
    assert decode.pool.holds(5, [8])


def test_pages_decode_has_already_are_not_sent(world):
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4, 5], first_page=2)
    sender = give(prefill, 1, [10, 11, 12, 13])
    assert (sender.wait(30), receiver.wait(30)) == (SUCCESS, SUCCESS)
    assert decode.pool.holds(1, [4, 5], first_page=2) and decode.pool.untouched([4, 5])


def test_a_chunk_is_not_sent_before_its_ready_event(world):
    (prefill,), (decode,) = world.pair()
    ready = threading.Event()
    receiver = ask(decode, 1, [4])
    sender = prefill.endpoint.send(room=1, tokens=TOKENS - 1)
    sender.chunk([3], 0, ready)
    sender.finish(b"")
    assert receiver.wait(0.2) is TransferState.WAITING
    prefill.pool.fill(1, [3])
    ready.set()
    assert receiver.wait(30) is SUCCESS
    assert decode.pool.holds(1, [4])


@pytest.mark.parametrize("place", [EMULATED], indirect=True, ids=["emulated"])
def test_emulated_vram_is_labelled_on_cards_verdicts_metrics_and_in_the_log(world, place, caplog):
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4, 5])
    give(prefill, 1, [1, 2])
    assert receiver.wait(30) is SUCCESS and decode.pool.holds(1, [4, 5])
    plain = world.rank(Role.DECODE, memory="DRAM")
    for rank, emulated in ((prefill, True), (decode, True), (plain, False)):
        assert rank.endpoint.card.layout.emulated_vram is emulated
        for verdict in rank.endpoint.verdicts:
            assert verdict.emulated_vram and "emulated" in verdict.evidence
        assert until(lambda rank=rank: "emulated_vram" in rank.endpoint.metrics)
        assert rank.endpoint.metrics["emulated_vram"] == [((), [float(emulated)])]
        name = rank.endpoint.card.agent_name
        assert any(name in line and "VRAM is emulated" in line for line in caplog.messages) is emulated
