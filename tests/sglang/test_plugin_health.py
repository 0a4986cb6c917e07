"""A rank that can not serve any more is seen by who has to act: an operator by its card, SGLang by its rooms. One that
can is not taken for such: fake transfers, memory that SGLang takes away."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.fake.conn import FakeKVReceiver, FakeKVSender
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

from pdtransfer.engines.sglang import manager as managers
from pdtransfer.engines.sglang import plugin
from pdtransfer.engines.sglang import rank as ranks
from pdtransfer.engines.sglang.receiver import PdclusterKVReceiver, tell
from pdtransfer.errors import QuarantineOverflow
from tests.sglang.plugin_pools import RankPool
from tests.sglang.plugin_request import Request
from tests.sglang.plugin_sidecar import Sidecar, shown
from tests.sglang.plugin_world import World, hang, pair, wait_for, world


@pytest.fixture
def site(site: tuple[World, Sidecar], monkeypatch: pytest.MonkeyPatch) -> tuple[World, Sidecar]:
    """Looks at the endpoint's thread come quickly."""
    monkeypatch.setattr(managers, "WATCH_S", 0.01)
    return site


def dies(*_: object) -> None:
    raise SystemExit("the thread is gone")


def withdrawn(manager: Any) -> str:
    """What the link says once the card is withdrawn."""
    wait_for(lambda: "its card is withdrawn" in manager.rank._link.error, "the link's word")
    return str(manager.rank._link.error)


