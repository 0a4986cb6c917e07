"""How decode meets prefill engines: first contacts, engines that come back, and what is left of those that are gone."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, CommonKVManager, CommonKVReceiver

from free_ports import free_port
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.engines.sglang import decode
from pdtransfer.engines.sglang.meetings import Meetings
from pdtransfer.engines.sglang.receiver import PdclusterKVReceiver
from pdtransfer.engines.sglang.registry import NotReachable, Registry
from pdtransfer.session.api import TransferState
from tests.sglang.plugin_request import Request
from tests.sglang.plugin_world import World, listens, pair, wait_for


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


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"page_size": 8}, "page_tokens: 4 here, 8 there"),
        ({"dtype": "float16"}, "dtype"),
        ({"model": "Other"}, "name: "),
        ({"layers": 2}, "layers"),
    ],
)
def test_an_engine_that_does_not_fit_fails_the_room_by_name_and_raises_nothing(
    here: World, other: dict[str, object], told: str
) -> None:
    """try_ensure_parallel_info raises in SGLang's scheduler and ends decode."""
    prefill, decode = here.engine(**other), here.engine(role="decode", port=1)
    request = Request(51, prefill, decode, prompt=2)
    request.begin()
    assert request.receivers[0].poll() == KVPoll.Failed
    assert told in request.reason(request.receivers[0])
    (manager,) = decode.managers
    assert manager.problem == ""
    fits = here.engine()
    second = Request(52, fits, decode, prompt=2)
    second.run()
    assert second.wrong() == []


