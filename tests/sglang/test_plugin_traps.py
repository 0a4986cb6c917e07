"""Traps of SGLang 0.5.23 that a transfer backend falls into by reading its classes: one test each, on those classes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, CommonKVManager
from sglang.srt.disaggregation.decode import DecodeTransferQueue
from sglang.srt.disaggregation.fake.conn import FakeKVReceiver, FakeKVSender
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class
from sglang.srt.environ import envs

from pdtransfer.contract.verdict import VerdictState
from pdtransfer.engines.sglang import plugin
from pdtransfer.engines.sglang.messages import GiveUp, encode
from pdtransfer.engines.sglang.receiver import PdclusterKVReceiver, tell
from pdtransfer.errors import QuarantineOverflow
from pdtransfer.session.api import TransferState
from tests.sglang.plugin_world import Request, World, free_port, listens, wait_for, world


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(monkeypatch) as made:
        yield made


def pair(here: World, **what: object) -> tuple[object, object]:
    return here.engine(**what), here.engine(role="decode", port=1, **what)  # type: ignore[arg-type]


def stalled(request: Request, here: World) -> None:
    """Prefill's writes are posted and never complete."""
    for m in request.prefill.managers:
        here.hub.agents[m.rank.card.agent_name].faults.stall_all = True


def land(request: Request, here: World) -> None:
    """What was posted lands now, late."""
    for m in request.prefill.managers:
        here.hub.agents[m.rank.card.agent_name].faults.stall_all = False
        assert here.hub.unstall(m.rank.card.agent_name)


# --- pages of an aborted request ---------------------------------------------------------------


def test_arguments_with_this_backend_end_sglangs_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (plugin.RELEASE, f"{plugin.RELEASE}_TIMEOUT"):
        monkeypatch.delenv(key, raising=False)
    other = SimpleNamespace(disaggregation_transfer_backend="nixl", disaggregation_mode="decode")
    plugin.on_arguments(None, other)
    assert envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.get() == 30.0
    plugin.on_arguments(
        None, SimpleNamespace(disaggregation_transfer_backend="pdcluster", disaggregation_mode="decode")
    )
    assert envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.get() == float("inf")
    assert envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get() is True
    for key in (plugin.RELEASE, f"{plugin.RELEASE}_TIMEOUT"):
        os.environ.pop(key, None)


