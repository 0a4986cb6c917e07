"""How decode finds prefill engines: registrations, first contacts, and what is left of engines that are gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from sglang.srt.disaggregation.common.conn import CommonKVReceiver

from pdtransfer.contract.card import RankCard
from pdtransfer.engines.sglang import bootstrap, decode
from pdtransfer.engines.sglang.bootstrap import PdclusterKVBootstrapServer
from pdtransfer.engines.sglang.manager import PdclusterKVManager
from pdtransfer.engines.sglang.meetings import Meetings
from pdtransfer.engines.sglang.plugin import LAUNCH
from pdtransfer.engines.sglang.registry import FIELD, NotReachable, Registry, fetch
from tests.sglang.plugin_world import Engine, Request, World, free_port, listens, wait_for, world


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(monkeypatch) as made:
        yield made


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


# --- registrations -----------------------------------------------------------------------------


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


# --- first contacts ----------------------------------------------------------------------------


def test_an_engine_that_was_forgotten_while_it_was_met_is_met_anew(here: World) -> None:
    prefill, decoding = here.engine(), here.engine(role="decode", port=1)
    (manager,) = decoding.managers
    address = prefill.address
    wait_for(lambda: manager.try_ensure_parallel_info(address), "the first contact")
    del manager.prefill_info_table[address]  # as forget_prefill does it between the meeting's two writes
    assert manager.try_ensure_parallel_info(address) is False
    wait_for(lambda: manager.try_ensure_parallel_info(address), "the next contact")
    assert address in manager.prefill_info_table
    request = Request(1, prefill, decoding, prompt=2)
    request.run()
    assert request.wrong() == []


class Spy:
    """A meeting's future that notes how long one waits for it."""

    def __init__(self, future: Any, waits: list[float]) -> None:
        self._future, self._waits = future, waits

    def result(self, timeout: float) -> Any:
        self._waits.append(timeout)
        return self._future.result(0 if timeout else timeout)


def test_the_scheduler_waits_once_for_an_engine_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang asks every second, 15 times, and again for each later request."""
    waits: list[float] = []
    gone: set[str] = set()
    answers = {a: threading.Event() for a in ("a:1", "b:1", "c:1")}

    def meet(address: str) -> Registry:
        answers[address].wait()
        raise NotReachable(f"no prefill answers at {address}")

    meetings = Meetings(meet)
    submit = meetings._pool.submit

    def spied(work: Any, address: str) -> Any:
        future = submit(work, address)
        future.add_done_callback(lambda _: gone.add(address))
        return Spy(future, waits)

    monkeypatch.setattr(meetings._pool, "submit", spied)
    try:
        for _ in range(3):  # while each is being met
            assert [meetings.outcome(a, decode.FIRST_CONTACT_S) for a in answers] == [None] * 3
        assert waits == [decode.FIRST_CONTACT_S] * 3 + [0.0] * 6
        for event in answers.values():
            event.set()
        wait_for(lambda: len(gone) == 3, "the ends of the meetings")
        waits.clear()
        for address in answers:  # known not to answer
            meetings.outcome(address, decode.FIRST_CONTACT_S)
        assert waits == [0.0] * 3
    finally:
        for event in answers.values():
            event.set()
        meetings.close()


# --- what is left ------------------------------------------------------------------------------


def test_sockets_to_ranks_of_engines_that_are_gone_are_closed(here: World) -> None:
    CommonKVReceiver.close_all_sockets()
    decoding = here.engine(role="decode", port=1)
    (manager,) = decoding.managers
    port, ports = free_port(), set()
    for n in range(3):
        prefill = here.engine(port=port)
        ports.add(prefill.managers[0].rank_port)
        if n:
            manager.check_heart(prefill.address)
        request = Request(10 + n, prefill, decoding, prompt=2)
        request.run()
        assert request.wrong() == []
        request.clear()
        if n < 2:
            prefill.close()
    assert len(ports) == 3
    places = {p: f"tcp://127.0.0.1:{p}" for p in ports}
    assert set(places.values()) <= set(CommonKVReceiver._socket_cache)
    manager.heartbeat_interval = 0.01
    manager._start_heartbeat_checker_thread()
    last = places[prefill.managers[0].rank_port]
    wait_for(lambda: set(CommonKVReceiver._socket_cache) == {last}, "the sockets to go")


def test_a_fault_at_one_engine_does_not_end_the_heartbeat(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (manager,) = here.engine(role="decode", port=1).managers
    asked: list[str] = []

    def look(address: str) -> None:
        asked.append(address)
        raise ValueError("an answer nobody expected")

    monkeypatch.setattr(manager, "check_heart", look)
    manager.prefill_info_table |= {"127.0.0.1:9": None, "127.0.0.1:10": None}
    manager.heartbeat_interval = 0.01
    thread = manager._start_heartbeat_checker_thread()
    wait_for(lambda: len(asked) >= 4, "two rounds")
    assert set(asked) == {"127.0.0.1:9", "127.0.0.1:10"}
    assert thread.is_alive() and manager.problem == ""
