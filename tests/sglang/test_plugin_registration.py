"""How a prefill rank becomes findable: its bootstrap server, who may register there, and a rank that can not."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager

from free_ports import free_port
from pdtransfer.contract.card import RankCard
from pdtransfer.engines.sglang import bootstrap
from pdtransfer.engines.sglang import prefill as prefill_part
from pdtransfer.engines.sglang.bootstrap import PdclusterKVBootstrapServer
from pdtransfer.engines.sglang.manager import PdclusterKVManager
from pdtransfer.engines.sglang.plugin import LAUNCH
from pdtransfer.engines.sglang.receiver import tell
from pdtransfer.engines.sglang.registry import FIELD, NotReachable, fetch
from tests.sglang.plugin_request import Request
from tests.sglang.plugin_world import Engine, World, listens, pair, wait_for, world


def test_a_rank_that_registers_twice_does_not_make_the_others_superfluous(here: World) -> None:
    """SGLang counts registrations, not ranks."""
    prefill = here.engine(tp=2)
    server = prefill.server
    assert server._is_ready() and server._registered_count == 2
    CommonKVManager.register_to_bootstrap(prefill.managers[0])
    assert server._registered_count == 2


def test_a_registration_without_a_server_goes_on_until_there_is_one(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang gives up after five tries, and /route answers 503 for ever."""
    prefill = here.engine()
    (manager,) = prefill.managers
    monkeypatch.setattr("pdtransfer.engines.sglang.prefill.REGISTER_TRIES", 1)
    monkeypatch.setattr("pdtransfer.engines.sglang.prefill.REGISTER_PAUSE_S", 0.01)
    heard: list[int] = []

    def put(url: str, **what: object) -> SimpleNamespace:
        heard.append(1)
        return SimpleNamespace(status_code=503 if len(heard) < 8 else 200, text="")

    monkeypatch.setattr("pdtransfer.engines.sglang.prefill.requests.put", put)
    manager._register_topology_row("http://nowhere/route", {})
    wait_for(lambda: len(heard) == 8, "the eighth try")
    assert manager.problem == ""


def card_of(engine: Engine, rank: int = 0) -> RankCard:
    found: RankCard = engine.managers[rank].rank.card
    return found


def registration(engine: Engine, card: RankCard, **ours: Any) -> dict[str, Any]:
    """As SGLang's ranks register (PUT /route), with a card."""
    at, size = card.layout.coordinates, engine.shape
    return {
        "attn_tp_size": size.tp, "attn_tp_rank": at.tp, "attn_cp_size": size.cp, "attn_cp_rank": at.cp,
        "attn_dp_size": size.dp, "attn_dp_rank": at.dp, "pp_size": size.pp, "pp_rank": at.pp,
        "system_dp_size": 1, "system_dp_rank": 0, "rank_ip": "127.0.0.1", "rank_port": 1234,
        "page_size": size.page_size, "kv_cache_dtype": "auto",
        FIELD: {"card": card.model_dump(mode="json"), **ours},
    }  # fmt: skip


def put(engine: Engine, body: Any) -> requests.Response:
    return requests.put(f"http://{engine.address}/route", json=body, timeout=30)


def test_a_registry_is_whole_only_when_every_rank_of_the_new_incarnation_is_in(here: World) -> None:
    """SGLang's own table holds the ranks of the incarnation before."""
    prefill = here.engine(tp=2)
    assert [r.card.incarnation for r in fetch(prefill.address, 30).ranks] == [prefill.incarnation] * 2
    new = [card_of(prefill, n).model_copy(update={"incarnation": "next"}).sealed() for n in range(2)]
    assert put(prefill, registration(prefill, new[0])).status_code == 200
    with pytest.raises(NotReachable, match="1 prefill ranks have registered"):
        fetch(prefill.address, 30)
    assert put(prefill, registration(prefill, new[1])).status_code == 200
    assert [r.card.incarnation for r in fetch(prefill.address, 30).ranks] == ["next"] * 2


