"""Roster differences, who asks whom, and the real agent's errors and settings."""

from __future__ import annotations

import logging
import os
import time
import uuid

import numpy as np
import pytest
from kv_world import BOOTSTRAP, Pool, template

from pdtransfer.agent.nixl import ERROR_CLASSES, NixlAgent, set_net_devices
from pdtransfer.agent.port import AgentFailure, HandleState
from pdtransfer.contract.base import MemoryKind, Role
from pdtransfer.contract.layout import HeadSlice, RankCoordinates, Region, RegionKind
from pdtransfer.peers import coverage_gap, key_of, refusal, required_askers, roster_change


def card(
    role: Role, tp: int = 0, size: int = 1, *, heads: int = 4, pp: tuple[int, int] = (0, 1), layers=(0, 1), **more
):
    count = max(1, heads // size)
    made = template(role, Pool(0, 1), more.pop("incarnation", "i1"))
    regions = tuple(
        Region(layer=i, kind=k, item_bytes=4 * count * dim * 2, items=8, memory=MemoryKind.DRAM)
        for i in layers
        for k, dim in ((RegionKind.KEY, 8), (RegionKind.VALUE, 16))
    )
    layout = made.layout.model_copy(
        update={
            "heads": HeadSlice(first=tp * heads // size, count=count, total=heads),
            "coordinates": RankCoordinates(tp=tp, tp_size=size, pp=pp[0], pp_size=pp[1]),
            "regions": regions,
        }
    )
    model = made.model.model_copy(update={"total_kv_heads": heads})
    return made.model_copy(
        update={"layout": layout, "model": model, "agent_name": f"{role.value}{tp}", "control": "h:1", **more}
    ).sealed()


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "heads", "expected"),
    [
        # SGLang's table (rules, section 2): D = P and D < P: 1; D > P: D // P.
        (1, 1, 4, 1),
        (4, 4, 4, 1),
        (4, 1, 4, 1),
        (1, 4, 4, 4),
        (2, 4, 4, 2),
        # Replicated heads: 2 -> 8 with 2 heads: each prefill rank serves 4 decode ranks.
        (2, 8, 2, 4),
        (8, 8, 2, 1),
    ],
)
def test_how_many_decode_ranks_ask_one_prefill_rank(prefill_tp, decode_tp, heads, expected):
    prefill = [card(Role.PREFILL, t, prefill_tp, heads=heads) for t in range(prefill_tp)]
    decode = [card(Role.DECODE, t, decode_tp, heads=heads) for t in range(decode_tp)]
    # What a prefill rank is told must equal what really asks it.
    from pdtransfer.contract.pairing import meet

    for p in prefill:
        askers = [d for d in decode if meet(p.layout, d.layout)]
        assert len(askers) == expected
        assert {required_askers(p, d) for d in askers} == {expected}


def test_a_one_stage_prefill_is_asked_by_every_stage_of_decode():
    prefill = card(Role.PREFILL)
    first = card(Role.DECODE, pp=(0, 2), layers=(0,))
    assert required_askers(prefill, first) == 2
    same = card(Role.PREFILL, pp=(0, 2), layers=(0,))
    assert required_askers(same, first) == 1


def test_a_missing_rank_or_stage_is_named():
    decode = card(Role.DECODE)
    halves = [card(Role.PREFILL, t, 2) for t in range(2)]
    assert coverage_gap(halves, decode) is None
    assert coverage_gap(halves[:1], decode) == "the rostered prefill ranks hold 2 of 4 KV heads of layer 0"
    stage = card(Role.PREFILL, pp=(0, 2), layers=(0,))
    assert coverage_gap([stage], decode) == "the rostered prefill ranks hold 0 of 4 KV heads of layer 1"


def test_roster_differences():
    old, other = card(Role.PREFILL), card(Role.PREFILL, pod_uid="p2")
    new = card(Role.PREFILL, incarnation="i2", agent_name="again")
    held = {key_of(old): old, key_of(other): other}
    assert roster_change(held, [old, other]) == roster_change({}, [])
    change = roster_change(held, [new])
    assert set(change.removed) == {key_of(old), key_of(other)} and change.added == (new,)
    assert roster_change(held, [old, other, card(Role.PREFILL, pod_uid="p3")]).added[0].pod_uid == "p3"


