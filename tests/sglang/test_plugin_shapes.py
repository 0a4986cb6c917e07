"""Bytes of every shape of pair, through SGLang's classes: compared with what a seeded generator says each head of
each page holds, never with what the transfer computed."""

from __future__ import annotations

import numpy as np
import pytest
from sglang.srt.disaggregation.base.conn import KVTransferDestination

from tests.sglang.plugin_request import Request
from tests.sglang.plugin_world import World, world


@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 2), (2, 1), (1, 2), (4, 1), (1, 4), (8, 2), (2, 8), (8, 8)])
def test_heads_of_unequal_tensor_parallelism(here: World, p: int, d: int) -> None:
    """4 KV heads; more ranks than heads replicate them."""
    prefill, decode = here.engine(tp=p, role="prefill"), here.engine(tp=d, role="decode", port=1)
    request = Request(77, prefill, decode, prompt=5)
    request.run()
    assert request.wrong() == []
    assert {pool.row(1) for pool in decode.pools} == {(4711, 77)}


@pytest.mark.parametrize(("p", "d"), [(1, 1), (4, 2), (4, 1), (1, 4), (2, 4)])
def test_latent_rows_come_from_one_rank_and_the_others_go_along(here: World, p: int, d: int) -> None:
    prefill, decode = here.engine(tp=p, kind="mla"), here.engine(tp=d, kind="mla", role="decode", port=1)
    request = Request(5, prefill, decode, prompt=3)
    request.run()
    assert request.wrong() == []
    surplus = [one for one in request.senders if one._surplus]
    assert len(surplus) == max(0, p - d)


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_pipeline_of_prefill_stages_into_one_decode_stage_or_as_many(here: World, kind: str, stages: int) -> None:
    decode = here.engine(role="decode", pp=stages, tp=1, port=1, kind=kind)
    prefill = here.engine(pp=2, tp=2, kind=kind)
    request = Request(9, prefill, decode, prompt=4)
    request.run()
    assert request.wrong() == []
    stage0 = [one for one, pool in zip(request.senders, prefill.pools, strict=True) if pool.pp == 0]
    assert all(one.poll_pp_consensus() == 4 for one in stage0)


@pytest.mark.parametrize("copies", [False, True], ids=["attention-dp", "replicas"])
def test_data_parallel_groups_are_asked_by_room(here: World, copies: bool) -> None:
    """Prefill is made last, so that SGLang's senders see its parallelism: they refuse a room of another group."""
    decode = here.engine(role="decode", port=1)
    prefill = here.engine(dp=2, copies=copies)
    for room in (10, 11):
        request = Request(room, prefill, decode, prompt=2)
        request.begin()
        for one in request.senders:
            if one not in request.group:
                assert "conflict" in request.reason(one)
        request.ask()
        request.asked()
        request.send()
        request.finish()
        assert request.wrong() == []
        request.clear()


def test_draft_layers_travel_beside_the_models(here: World) -> None:
    prefill, decode = here.engine(tp=2, drafts=1), here.engine(tp=1, drafts=1, role="decode", port=1)
    request = Request(6, prefill, decode, prompt=3)
    request.run()
    assert request.wrong() == []
    assert any(name.startswith("d") for name, _ in decode.pools[0].parts)


def test_chunks_and_a_prefix_that_decode_has(here: World) -> None:
    prefill, decode = here.engine(), here.engine(role="decode", port=1)
    request = Request(8, prefill, decode, prompt=9, prefix=3)
    request.run(chunks=[2, 1, 3])
    assert request.wrong() == []
    assert len(request.target) == 6


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_of_context_parallel_ranks_the_first_sends(here: World, kind: str) -> None:
    """Each of them has the whole prompt's rows after a forward pass."""
    prefill, decode = here.engine(cp=2, tp=2, kind=kind), here.engine(tp=1, kind=kind, role="decode", port=1)
    request = Request(12, prefill, decode, prompt=3)
    request.run()
    assert request.wrong() == []
    sent = [one for one in request.senders if one._transfer is not None]
    assert {one.kv_mgr.attn_cp_rank for one in sent} == {0}


def test_host_and_device_pages_of_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device memory is emulated here, and the card says so."""
    with world(monkeypatch, {"PDTRANSFER_EMULATE_VRAM": "1"}) as here:
        prefill = here.engine(tp=2)
        decode = here.engine(role="decode", tp=1, host=True, port=1)
        (manager,) = decode.managers
        assert manager.supports_host_destination
        card = manager.rank.card
        assert card.layout.emulated_vram
        assert {r.memory.value for r in card.layout.regions if r.memory} == {"VRAM", "DRAM"}
        request = Request(81, prefill, decode, prompt=3)
        request.begin()
        assert request.receivers[0].supports_host_destination
        request.ask(destination=KVTransferDestination.HOST)
        request.asked()
        request.send()
        request.finish()
        assert request.wrong(host=True) == []
        assert not any(a.any() for a in decode.pools[0].parts.values()), "device pages were written as well"
        second = Request(82, prefill, decode, prompt=3)
        second.run()
        assert second.wrong() == []
        assert request.receivers[0].is_abort_release_safe()


def test_index_rows_have_pages_of_their_own(here: World) -> None:
    prefill, decode = here.engine(kind="mla", index=True), here.engine(kind="mla", index=True, role="decode", port=1)
    request = Request(91, prefill, decode, prompt=3)
    (source,), (target,) = prefill.pools, decode.pools
    for (name, layer), array in source.slots.items():
        array[[4, 5, 6]] = np.arange(18, dtype=np.uint16).reshape(3, 6) + 100 * layer + ord(name[0])
    request.begin()
    request.ask(state=[np.array([7, 8, 9], dtype=np.int32)])
    request.asked()
    request.send(state=[np.array([4, 5, 6], dtype=np.int32)])
    request.finish()
    assert request.wrong() == []
    for (name, layer), array in target.slots.items():
        assert np.array_equal(array[[7, 8, 9]], source.slots[name, layer][[4, 5, 6]]), (name, layer)


def test_recurrent_state_goes_from_slot_to_slot(here: World) -> None:
    prefill, decode = here.engine(state=True), here.engine(state=True, role="decode", port=1)
    request = Request(92, prefill, decode, prompt=2)
    (source,), (target,) = prefill.pools, decode.pools
    for array in source.slots.values():
        array[3] = np.random.default_rng(1).integers(1, 999, array.shape[1], dtype=np.uint16)
    request.begin()
    request.ask(state=[np.array([5], dtype=np.int32)])
    request.asked()
    request.send(state=[np.array([3], dtype=np.int32)])
    request.finish()
    assert all(np.array_equal(a[5], source.slots[key][3]) for key, a in target.slots.items())
