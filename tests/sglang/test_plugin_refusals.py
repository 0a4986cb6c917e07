"""What this backend does not do is said by name: settings end the start, requests fail their room. And whatever of ours
breaks in a call of SGLang's scheduler fails the room as well: nothing is raised there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.environ import envs

from pdtransfer.engines.sglang.manager import PdclusterKVManager
from pdtransfer.engines.sglang.receiver import PdclusterKVReceiver
from tests.sglang.plugin_request import Request
from tests.sglang.plugin_world import Engine, World, pair, wait_for, world

OVER = (KVPoll.Success, KVPoll.Failed)


@pytest.mark.parametrize(
    ("held", "told"),
    [
        ({"dcp_size": 2}, "decode context parallelism .* use mooncake"),
        ({"attn_cp_size": 2, "enable_all_cp_ranks_for_transfer": True}, "one sending rank; unset .* or use mooncake"),
    ],
    ids=["decode context parallel", "all context parallel ranks send"],
)
def test_parallelism_that_is_not_supported_ends_the_start(here: World, held: dict[str, Any], told: str) -> None:
    (manager,) = here.engine(role="decode", port=1).managers
    manager.deregister_buffer_to_engine()
    for name, value in held.items():
        setattr(manager, name, value)
    with pytest.raises(RuntimeError, match=told):
        manager.register_buffer_to_engine()


def test_metadata_rows_in_device_memory_end_the_start(here: World) -> None:
    with (
        envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.override("INTRA_NODE_NVLINK"),
        pytest.raises(RuntimeError, match="metadata rows into device"),
    ):
        here.engine(role="decode", port=1)


def test_decode_does_not_start_where_pages_are_given_away_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        world(monkeypatch, {"SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE": "0"}) as here,
        pytest.raises(RuntimeError, match="KV_RELEASE is off"),
    ):
        here.engine(role="decode", port=1)


def test_roles_are_not_switched_at_run_time() -> None:
    """SGLang asks the manager before it does."""
    assert PdclusterKVManager.supports_role_switch is False


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"device_kv_indices": np.array([1], dtype=np.int32)}, "HiSparse with device pages of their own"),
        ({"decode_prefix_len": 3}, "a prefix of 3 tokens does not end where a page of 4 ends"),
        ({"aux_index": None}, "no metadata row"),
    ],
)
def test_a_request_that_can_not_be_served_fails_by_name(here: World, how: dict[str, Any], told: str) -> None:
    prefill, decode = pair(here)
    request = Request(301, prefill, decode, prompt=2).begin()
    (one,) = request.receivers
    one.send_metadata(np.array([1, 2], dtype=np.int32), **{"aux_index": 1, **how})
    assert one.poll() == KVPoll.Failed
    assert told in request.reason(one)
    wait_for(lambda: request.senders[0].poll() == KVPoll.Failed, "prefill's end")
    assert told in request.reason(request.senders[0])


# --- what breaks in a call of the scheduler ------------------------------------------------------


def broken(*_: Any, **__: Any) -> Any:
    raise LookupError("this is broken")


def drive(prefill: Engine, decode: Engine, room: int) -> dict[str, str]:
    """One request by all calls that SGLang's schedulers make, whatever comes of each; why each side failed."""
    request = Request(room, prefill, decode, prompt=2)
    (sender,), (receiver,) = prefill.senders(room), [PdclusterKVReceiver(decode.managers[0], prefill.address, room)]
    await_either(lambda: decode.managers[0].try_ensure_parallel_info(prefill.address), receiver)
    receiver.init(0)
    receiver.send_metadata(np.array(request.target, dtype=np.int32), request.row, None, decode_prefix_len=0)
    await_either(lambda: sender.poll() == KVPoll.WaitingForInput, sender)
    if sender.poll() == KVPoll.WaitingForInput:
        sender.pop_decode_prefix_len()
        sender.init(2, request.row)
        prefill.pools[0].fill(room, request.source)
        prefill.pools[0].set_row(request.row, room, 1)
        sender.send(np.array(request.source, dtype=np.int32), None, 8)
    ends = {"prefill": sender, "decode": receiver}
    wait_for(
        lambda: any(e.poll() == KVPoll.Failed for e in ends.values()) or all(e.poll() in OVER for e in ends.values()),
        "an end",
    )
    found = {}
    for name, end in ends.items():
        if end.poll() not in OVER:
            end.abort()  # its client left
        if end.poll() == KVPoll.Failed:
            with pytest.raises(conn.KVTransferError) as caught:
                end.failure_exception()
            found[name] = str(caught.value)
        end.clear()
    wait_for(lambda: decode.managers[0].is_abort_release_safe(room, 0), "the pages")
    decode.managers[0].clear_deferred_abort_state(room)
    return found


def await_either(done: Callable[[], bool], end: Any) -> None:
    wait_for(lambda: done() or end.poll() in OVER, "an outcome")


@pytest.mark.parametrize("call", ["expect", "asked", "send", "receive"])
def test_an_endpoint_whose_calls_break_fails_rooms_and_raises_nothing(
    here: World, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    prefill, decode = pair(here)
    side = decode if call == "receive" else prefill
    with monkeypatch.context() as patch:
        patch.setattr(side.managers[0].rank.endpoint, call, broken)
        told = drive(prefill, decode, 311)
    assert set(told) == {"prefill", "decode"}
    assert "this is broken" in told["decode" if call == "receive" else "prefill"]
    assert drive(prefill, decode, 312) == {}


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_metadata_rows_that_can_not_be_used_fail_rooms_and_raise_nothing(
    here: World, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    prefill, decode = pair(here)
    with monkeypatch.context() as patch:
        patch.setattr(type(prefill.managers[0].buffers), "read" if side == "prefill" else "write", broken)
        told = drive(prefill, decode, 321)
    assert "this is broken" in told[side]
    assert drive(prefill, decode, 322) == {}
