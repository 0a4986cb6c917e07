"""Pages of a request that was aborted: SGLang's timer and counts do not free them, the ledger does."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.decode import DecodeTransferQueue
from sglang.srt.environ import envs

from pdtransfer.engines.sglang import plugin
from tests.sglang.plugin_request import Request, land, stuck
from tests.sglang.plugin_world import World, pair, wait_for, world


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
        request = SimpleNamespace(req=SimpleNamespace(bootstrap_room=receiver.bootstrap_room), kv_receiver=receiver)
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
        DecodeTransferQueue.resolve_deferred_releases(self)
        return self.released


@pytest.mark.parametrize("required", [0, 1])
def test_pages_stay_held_while_a_write_may_land_whatever_sglang_counts(
    here: World, monkeypatch: pytest.MonkeyPatch, required: int
) -> None:
    """decode.py:3064 and `required_acks=0`: acknowledgements are not counted, the ledger is asked."""
    prefill, decode = pair(here)
    request = stuck(Request(21, prefill, decode, prompt=4), here)
    (one,) = request.receivers
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
    request = stuck(Request(22, prefill, decode, prompt=4), here)
    (one,) = request.receivers
    before = [a.copy() for a in decode.pools[0].parts.values()]
    one.abort()
    assert not one.releasable
    land(request, here)
    wait_for(lambda: one.releasable, "the acknowledgement")
    after = list(decode.pools[0].parts.values())
    assert any((a != b).any() for a, b in zip(before, after, strict=True)), "the late write did land"
    # And the pages serve the next request.
    again = Request(23, prefill, decode, prompt=4)
    again.run()
    assert again.wrong() == []


def test_pages_that_no_source_acknowledges_come_back_with_a_new_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held is capped (here: nothing may be): the agent that late writes go to is destroyed."""
    with world(monkeypatch, {"PDTRANSFER_QUARANTINE_MIB": "0"}) as here:
        prefill, decode = pair(here)
        request = stuck(Request(26, prefill, decode, prompt=4), here)
        (one,) = request.receivers
        one.abort()
        assert not one.kv_mgr.is_abort_release_safe(26, 0)
        wait_for(lambda: one.kv_mgr.is_abort_release_safe(26, 0), "the old agent's end")
        assert one.kv_mgr.rank.card.generation == 1
        land(request, here)
        assert not any(a.any() for a in decode.pools[0].parts.values()), "a late write landed"
        again = Request(27, prefill, decode, prompt=4)
        again.run()
        assert again.wrong() == []


def test_an_aborted_host_destination_is_held_by_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    with world(monkeypatch, {"PDTRANSFER_EMULATE_VRAM": "1"}) as here:
        prefill, decode = here.engine(), here.engine(role="decode", host=True, port=1)
        request = stuck(Request(83, prefill, decode, prompt=3), here, destination=KVTransferDestination.HOST)
        (one,) = request.receivers
        one.abort()
        assert one.poll() == KVPoll.Failed and not one.is_abort_release_safe()
        land(request, here)
        wait_for(one.is_abort_release_safe, "the acknowledgement")


def test_decodes_abort_ends_prefills_request_at_once(here: World) -> None:
    prefill, decode = pair(here, tp=2, kind="mla")
    request = Request(24, prefill, decode, prompt=2)
    request.begin()
    for one in request.receivers:
        one.abort()
    wait_for(lambda: all(s.poll() == KVPoll.Failed for s in request.senders), "prefill's end")
    assert "decode gave up" in request.reason(request.senders[0])


def test_prefills_abort_ends_decodes_request_at_once(here: World) -> None:
    prefill, decode = pair(here)
    request = Request(25, prefill, decode, prompt=2)
    request.begin()
    request.ask()
    request.senders[0].abort()
    wait_for(lambda: request.receivers[0].poll() == KVPoll.Failed, "decode's end")
    assert "Aborted: prefill gave up: Aborted by AbortReq." in request.reason(request.receivers[0])