def test_prefills_card_goes_when_the_thread_that_hears_decode_dies(
    site: tuple[World, Sidecar], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, sidecar = site
    (manager,) = here.engine().managers
    shown(sidecar, 1)
    monkeypatch.setattr(manager, "hear", dies)
    assert tell("127.0.0.1", manager.rank_port, [b"anything"])
    assert "pdcluster-control ended: SystemExit: the thread is gone" in withdrawn(manager)
    assert "pdcluster-control ended" in manager.problem
    assert here.kills == []  # the operator acts


def test_decodes_card_goes_when_its_heartbeat_dies(
    site: tuple[World, Sidecar], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, sidecar = site
    (manager,) = here.engine(role="decode", port=1).managers
    shown(sidecar, 1)
    monkeypatch.setattr(manager, "check_heart", dies)
    manager.prefill_info_table["127.0.0.1:9"] = None
    manager.heartbeat_interval = 0.01
    manager._start_heartbeat_checker_thread()
    assert "pdcluster-heartbeat ended: SystemExit: the thread is gone" in withdrawn(manager)


def test_a_thread_that_died_is_not_forgotten_with_the_pools(here: World) -> None:
    """SGLang takes its pools away and gives them back: the thread is not there again by that."""
    (manager,) = here.engine(role="decode", port=1).managers
    manager.deregister_buffer_to_engine()
    manager.broken("thread x ended")
    manager.register_buffer_to_engine()
    assert "thread x ended" in manager.problem
    wait_for(lambda: here.kills, "the engine's end")


def test_an_endpoint_thread_that_hangs_is_found_and_the_card_goes(
    site: tuple[World, Sidecar], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, sidecar = site
    (manager,) = here.engine(role="decode", port=1).managers
    shown(sidecar, 1)
    assert manager.problem == ""
    goes_on = hang(here, manager)
    try:
        monkeypatch.setattr(ranks, "HUNG_S", 0.1)
        assert "the endpoint's thread hangs" in withdrawn(manager)
        assert "the endpoint's thread hangs" in manager.problem
        assert not manager.rank.must_end and here.kills == []
    finally:
        goes_on.set()


def test_without_an_operator_an_engine_whose_endpoint_hangs_ends(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managers, "WATCH_S", 0.01)
    prefill, decode = here.engine(), here.engine(role="decode", port=1)
    request = Request(1, prefill, decode, prompt=2)
    request.begin()
    request.ask()
    (receiver,), (manager,) = request.receivers, decode.managers
    goes_on = hang(here, manager)
    try:
        monkeypatch.setattr(ranks, "HUNG_S", 0.1)
        wait_for(lambda: here.kills, "the engine's end")
        assert receiver.poll() == KVPoll.Failed and "the endpoint's thread hangs" in request.reason(receiver)
        receiver.abort()
        assert not receiver.releasable, "the call that hangs may still write"
        assert not manager.is_abort_release_safe(1, 0)
    finally:
        goes_on.set()


def test_one_late_look_is_no_hang(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a stop of the whole process every thread is late, and the one that watches may come first."""
    (manager,) = here.engine(role="decode", port=1).managers
    ages = iter([100.0, 100.0, 0.0, 100.0, 100.0, 100.0])
    monkeypatch.setattr(type(manager.rank.endpoint), "age", property(lambda _: next(ages)))
    found = [manager.rank.hung() for _ in range(6)]
    assert found[:5] == [""] * 5
    assert found[5] == "the endpoint's thread hangs: no turn for 100 s"


@pytest.mark.parametrize(("env", "gpu"), [({}, 3), ({"PDTRANSFER_EMULATE_VRAM": "1"}, 0)], ids=["real", "emulated"])
def test_the_rank_registers_on_the_gpu_that_sglang_gave_it(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], gpu: int
) -> None:
    seen: list[int] = []
    plain, pools = RankPool.args, managers.pool_regions

    def on_gpu_3(pool: RankPool) -> Any:
        made = plain(pool)
        made.gpu_id = 3
        return made

    def regions(args: Any, stage: Any, kinds: Any, gpu: int = 0) -> Any:
        seen.append(gpu)
        return pools(args, stage, kinds, gpu)

    monkeypatch.setattr(RankPool, "args", on_gpu_3)
    monkeypatch.setattr(managers, "pool_regions", regions)
    with world(monkeypatch, env) as here:
        here.engine(role="decode", port=1)
    assert seen == [gpu]


def test_fake_transfers_pair_with_this_manager(here: World) -> None:
    plugin.register()
    assert get_kv_class(TransferBackend.FAKE, KVClassType.SENDER) is FakeKVSender
    assert plugin.kv_class(get_kv_class, TransferBackend.FAKE, KVClassType.SENDER) is FakeKVSender
    prefill, decode = pair(here)
    fake = FakeKVSender(prefill.managers[0], "2.2.2.2:0", 1)
    fake.init(1, 0)
    fake.send(np.array([1], dtype=np.int32))
    assert fake.poll() == KVPoll.Success
    other = FakeKVReceiver(decode.managers[0], "2.2.2.2:0", 1)
    other.init(0)
    other.send_metadata([1], 0)
    assert other.poll() == KVPoll.Success


def test_a_thread_that_dies_makes_the_manager_unhealthy_and_fails_rooms_with_the_reason(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair(here)
    request = Request(71, prefill, decode, prompt=2)
    request.begin()
    (manager,) = prefill.managers

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
    (manager,) = decode.managers
    request = Request(72, prefill, decode, prompt=2)
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
    request = Request(73, prefill, decode, prompt=2)
    request.begin()
    request.ask()
    request.asked()
    monkeypatch.setattr(prefill.managers[0].buffers.__class__, "read", lambda self, index: 1 / 0)
    request.send()
    assert request.senders[0].poll() == KVPoll.Failed
    assert "ZeroDivisionError" in request.reason(request.senders[0])
    wait_for(lambda: request.receivers[0].poll() == KVPoll.Failed, "decode's end")
    assert "ZeroDivisionError" in request.reason(request.receivers[0])
    monkeypatch.undo()


def test_while_sglang_has_taken_its_pools_away_rooms_fail_and_afterwards_they_serve(here: World) -> None:
    """release_memory_occupation and resume_memory_occupation, on both sides."""
    prefill, decode = pair(here)
    Request(94, prefill, decode, prompt=2).run()
    managers = (*prefill.managers, *decode.managers)
    names = [m.rank.card.agent_name for m in managers]
    for m in managers:
        m.deregister_buffer_to_engine()
    assert not set(names) & set(here.hub.agents), "an agent is still there"
    one = PdclusterKVReceiver(decode.managers[0], prefill.address, 95)
    one.init(0)
    assert one.poll() == KVPoll.Failed
    one.clear()
    for m in managers:
        m.register_buffer_to_engine()
    again = Request(96, prefill, decode, prompt=3)
    again.run()
    assert again.wrong() == []