@pytest.mark.parametrize("stages", [(1, 2), (2, 4), (4, 2)])
def test_stages_that_sglang_does_not_map_fail_the_room_by_name(here: World, stages: tuple[int, int]) -> None:
    """Rule A8: SGLang's common classes, which the plugin builds on, map one decode stage or prefill's number only."""
    p, d = stages
    prefill, decode = here.engine(pp=p), here.engine(role="decode", pp=d, port=1)
    request = Request(57, prefill, decode, prompt=2)
    request.begin()
    for one in request.receivers:
        assert one.poll() == KVPoll.Failed
        told = request.reason(one)  # of the ranks' own check or, where that is late, of SGLang's
        ours, theirs = f"A8: prefill has {p} pipeline stages, decode {d}", f"Decode pp size ({d}) should be equal"
        assert ours in told or theirs in told
    assert [m.problem for m in decode.managers] == [""] * d


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, KeyError])
def test_whatever_sglangs_own_check_of_a_prefill_raises_fails_the_room_by_name(
    here: World, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Bare in SGLang: its scheduler ends. What our rules do not know of, a later SGLang may refuse."""
    prefill, decode = pair(here)
    (manager,) = decode.managers
    with monkeypatch.context() as patch:

        def refuse(self: object, bootstrap_addr: str) -> bool:
            raise error("a layout of tomorrow")

        patch.setattr(CommonKVManager, "try_ensure_parallel_info", refuse)
        request = Request(58, prefill, decode, prompt=2).begin()
        assert request.receivers[0].poll() == KVPoll.Failed
        assert "a layout of tomorrow" in request.reason(request.receivers[0])
    assert manager.problem == ""
    manager.meetings.forget(prefill.address)  # a refusal stands for seconds
    again = Request(59, prefill, decode, prompt=2)
    again.run()
    assert again.wrong() == []


def test_nobody_at_the_address_is_said_by_name_when_sglang_gives_up(here: World) -> None:
    decode = here.engine(role="decode", port=1)
    (manager,) = decode.managers
    one = PdclusterKVReceiver(manager, "127.0.0.1:9", 53)
    for _ in range(2):
        assert manager.try_ensure_parallel_info("127.0.0.1:9") is False
    wait_for(lambda: manager.meetings.trouble("127.0.0.1:9"), "the first try's end")
    one.abort()  # as SGLang does after 15 tries
    request = Request(53, SimpleNamespace(address=""), decode, prompt=1)
    assert "no prefill answers at 127.0.0.1:9" in request.reason(one)


def test_another_backend_at_the_address_is_said_by_name(here: World) -> None:
    class Stock(CommonKVBootstrapServer):  # type: ignore[misc]
        def poll(self) -> None: ...

    port = free_port()
    server = Stock("127.0.0.1", port)
    wait_for(lambda: listens(port), "the other backend's server")
    decode = here.engine(role="decode", port=1)
    (manager,) = decode.managers
    one = PdclusterKVReceiver(manager, f"127.0.0.1:{port}", 54)
    wait_for(
        lambda: not manager.try_ensure_parallel_info(one.bootstrap_addr) and one.poll() == KVPoll.Failed, "refusal"
    )
    request = Request(54, SimpleNamespace(address=""), decode, prompt=1)
    assert "prefill runs another transfer backend" in request.reason(one)
    server.close()


def test_an_introduction_that_was_lost_is_said_again(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's registration is sent once and has no answer."""
    prefill, decode = pair(here)
    (manager,) = prefill.managers
    heard, lost = manager.hear, []

    def lose_the_first(frames: list[bytes]) -> None:
        if lost:
            heard(frames)
        else:
            lost.append(frames)

    monkeypatch.setattr(manager, "hear", lose_the_first)
    monkeypatch.setattr("pdtransfer.engines.sglang.introduction.JUDGED_S", 0.2)
    request = Request(56, prefill, decode, prompt=2)
    request.run()
    assert request.wrong() == []
    assert len(lost) == 1 and b"introduce" in lost[0][1]


def test_stray_traffic_on_the_ranks_port_ends_nothing(here: World) -> None:
    """SGLang's NIXL backend asserts in its bootstrap thread, which is then dead while /health is green."""
    prefill, decode = pair(here)
    (manager,) = prefill.managers
    for frames in ([b"GET / HTTP/1.1"], [], [b"NixlMsg", b"None"], [b"pdcluster-1", b"{"], [b"pdcluster-1", b"[1]"]):
        manager.hear(frames)
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(f"tcp://127.0.0.1:{manager.rank_port}")
        push.send_multipart([b"\x00\xff", b"noise"])
    request = Request(55, prefill, decode, prompt=2)
    request.run()
    assert request.wrong() == []
    assert all(t.is_alive() for t in manager._threads)


def test_the_verdicts_name_what_both_sides_found(here: World) -> None:
    prefill, decode = pair(here)
    Request(93, prefill, decode, prompt=1).run()
    (manager,) = decode.managers
    (verdict,) = manager.rank.endpoint.verdicts
    assert verdict.state is VerdictState.WIRED and verdict.checksum_ok
    assert manager.rank.endpoint.inflight == 0
    assert TransferState.SUCCESS == "Success"


def test_prefill_that_came_back_at_once_under_its_address_is_met_anew(here: World) -> None:
    """SGLang keeps ports until two heartbeats were missed; here none was."""
    prefill, decode = pair(here)
    request = Request(35, prefill, decode, prompt=2)
    request.run()
    request.clear()
    address = prefill.address
    prefill.close()
    again = here.engine(port=int(address.rsplit(":", 1)[1]))
    assert again.incarnation != prefill.incarnation
    (manager,) = decode.managers
    assert address in manager.prefill_info_table
    manager.check_heart(address)
    assert address not in manager.prefill_info_table
    second = Request(36, again, decode, prompt=3)
    second.run()
    assert second.wrong() == []


def test_a_request_to_a_prefill_that_is_gone_fails_by_name_and_the_next_meets_the_new_one(here: World) -> None:
    """Without any heartbeat between: the connection tells."""
    prefill, decode = pair(here)
    Request(37, prefill, decode, prompt=2).run()
    address = prefill.address
    prefill.close()
    again = here.engine(port=int(address.rsplit(":", 1)[1]))
    lost = Request(38, again, decode, prompt=2)
    lost.begin()
    lost.ask()
    wait_for(lambda: lost.receivers[0].poll() == KVPoll.Failed, "the end of a request to nobody")
    assert "Peer" in lost.reason(lost.receivers[0])
    second = Request(39, again, decode, prompt=2)
    second.run()
    assert second.wrong() == []


def test_a_new_decode_incarnation_in_the_same_place_takes_the_old_ones_turn(here: World) -> None:
    prefill = here.engine()
    for n in range(2):
        decode = here.engine(role="decode", port=1)
        request = Request(40 + n, prefill, decode, prompt=2)
        request.run()
        assert request.wrong() == []
        request.clear()
        decode.close()
    (peer,) = prefill.managers[0].rank.peers
    assert peer.incarnation == decode.incarnation