def test_only_ranks_of_this_engine_start_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has not ended yet, or a stranger: the port is open to everyone."""
    with world(monkeypatch, {LAUNCH: "this-start"}) as here:
        prefill = here.engine()
        before = fetch(prefill.address, 30)
        other = card_of(prefill).model_copy(update={"incarnation": "next"}).sealed()
        for ours in ({}, {"launch": "another"}, {"launch": ""}, {"launch": "\udcff"}, {"launch": 7}):
            answer = put(prefill, registration(prefill, other, **ours))
            assert answer.status_code == 403 and "another engine start" in answer.text
        assert fetch(prefill.address, 30) == before
        assert put(prefill, registration(prefill, other, launch="this-start")).status_code == 200
        assert [r.card.incarnation for r in fetch(prefill.address, 30).ranks] == ["next"]


@pytest.mark.parametrize("body", [b"{", b"[]", b"{}", b'{"rank_ip": "h", "rank_port": 1, "pdcluster": {"card": 3}}'])
def test_what_is_no_registration_is_refused(here: World, body: bytes) -> None:
    prefill = here.engine()
    answer = requests.put(f"http://{prefill.address}/route", data=body, timeout=30)
    assert answer.status_code == 400 and "no card" in answer.text


def test_a_bootstrap_port_that_is_taken_ends_the_start_by_name(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs it and goes on: prefill looks healthy, and nobody finds it."""
    monkeypatch.setattr(bootstrap, "BIND_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"127\.0\.0\.1:{port}.*--disaggregation-bootstrap-port"):
            PdclusterKVBootstrapServer("127.0.0.1", port)


def test_a_bootstrap_port_that_comes_free_is_taken(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine before this one ends a moment later."""
    other = socket.create_server(("127.0.0.1", 0))
    port = other.getsockname()[1]
    monkeypatch.setattr(bootstrap.time, "sleep", lambda _: other.close())
    server = PdclusterKVBootstrapServer("127.0.0.1", port)
    wait_for(lambda: listens(port), "the bootstrap server")
    server.close()


def test_an_engine_whose_bootstrap_server_ends_by_itself_ends(here: World) -> None:
    server = PdclusterKVBootstrapServer("127.0.0.1", port := free_port())
    wait_for(lambda: listens(port), "the bootstrap server")
    server._loop.call_soon_threadsafe(server._loop.stop)
    wait_for(lambda: here.kills, "the engine's end")
    other = PdclusterKVBootstrapServer("127.0.0.1", port)
    wait_for(lambda: listens(port), "the other bootstrap server")
    other.close()
    assert len(here.kills) == 1  # not by one that was told to end


def test_replicas_share_an_incarnation_that_does_not_tell_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The incarnation is public; what a registration must show is not."""
    monkeypatch.setenv(LAUNCH, "this-start")

    def replica() -> Any:
        return SimpleNamespace(system_dp_size=2, _opened=0)

    one, two = replica(), replica()
    first = [PdclusterKVManager._incarnation(r) for r in (one, two)]
    again = [PdclusterKVManager._incarnation(r) for r in (one, two)]
    monkeypatch.setenv(LAUNCH, "next-start")
    other = PdclusterKVManager._incarnation(replica())
    assert first[0] == first[1] and again[0] == again[1]
    assert len({first[0], again[0], other}) == 3
    assert not any("start" in i for i in (*first, *again, other))


def test_a_rank_that_is_not_registered_says_so_until_it_is(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bootstrap port is another server's: /health stays green in SGLang, and no decode finds it."""
    prefill, decoder = pair(here)
    (manager,) = prefill.managers
    monkeypatch.setattr(prefill_part, "REGISTER_TRIES", 1)
    monkeypatch.setattr(prefill_part, "REGISTER_PAUSE_S", 0.01)
    status = [403]
    sent: list[dict[str, object]] = []

    def put(url: str, json: dict[str, object], timeout: float) -> SimpleNamespace:
        sent.append(json)
        return SimpleNamespace(status_code=status[0], text="of another engine start")

    monkeypatch.setattr(prefill_part.requests, "put", put)
    manager._register_topology_row("http://here/route", {})
    assert manager.problem == "prefill is not registered at http://here/route: HTTP 403: of another engine start"
    (one,) = prefill.senders(251)
    assert one.poll() == KVPoll.Failed
    assert "is not registered" in Request(251, prefill, decoder, prompt=1).reason(one)
    assert not here.kills, "it may still succeed"
    status[0] = 200
    wait_for(lambda: manager.problem == "", "registration")
    assert sent[0][FIELD]["card"]["incarnation"] == prefill.incarnation  # type: ignore[index]


def test_a_server_that_can_not_be_reached_is_named(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = here.engine()
    (manager,) = prefill.managers

    def put(url: str, **what: object) -> None:
        raise requests.ConnectionError("refused")

    monkeypatch.setattr(prefill_part.requests, "put", put)
    assert manager._register("http://here/route", {}, prefill.incarnation) is False
    assert manager.problem == "prefill is not registered at http://here/route: refused"


def test_what_an_earlier_incarnation_could_not_register_says_nothing_of_the_next(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """release_memory_occupation and resume_memory_occupation, while a registration hangs."""
    prefill = here.engine()
    (manager,) = prefill.managers

    def put(url: str, **what: object) -> SimpleNamespace:
        manager.rank.close()
        manager.rank = None  # as SGLang takes the pools away
        return SimpleNamespace(status_code=500, text="no")

    monkeypatch.setattr(prefill_part.requests, "put", put)
    assert manager._register("http://here/route", {}, prefill.incarnation) is True
    assert manager.unregistered == ""


def test_a_rank_that_never_registers_ends_its_engine(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = here.engine()
    (manager,) = prefill.managers
    for name, value in {"REGISTER_TRIES": 1, "REGISTER_PAUSE_S": 0.01, "REGISTER_DEADLINE_S": 0.0}.items():
        monkeypatch.setattr(prefill_part, name, value)
    monkeypatch.setattr(prefill_part.requests, "put", lambda url, **_: SimpleNamespace(status_code=500, text="no"))
    manager._register_topology_row("http://here/route", {})
    wait_for(lambda: here.kills, "the engine's end")
    assert "is not registered at http://here/route: HTTP 500: no" in manager.rank.problem


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_registration_carries_the_start_of_the_servers_node(monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    monkeypatch.setitem(os.environ, LAUNCH, "mine")
    group = SimpleNamespace(broadcast_object=lambda value, src: f"{value} as rank {src} has it")
    monkeypatch.setattr(prefill_part, "get_parallel", lambda: SimpleNamespace(nnodes=nodes, world_group=group))
    assert prefill_part._launch() == ("mine" if nodes == 1 else "mine as rank 0 has it")


def test_the_registration_of_this_engine_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCH, "start of both")
    with world(monkeypatch) as here:
        prefill, decoder = pair(here)
        assert prefill.managers[0]._launch == "start of both" and prefill.managers[0].problem == ""
        assert tell("127.0.0.1", prefill.managers[0].rank_port, [b"noise"])
        request = Request(252, prefill, decoder, prompt=1)
        request.run()
        assert request.wrong() == []