def test_a_pair_that_the_contract_refuses_is_not_wired():
    prefill, decode = card(Role.PREFILL), card(Role.DECODE)
    assert refusal(decode, prefill) is None
    odd = prefill.layout.model_copy(
        update={"regions": tuple(r.model_copy(update={"item_bytes": r.item_bytes * 2}) for r in prefill.layout.regions)}
    )
    wrong = [
        prefill.model_copy(update={"layout": odd}).sealed(),
        decode.model_copy(update={"layout": odd}).sealed(),
    ]
    # Both sides agree with each other, but not with the model's head dims (rule L5).
    reason, message = refusal(wrong[1], wrong[0]) or ("", "")
    assert reason == "Incompatible" and message.startswith("L5")


def test_a_value_the_user_set_is_kept_and_warned_about(monkeypatch, caplog):
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert set_net_devices("lo") == "lo" and os.environ["UCX_NET_DEVICES"] == "lo"
    with caplog.at_level(logging.WARNING):
        assert set_net_devices("eth0") == "lo"
    assert "kept" in caplog.text
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)


@pytest.mark.nixl
def test_every_error_class_of_nixl_is_mapped():
    from nixl import _bindings

    theirs = {n for n in dir(_bindings) if n.startswith("nixl") and n.endswith("Error")}
    assert theirs == set(ERROR_CLASSES)


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    agents = [NixlAgent(f"{side}-{uuid.uuid4().hex}") for side in "ab"]
    memories = [np.zeros(4096, dtype=np.uint8) for _ in agents]
    for agent, memory in zip(agents, memories, strict=True):
        agent.register(rows(memory, 0, 4096), MemoryKind.DRAM)
    yield agents, memories
    for agent in agents:
        agent.close()


def rows(memory: np.ndarray, at: int, size: int) -> np.ndarray:
    return np.array([[memory.ctypes.data + at, size, 0]], dtype=np.uint64)


@pytest.mark.nixl
def test_the_real_agent_writes_reads_and_notifies(pair):
    (a, b), (mine, theirs) = pair
    peer = a.add_peer(b.metadata())
    assert peer == b.name
    a.connect(peer)
    mine[:8] = 7
    one = np.zeros(1, dtype=np.int32)
    for operation, local, remote in (("WRITE", 0, 64), ("READ", 128, 64)):
        prepared = (
            a.prepare(None, rows(mine, local, 8), MemoryKind.DRAM),
            a.prepare(peer, rows(theirs, remote, 8), MemoryKind.DRAM),
        )
        handle = a.post(operation, prepared[0], one, prepared[1], one, b"done")
        until = time.monotonic() + 60
        while a.poll(handle) is not HandleState.DONE:
            b.progress()
            assert time.monotonic() < until
        a.release(handle)
        for p in prepared:
            a.release_prepared(p)
    assert theirs[64:72].tolist() == [7] * 8 and mine[128:136].tolist() == [7] * 8


@pytest.mark.nixl
def test_the_real_agents_refusals_have_names_and_say_that_nothing_was_posted(pair):
    (a, b), (mine, theirs) = pair
    peer = a.add_peer(b.metadata())
    prepared = a.prepare(None, rows(mine, 0, 64), MemoryKind.DRAM)
    for action in (
        lambda: a.prepare(peer, rows(theirs, 4000, 500), MemoryKind.DRAM),
        lambda: a.prepare("nobody", rows(theirs, 0, 8), MemoryKind.DRAM),
        lambda: a.add_peer(b"no metadata"),
        lambda: a.post("WRITE", prepared, np.array([5], dtype=np.int32), prepared, np.zeros(1, dtype=np.int32)),
    ):
        with pytest.raises(AgentFailure) as caught:
            action()
        assert caught.value.kind in ERROR_CLASSES and not caught.value.posted
    assert BOOTSTRAP
