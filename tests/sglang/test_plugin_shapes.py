"""Bytes of every shape of pair, through SGLang's classes: compared with what a seeded generator says each head of
each page holds, never with what the transfer computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sglang.plugin_world import Request, World, world


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(monkeypatch) as made:
        yield made


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


def test_a_pipeline_of_prefill_stages_into_one_decode_stage(here: World) -> None:
    prefill, decode = here.engine(pp=2, tp=2), here.engine(role="decode", tp=1, port=1)
    request = Request(9, prefill, decode, prompt=4)
    request.run()
    assert request.wrong() == []
    stage0 = [one for one, pool in zip(request.senders, prefill.pools, strict=True) if pool.pp == 0]
    assert all(one.poll_pp_consensus() == 4 for one in stage0)


def test_data_parallel_groups_are_asked_by_room(here: World) -> None:
    prefill, decode = here.engine(dp=2), here.engine(role="decode", port=1)
    for room in (10, 11):
        request = Request(room, prefill, decode, prompt=2)
        request.begin()
        for one in request.senders:
            if one not in request.group:
                one.clear()
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