def test_decode_does_not_start_with_a_timer_that_gives_pages_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        world(monkeypatch, {"SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "30"}) as here,
        pytest.raises(RuntimeError, match="not infinite"),
    ):
        here.engine(role="decode", port=1)


class Queue:
    """SGLang's own resolve_deferred_releases, on a queue of one aborted request."""

    def __init__(self, receiver: object, required: int) -> None:
        self.released: list[str] = []
        self.receiver = receiver
        request = SimpleNamespace(req=SimpleNamespace(bootstrap_room=receiver.bootstrap_room), kv_receiver=receiver)  # type: ignore[attr-defined]
        timeout = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.get()
        self.deferred_kv_release_timeout = timeout
        start = time.monotonic() - 1000.0  # as if it had waited for long
        self._deferred_releases = [(request, start, start + timeout, 0, required)]
        self.gloo_group = SimpleNamespace()

    def _is_host_destination(self, request: object) -> bool:
        return False

    def _do_release(self, request: object, index: int) -> None:
        self.released.append("released")

    def _observe_deferred_kv_release(self, **what: object) -> None:
        self.released.append(str(what["outcome"]))

    def resolve(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 1)
        DecodeTransferQueue.resolve_deferred_releases(self)  # type: ignore[arg-type]
        return self.released


@pytest.mark.parametrize("required", [0, 1])
def test_pages_stay_held_while_a_write_may_land_whatever_sglang_counts(
    here: World, monkeypatch: pytest.MonkeyPatch, required: int
) -> None:
    """decode.py:3064 and `required_acks=0`: acknowledgements are not counted, the ledger is asked."""
    prefill, decode = pair(here)
    request = Request(21, prefill, decode, prompt=4)  # type: ignore[arg-type]
    request.begin()
    request.ask()
    request.asked()
    stalled(request, here)
    request.send()
    (one,) = request.receivers
    wait_for(lambda: one.poll() == KVPoll.Transferring, "bytes under way")
    one.abort()
    assert one.poll() == KVPoll.Failed and one.abort_notified
    assert "Aborted by AbortReq." in request.reason(one)
    assert one.kv_mgr.is_abort_release_safe(21, 0) is False
    queue = Queue(one, required)
    assert queue.resolve(monkeypatch) == []  # 1000 s are not enough
    land(request, here)
    wait_for(lambda: one.kv_mgr.is_abort_release_safe(21, 0), "the acknowledgement")
    assert queue.resolve(monkeypatch) == ["released", "drained"]


def test_an_abort_is_acknowledged_only_after_what_was_posted_has_landed(here: World) -> None:
    prefill, decode = pair(here)
    request = Request(22, prefill, decode, prompt=4)  # type: ignore[arg-type]
    request.begin()
    request.ask()
    request.asked()
    stalled(request, here)
    request.send()
    (one,) = request.receivers
    wait_for(lambda: one.poll() == KVPoll.Transferring, "bytes under way")
    before = [a.copy() for a in decode.pools[0].parts.values()]  # type: ignore[attr-defined]
    one.abort()
    assert not one.releasable
    land(request, here)
    wait_for(lambda: one.releasable, "the acknowledgement")
    after = list(decode.pools[0].parts.values())  # type: ignore[attr-defined]
    assert any((a != b).any() for a, b in zip(before, after, strict=True)), "the late write did land"
    # And the pages serve the next request.
    again = Request(23, prefill, decode, prompt=4)  # type: ignore[arg-type]
    again.run()
    assert again.wrong() == []


def test_pages_that_no_source_acknowledges_come_back_with_a_new_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held is capped (here: nothing may be): the agent that late writes go to is destroyed."""
    with world(monkeypatch, {"PDTRANSFER_QUARANTINE_MIB": "0"}) as here:
        prefill, decode = pair(here)
        request = Request(26, prefill, decode, prompt=4)  # type: ignore[arg-type]
        request.begin()
        request.ask()
        request.asked()
        stalled(request, here)
        request.send()
        (one,) = request.receivers
        wait_for(lambda: one.poll() == KVPoll.Transferring, "bytes under way")
        one.abort()
        assert not one.kv_mgr.is_abort_release_safe(26, 0)
        wait_for(lambda: one.kv_mgr.is_abort_release_safe(26, 0), "the old agent's end")
        assert one.kv_mgr.rank.card.generation == 1
        land(request, here)
        assert not any(a.any() for a in decode.pools[0].parts.values()), "a late write landed"  # type: ignore[attr-defined]
        again = Request(27, prefill, decode, prompt=4)  # type: ignore[arg-type]
        again.run()
        assert again.wrong() == []


def test_decodes_abort_ends_prefills_request_at_once(here: World) -> None:
    prefill, decode = pair(here, tp=2, kind="mla")
    request = Request(24, prefill, decode, prompt=2)  # type: ignore[arg-type]
    request.begin()
    for one in request.receivers:
        one.abort()
    wait_for(lambda: all(s.poll() == KVPoll.Failed for s in request.senders), "prefill's end")
    assert "decode gave up" in request.reason(request.senders[0])


def test_prefills_abort_ends_decodes_request_at_once(here: World) -> None:
    prefill, decode = pair(here)
    request = Request(25, prefill, decode, prompt=2)  # type: ignore[arg-type]
    request.begin()
    request.ask()
    request.senders[0].abort()
    wait_for(lambda: request.receivers[0].poll() == KVPoll.Failed, "decode's end")
    assert "Aborted: prefill gave up: Aborted by AbortReq." in request.reason(request.receivers[0])


# --- identity ----------------------------------------------------------------------------------


def test_a_retracted_request_comes_back_with_its_room(here: World) -> None:
    prefill, decode = pair(here, tp=2)
    first = Request(31, prefill, decode, prompt=3)  # type: ignore[arg-type]
    first.run(token=1)
    first.clear()
    second = Request(31, prefill, decode, prompt=4, source=(5, 6, 7, 8), target=(9, 10, 11, 12))  # type: ignore[arg-type]
    second.run(token=2)
    assert second.wrong() == []
    assert decode.pools[0].row(1) == (2, 31)  # type: ignore[attr-defined]
    assert [r.attempt for r in (*first.receivers, *second.receivers)] == [1, 1, 2, 2]


def test_a_room_that_prefill_aborted_can_be_used_again(here: World) -> None:
    prefill, decode = pair(here)
    first = Request(32, prefill, decode, prompt=2)  # type: ignore[arg-type]
    first.begin()
    first.senders[0].abort()
    first.senders[0].clear()
    first.receivers[0].abort()
    first.receivers[0].clear()
    second = Request(32, prefill, decode, prompt=2)  # type: ignore[arg-type]
    second.run()
    assert second.wrong() == []


def test_a_late_word_about_an_earlier_attempt_does_not_end_the_next(here: World) -> None:
    prefill, decode = pair(here)
    (manager,) = prefill.managers  # type: ignore[attr-defined]
    first = Request(33, prefill, decode, prompt=2).begin()  # type: ignore[arg-type]
    first.receivers[0].abort()
    wait_for(lambda: first.senders[0].poll() == KVPoll.Failed, "the first attempt's end")
    first.clear()
    second = Request(33, prefill, decode, prompt=2)  # type: ignore[arg-type]
    second.begin()
    second.ask()
    of = {"source": prefill.incarnation, "destination": decode.incarnation}  # type: ignore[attr-defined]
    manager.hear(encode(GiveUp(room=33, attempt=1, reason="late", **of)))
    second.asked()
    second.send()
    second.finish()
    assert second.wrong() == []


def test_rows_of_another_attempt_are_never_written(here: World) -> None:
    """SGLang's gate compares the room only."""
    prefill, decode = pair(here)
    request = Request(34, prefill, decode, prompt=2)  # type: ignore[arg-type]
    request.begin()
    request.ask()
    request.asked()
    request.receivers[0].attempt += 1
    request.send()
    wait_for(lambda: request.receivers[0].poll() == KVPoll.Failed, "decode's refusal")
    assert "the metadata is of" in request.reason(request.receivers[0])
    assert decode.pools[0].row(1) == (0, 0)  # type: ignore[attr-defined]


def test_prefill_that_came_back_at_once_under_its_address_is_met_anew(here: World) -> None:
    """SGLang keeps ports until two heartbeats were missed; here none was."""
    prefill, decode = pair(here)
    request = Request(35, prefill, decode, prompt=2)  # type: ignore[arg-type]
    request.run()
    request.clear()
    address = prefill.address  # type: ignore[attr-defined]
    prefill.close()  # type: ignore[attr-defined]
    again = here.engine(port=int(address.rsplit(":", 1)[1]))
    assert again.incarnation != prefill.incarnation  # type: ignore[attr-defined]
    (manager,) = decode.managers  # type: ignore[attr-defined]
    assert address in manager.prefill_info_table
    manager.check_heart(address)
    assert address not in manager.prefill_info_table
    second = Request(36, again, decode, prompt=3)  # type: ignore[arg-type]
    second.run()
    assert second.wrong() == []


def test_a_request_to_a_prefill_that_is_gone_fails_by_name_and_the_next_meets_the_new_one(here: World) -> None:
    """Without any heartbeat between: the connection tells."""
    prefill, decode = pair(here)
    Request(37, prefill, decode, prompt=2).run()  # type: ignore[arg-type]
    address = prefill.address  # type: ignore[attr-defined]
    prefill.close()  # type: ignore[attr-defined]
    again = here.engine(port=int(address.rsplit(":", 1)[1]))
    lost = Request(38, again, decode, prompt=2)  # type: ignore[arg-type]
    lost.begin()
    lost.ask()
    wait_for(lambda: lost.receivers[0].poll() == KVPoll.Failed, "the end of a request to nobody")
    assert "Peer" in lost.reason(lost.receivers[0])
    second = Request(39, again, decode, prompt=2)  # type: ignore[arg-type]
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


# --- first contact -----------------------------------------------------------------------------


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
    prefill, decode = here.engine(**other), here.engine(role="decode", port=1)  # type: ignore[arg-type]
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


def test_nobody_at_the_address_is_said_by_name_when_sglang_gives_up(here: World) -> None:
    decode = here.engine(role="decode", port=1)
    (manager,) = decode.managers
    one = PdclusterKVReceiver(manager, "127.0.0.1:9", 53)
    for _ in range(2):
        assert manager.try_ensure_parallel_info("127.0.0.1:9") is False
    wait_for(lambda: manager.meetings.trouble("127.0.0.1:9"), "the first try's end")
    one.abort()  # as SGLang does after 15 tries
    request = Request(53, SimpleNamespace(address=""), decode, prompt=1)  # type: ignore[arg-type]
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
    request = Request(54, SimpleNamespace(address=""), decode, prompt=1)  # type: ignore[arg-type]
    assert "prefill runs another transfer backend" in request.reason(one)
    server.close()


def test_an_introduction_that_was_lost_is_said_again(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's registration is sent once and has no answer."""
    prefill, decode = pair(here)
    (manager,) = prefill.managers  # type: ignore[attr-defined]
    heard, lost = manager.hear, []

    def lose_the_first(frames: list[bytes]) -> None:
        if lost:
            heard(frames)
        else:
            lost.append(frames)

    monkeypatch.setattr(manager, "hear", lose_the_first)
    monkeypatch.setattr("pdtransfer.engines.sglang.introduction.JUDGED_S", 0.2)
    request = Request(56, prefill, decode, prompt=2)  # type: ignore[arg-type]
    request.run()
    assert request.wrong() == []
    assert len(lost) == 1 and b"introduce" in lost[0][1]


def test_stray_traffic_on_the_ranks_port_ends_nothing(here: World) -> None:
    """SGLang's NIXL backend asserts in its bootstrap thread, which is then dead while /health is green."""
    prefill, decode = pair(here)
    (manager,) = prefill.managers  # type: ignore[attr-defined]
    for frames in ([b"GET / HTTP/1.1"], [], [b"NixlMsg", b"None"], [b"pdcluster-1", b"{"], [b"pdcluster-1", b"[1]"]):
        manager.hear(frames)
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(f"tcp://127.0.0.1:{manager.rank_port}")
        push.send_multipart([b"\x00\xff", b"noise"])
    request = Request(55, prefill, decode, prompt=2)  # type: ignore[arg-type]
    request.run()
    assert request.wrong() == []
    assert all(t.is_alive() for t in manager._threads)


def test_a_rank_that_registers_twice_does_not_make_the_others_superfluous(here: World) -> None:
    """SGLang counts registrations, not ranks."""
    prefill = here.engine(tp=2)
    server = prefill.server
    assert server._is_ready() and server._registered_count == 2
    CommonKVManager.register_to_bootstrap(prefill.managers[0])
    assert server._registered_count == 2


# --- bytes -------------------------------------------------------------------------------------


class Later:
    """An event of the engine's stream: the pages get their bytes when it happens."""

    def __init__(self, write: object) -> None:
        self._write, self.happened, self.looked = write, threading.Event(), threading.Event()

    def query(self) -> bool:
        self.looked.set()
        return self.happened.is_set()

    def happen(self) -> None:
        self._write()  # type: ignore[operator]
        self.happened.set()


def test_pages_that_an_earlier_forward_pass_still_writes_are_awaited(here: World) -> None:
    """Early send of a cached prefix under overlap scheduling; SGLang's NIXL backend drops the event."""
    prefill, decode = pair(here)
    request = Request(61, prefill, decode, prompt=4)  # type: ignore[arg-type]
    request.begin()
    request.ask()
    request.asked()
    (one,), (pool,) = request.senders, prefill.pools  # type: ignore[attr-defined]
    event = Later(lambda: pool.fill(61, request.source[:2]))
    pool.set_row(1, 61, 9)
    one._early_send_wait_event = event
    one.send(np.array(request.source[:2], dtype=np.int32), None, 8)
    pool.fill(61, request.source[2:], 2)
    one.send(np.array(request.source[2:], dtype=np.int32), None, 8)
    assert event.looked.wait(30)
    assert not any(a.any() for a in decode.pools[0].parts.values()), "bytes went before they were written"  # type: ignore[attr-defined]
    event.happen()
    request.finish()
    assert request.wrong() == []


def test_metadata_rows_are_there_when_success_is_seen(here: World) -> None:
    prefill, decode = pair(here)
    request = Request(62, prefill, decode, prompt=2)  # type: ignore[arg-type]
    request.begin()
    request.ask()
    request.asked()
    request.send(token=1234)
    (one,), (pool,) = request.receivers, decode.pools  # type: ignore[attr-defined]
    while (state := one.poll()) != KVPoll.Success:
        assert state in (KVPoll.WaitingForInput, KVPoll.Transferring)
        assert pool.row(1) == (0, 0)
    assert pool.row(1) == (1234, 62)


def test_room_0_is_refused_since_sglang_can_not_tell_it_from_an_empty_row(here: World) -> None:
    prefill, decode = pair(here)
    request = Request(0, prefill, decode, prompt=2)  # type: ignore[arg-type]
    request.begin()
    request.ask()
    assert request.receivers[0].poll() == KVPoll.Failed
    assert "bootstrap_room 0" in request.reason(request.receivers[0])


def test_metadata_buffers_of_one_side_only_fail_by_name(here: World) -> None:
    """An option that adds a buffer on one side misaligns the others in SGLang, and the request hangs."""
    prefill, decode = pair(here)
    (manager,) = decode.managers  # type: ignore[attr-defined]
    held = manager.buffers
    manager.buffers = type(held)(held.addresses[:2], held.row_bytes[:2], held.rows)
    request = Request(63, prefill, decode, prompt=2)  # type: ignore[arg-type]
    request.begin()
    request.ask()
    request.asked()
    request.send()
    wait_for(lambda: request.receivers[0].poll() == KVPoll.Failed, "decode's refusal")
    assert "prefill has 3 metadata buffers, decode 2" in request.reason(request.receivers[0])


# --- health ------------------------------------------------------------------------------------


def test_fake_transfers_pair_with_this_manager(here: World) -> None:
    plugin.register()
    assert get_kv_class(TransferBackend.FAKE, KVClassType.SENDER) is FakeKVSender
    assert plugin.kv_class(get_kv_class, TransferBackend.FAKE, KVClassType.SENDER) is FakeKVSender
    prefill, decode = pair(here)
    fake = FakeKVSender(prefill.managers[0], "2.2.2.2:0", 1)  # type: ignore[attr-defined]
    fake.init(1, 0)
    fake.send(np.array([1], dtype=np.int32))
    assert fake.poll() == KVPoll.Success
    other = FakeKVReceiver(decode.managers[0], "2.2.2.2:0", 1)  # type: ignore[attr-defined]
    other.init(0)
    other.send_metadata([1], 0)
    assert other.poll() == KVPoll.Success


def test_a_thread_that_dies_makes_the_manager_unhealthy_and_fails_rooms_with_the_reason(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair(here)
    request = Request(71, prefill, decode, prompt=2)  # type: ignore[arg-type]
    request.begin()
    (manager,) = prefill.managers  # type: ignore[attr-defined]

    def die(frames: object) -> None:
        raise OSError("the socket is gone")

    monkeypatch.setattr(manager, "hear", die)
    assert tell("127.0.0.1", manager.rank_port, [b"anything"])
    wait_for(lambda: manager.problem, "the thread's end")
    assert "pdcluster-control ended: OSError: the socket is gone" in manager.problem
    assert request.senders[0].poll() == KVPoll.Failed
    assert "the socket is gone" in request.reason(request.senders[0])
    assert here.kills, "an engine without an operator ends: its health would stay green"


def test_an_endpoint_that_failed_fails_every_room_and_ends_the_engine(here: World) -> None:
    prefill, decode = pair(here)
    (manager,) = decode.managers  # type: ignore[attr-defined]
    request = Request(72, prefill, decode, prompt=2)  # type: ignore[arg-type]
    request.begin()
    manager.rank.endpoint._core.crash(QuarantineOverflow("too much waits"))
    wait_for(lambda: here.kills, "the engine's end")
    assert manager.rank.must_end
    request.ask()
    assert request.receivers[0].poll() == KVPoll.Failed
    assert "too much waits" in request.reason(request.receivers[0])


def test_what_breaks_inside_a_call_of_the_scheduler_fails_its_room_only(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair(here)
    request = Request(73, prefill, decode, prompt=2)  # type: ignore[arg-type]
    request.begin()
    request.ask()
    request.asked()
    monkeypatch.setattr(prefill.managers[0].buffers.__class__, "read", lambda self, index: 1 / 0)  # type: ignore[attr-defined]
    request.send()
    assert request.senders[0].poll() == KVPoll.Failed
    assert "ZeroDivisionError" in request.reason(request.senders[0])
    wait_for(lambda: request.receivers[0].poll() == KVPoll.Failed, "decode's end")
    assert "ZeroDivisionError" in request.reason(request.receivers[0])
    monkeypatch.undo()


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


# --- host destinations -------------------------------------------------------------------------


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


def test_an_aborted_host_destination_is_held_by_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    with world(monkeypatch, {"PDTRANSFER_EMULATE_VRAM": "1"}) as here:
        prefill, decode = here.engine(), here.engine(role="decode", host=True, port=1)
        request = Request(83, prefill, decode, prompt=3)
        request.begin()
        request.ask(destination=KVTransferDestination.HOST)
        request.asked()
        stalled(request, here)
        request.send()
        (one,) = request.receivers
        wait_for(lambda: one.poll() == KVPoll.Transferring, "bytes under way")
        one.abort()
        assert one.poll() == KVPoll.Failed and not one.is_abort_release_safe()
        land(request, here)
        wait_for(one.is_abort_release_safe, "the acknowledgement")


# --- components --------------------------------------------------------------------------------


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


def test_the_verdicts_name_what_both_sides_found(here: World) -> None:
    prefill, decode = pair(here)
    Request(93, prefill, decode, prompt=1).run()  # type: ignore[arg-type]
    (manager,) = decode.managers  # type: ignore[attr-defined]
    (verdict,) = manager.rank.endpoint.verdicts
    assert verdict.state is VerdictState.WIRED and verdict.checksum_ok
    assert manager.rank.endpoint.inflight == 0
    assert TransferState.SUCCESS == "Success"


# --- memory that SGLang takes away -------------------------------------------------------------


def test_while_sglang_has_taken_its_pools_away_rooms_fail_and_afterwards_they_serve(here: World) -> None:
    """release_memory_occupation and resume_memory_occupation, on both sides."""
    prefill, decode = pair(here)
    Request(94, prefill, decode, prompt=2).run()  # type: ignore[arg-type]
    managers = (*prefill.managers, *decode.managers)  # type: ignore[attr-defined]
    names = [m.rank.card.agent_name for m in managers]
    for m in managers:
        m.deregister_buffer_to_engine()
    assert not set(names) & set(here.hub.agents), "an agent is still there"
    one = PdclusterKVReceiver(decode.managers[0], prefill.address, 95)  # type: ignore[attr-defined]
    one.init(0)
    assert one.poll() == KVPoll.Failed
    one.clear()
    for m in managers:
        m.register_buffer_to_engine()
    again = Request(96, prefill, decode, prompt=3)  # type: ignore[arg-type]
    again.run()
    assert again.wrong() == []
