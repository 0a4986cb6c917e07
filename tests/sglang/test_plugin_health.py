"""A rank that can not serve any more is seen by who has to act: an operator by its card, SGLang by its rooms."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll

from pdtransfer.engines.sglang import manager as managers
from pdtransfer.engines.sglang import rank as ranks
from pdtransfer.engines.sglang.receiver import tell
from tests.sglang.plugin_world import RankPool, Request, World, wait_for, world
from tests.sglang.test_plugin_rosters import Sidecar, shown


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(monkeypatch) as made:
        yield made


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[World, Sidecar]]:
    """Under an operator; looks at the endpoint's thread come quickly."""
    monkeypatch.setattr(managers, "WATCH_S", 0.01)
    sidecar = Sidecar(tmp_path / "sidecar.sock")
    with world(monkeypatch, {"PDTRANSFER_SOCKET": str(tmp_path / "sidecar.sock")}) as made:
        yield made, sidecar
    sidecar.close()


def dies(*_: object) -> None:
    raise SystemExit("the thread is gone")


def withdrawn(manager: Any) -> str:
    """What the link says once the card is withdrawn."""
    wait_for(lambda: "its card is withdrawn" in manager.rank._link.error, "the link's word")
    return str(manager.rank._link.error)


def hang(here: World, manager: Any) -> threading.Event:
    """The endpoint's thread waits in a call of its agent until the event."""
    goes_on, hangs = threading.Event(), threading.Event()

    def progress() -> list[tuple[str, bytes]]:
        hangs.set()
        goes_on.wait()
        return []

    here.hub.agents[manager.rank.card.agent_name].progress = progress  # type: ignore[method-assign]
    assert hangs.wait(60)
    return goes_on


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
