"""Numbered facts of NIXL itself (NIXL_FACTS.md), forced over real NIXL with bare agents, and what the agent port
makes of them. Peers are processes of their own, so that they can be stopped, killed and restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from nixl_ranks import stop
from nixl_target import Target

from pdtransfer.agent.nixl import ERROR_CLASSES, NixlAgent
from pdtransfer.agent.port import AgentFailure, HandleState
from pdtransfer.contract.base import MemoryKind

pytestmark = pytest.mark.nixl
DRAM = MemoryKind.DRAM
MIB = 1 << 20
ONE = np.zeros(1, dtype=np.int32)


@pytest.fixture(autouse=True)
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("NIXL_LOG_LEVEL", "FATAL")


@pytest.fixture
def targets() -> Iterator[Callable[..., Target]]:
    made: list[Target] = []

    def start(name: str, nbytes: int = MIB) -> Target:
        made.append(Target(name, nbytes))
        return made[-1]

    yield start
    for target in made:
        target.end()


class Initiator:
    """An agent of this process with registered memory."""

    def __init__(self, nbytes: int = MIB) -> None:
        self.agent = NixlAgent(f"initiator-{uuid.uuid4().hex}")
        self.memory = np.zeros(nbytes, dtype=np.uint8)
        self.agent.register(self.rows(0, nbytes), DRAM)

    def rows(self, at: int, size: int) -> np.ndarray:
        return np.array([[self.memory.ctypes.data + at, size, 0]], dtype=np.uint64)

    def lists(self, target: Target, name: str, size: int) -> tuple[Any, Any]:
        return (
            self.agent.prepare(None, self.rows(0, size), DRAM),
            self.agent.prepare(name, target.rows(0, size), DRAM),
        )

    def write(self, lists: tuple[Any, Any], note: bytes = b"") -> Any:
        return self.agent.post("WRITE", lists[0], ONE, lists[1], ONE, note)

    def done(self, handle: Any, timeout: float = 60) -> HandleState:
        end = time.monotonic() + timeout
        state = HandleState.ACTIVE
        while state is HandleState.ACTIVE and time.monotonic() < end:
            state = self.agent.poll(handle)
        return state


@pytest.fixture
def initiator() -> Iterator[Callable[..., Initiator]]:
    made: list[Initiator] = []

    def start(nbytes: int = MIB) -> Initiator:
        made.append(Initiator(nbytes))
        return made[-1]

    yield start
    for one in made:
        one.agent.close()


def test_fact_1_a_released_active_handle_goes_on_writing(targets, initiator):
    """So the mover releases a handle only after DONE, and a page waits for a fence."""
    size = 32 * MIB  # more than the sockets' buffers hold
    target, mine = targets("t", size), initiator(size)
    name = mine.agent.add_peer(target.metadata)
    lists = mine.lists(target, name, size)
    assert mine.done(mine.write(mine.lists(target, name, 8))) is HandleState.DONE
    stop(target.process.pid)
    mine.memory[:] = 7
    handle = mine.write(lists)
    assert mine.agent.poll(handle) is HandleState.ACTIVE  # it is in flight
    mine.agent.release(handle)
    target.signal(signal.SIGCONT)
    end = time.monotonic() + 60
    while (late := target.ask("count", value=7)["count"]) == 0 and time.monotonic() < end:
        mine.agent.progress()
    assert late > 0, "nothing of the released handle landed: fact 1 does not hold any more"


def test_facts_2_and_9_after_a_death_only_remove_and_add_recover_under_the_same_name(targets, initiator):
    old, mine = targets("same-name"), initiator()
    name = mine.agent.add_peer(old.metadata)
    mine.memory[:] = 5
    lists = mine.lists(old, name, MIB)
    assert mine.done(mine.write(lists)) is HandleState.DONE
    old.signal(signal.SIGKILL)
    old.process.wait(30)
    with pytest.raises(AgentFailure) as died:
        for _ in range(100):
            assert mine.done(mine.write(lists)) is HandleState.DONE
    assert died.value.kind == "nixlRemoteDisconnectError" and died.value.posted
    assert mine.agent._agent.check_remote_metadata(name) is True  # it says nothing about the peer's life
    new = targets("same-name")
    with pytest.raises(AgentFailure) as refused:
        mine.agent.add_peer(new.metadata)
    assert refused.value.kind == "nixlNotAllowedError" and not refused.value.posted
    mine.agent.remove_peer(name)
    with pytest.raises(AgentFailure) as stale:
        mine.write(lists)  # prepared for the dead one
    assert stale.value.kind == "nixlNotFoundError" and not stale.value.posted
    assert mine.agent.add_peer(new.metadata) == name
    assert mine.done(mine.write(mine.lists(new, name, MIB))) is HandleState.DONE
    assert new.ask("count", value=5)["count"] == MIB


def test_fact_3_a_stopped_peer_is_no_error_however_long_one_polls(targets, initiator):
    target, mine = targets("t", 32 * MIB), initiator(32 * MIB)
    name = mine.agent.add_peer(target.metadata)
    lists = mine.lists(target, name, 32 * MIB)
    assert mine.done(mine.write(mine.lists(target, name, 8))) is HandleState.DONE
    stop(target.process.pid)
    handle = mine.write(lists)
    # Every timeout UCX has is longer or none; the mover's deadline ends the request instead.
    assert mine.done(handle, 2) is HandleState.ACTIVE
    target.signal(signal.SIGCONT)
    assert mine.done(handle) is HandleState.DONE


def test_fact_4_a_notification_leaves_only_while_its_handle_is_polled(targets, initiator):
    target, mine = targets("t"), initiator()
    name = mine.agent.add_peer(target.metadata)
    assert mine.done(mine.write(mine.lists(target, name, 8))) is HandleState.DONE  # connected
    handle = mine.write(mine.lists(target, name, MIB), b"note")
    time.sleep(0.3)
    for _ in range(50):
        mine.agent.progress()  # of the agent, not of the handle
    assert target.ask("notes")["notes"] == []
    assert mine.done(handle) is HandleState.DONE
    end = time.monotonic() + 60
    while not target.ask("notes")["notes"] and time.monotonic() < end:
        mine.agent.progress()
    assert target.ask("notes")["notes"] == ["note"]


def test_fact_5_our_agent_starts_no_progress_thread_and_costs_nothing_while_idle(monkeypatch, initiator):
    from nixl import _api

    asked: list[dict[str, object]] = []
    real = _api.nixl_agent_config
    monkeypatch.setattr(_api, "nixl_agent_config", lambda **kw: (asked.append(kw), real(**kw))[1])
    initiator()
    assert [kw["enable_prog_thread"] for kw in asked] == [False]
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.5  # NIXL's own thread burns 0.98 of a core


def posted_while_held(target: Target, mine: Initiator, nbytes: int, **then: bool) -> Any:
    """A write that is in flight when the target, which makes no progress meanwhile, does `then` to its memory."""
    name = mine.agent.add_peer(target.metadata)
    lists = mine.lists(target, name, nbytes)
    assert mine.done(mine.write(mine.lists(target, name, 8))) is HandleState.DONE
    mine.memory[:] = 7
    target.ask("hold", **then)
    handle = mine.write(lists)
    assert mine.done(handle, 0.3) is HandleState.ACTIVE
    target.ask("go on")
    return handle


def test_fact_6_a_write_lands_in_memory_that_was_deregistered(targets, initiator):
    """So taking a registration back is no fence; nothing of the module relies on it."""
    size = 32 * MIB
    target, mine = targets("t", size), initiator(size)
    handle = posted_while_held(target, mine, size, deregister=True)
    assert mine.done(handle) is HandleState.DONE
    assert target.ask("count", value=7)["count"] == size


def test_fact_6_a_write_into_memory_that_was_unmapped_kills_the_target(targets, initiator):
    """So memory is given back only after the agent was destroyed."""
    size = 32 * MIB
    target, mine = targets("t", size), initiator(size)
    handle = posted_while_held(target, mine, size, unmap=True)
    with pytest.raises(AgentFailure) as died:
        mine.done(handle)
    assert died.value.kind == "nixlRemoteDisconnectError"
    assert target.process.wait(30) == -signal.SIGSEGV


def test_fact_8_vram_without_a_gpu_is_refused_by_name(initiator):
    if any(n.startswith("nvidia") and n[6:].isdigit() for n in os.listdir("/dev")):  # noqa: PTH208
        return  # with a device the kind is real; the gpu-marked tests move it
    mine = initiator()
    with pytest.raises(AgentFailure) as refused:
        mine.agent.register(mine.rows(0, 4096), MemoryKind.VRAM)
    assert refused.value.kind == "nixlBackendError" and not refused.value.posted


@pytest.mark.parametrize("kind", ERROR_CLASSES)
@pytest.mark.parametrize("call", ["make_prepped_xfer", "transfer", "check_xfer_state", "prep_xfer_dlist"])
def test_fact_9_each_of_the_twelve_error_classes_becomes_a_named_failure(kind, call):
    """NIXL's classes share no base; one that is not caught would end the endpoint's thread."""
    from nixl import _bindings

    agent = NixlAgent.__new__(NixlAgent)
    agent._errors = tuple(getattr(_bindings, c) for c in ERROR_CLASSES)
    handle = object()

    class Raising:
        def __getattr__(self, name: str) -> Callable[..., object]:
            def called(*_: object) -> object:
                if name == call:
                    raise getattr(_bindings, kind)("injected")
                return handle

            return called

    agent._agent = Raising()
    with pytest.raises(AgentFailure) as caught:
        if call == "prep_xfer_dlist":
            agent.prepare(None, np.zeros((1, 3), dtype=np.uint64), DRAM)
        elif call == "check_xfer_state":
            agent.poll(handle)
        else:
            agent.post("WRITE", handle, ONE, handle, ONE)
    assert caught.value.kind == kind and "injected" in str(caught.value)
    # Only what was handed to the backend can land late: checks before a post posted nothing, but a handle that
    # is polled was posted, whatever its error says.
    before_the_backend = kind in (
        "nixlInvalidParamError",
        "nixlMismatchError",
        "nixlNotAllowedError",
        "nixlNotFoundError",
        "nixlNotSupportedError",
    )
    assert caught.value.posted is (call == "check_xfer_state" or (call == "transfer" and not before_the_backend))


def test_fact_10_metadata_grows_with_regions_and_a_peer_is_connected_before_its_first_transfer(initiator, targets):
    small = initiator()
    many = NixlAgent(f"many-{uuid.uuid4().hex}")
    memory = np.zeros(1024 * 4096, dtype=np.uint8)
    rows = np.array([[memory.ctypes.data + i * 4096, 4096, 0] for i in range(1024)], dtype=np.uint64)
    many.register(rows, DRAM)
    assert len(small.agent.metadata()) < 1024 < 40_000 < len(many.metadata()) < 64_000
    many.close()
    target = targets("t")
    name = small.agent.add_peer(target.metadata)
    small.agent.connect(name)  # what the endpoint does when it wires a peer
    assert small.done(small.write(small.lists(target, name, 8))) is HandleState.DONE


def test_fact_11_preparing_a_list_lets_other_threads_run(initiator):
    """The endpoint's thread must not stop the engine's: the long calls release the interpreter lock."""
    mine = initiator()
    table = np.repeat(mine.rows(0, 64), 400_000, axis=0)
    turns = [0]
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)

    before = sys.getswitchinterval()
    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    sys.setswitchinterval(60)  # no thread takes the lock: it has to be given
    try:
        seen, end = 0, time.monotonic() + 60
        while time.monotonic() < end:  # on a busy machine the other thread gets no core in some of the calls
            at = turns[0]
            prepared = mine.agent.prepare(None, table, DRAM)
            seen += turns[0] - at
            mine.agent.release_prepared(prepared)
            if seen:
                break
    finally:
        sys.setswitchinterval(before)
        stop.set()
        thread.join(5)
    assert seen > 0, "the interpreter lock was held all the time"


def merged(count: int, *, local: int, remote: int) -> int:
    """Descriptors that one WRITE of `count` pieces of 256 bytes became, by NIXL's telemetry."""
    from nixl import _api

    agents = []
    for _ in range(2):
        config = _api.nixl_agent_config(enable_prog_thread=False, backends=[], capture_telemetry=True)
        agents.append(_api.nixl_agent(uuid.uuid4().hex, config))
        agents[-1].create_backend("UCX", {})
    memories = [np.zeros(MIB, dtype=np.uint8) for _ in agents]
    for agent, memory in zip(agents, memories, strict=True):
        agent.register_memory(np.array([[memory.ctypes.data, MIB, 0]], dtype=np.uint64), "DRAM")
    a, b = agents
    peer = a.add_remote_agent(b.get_agent_metadata())
    lists = [
        a.prep_xfer_dlist(owner, np.array([[m.ctypes.data, 256, 0, stride, count]], dtype=np.uint64), "DRAM")
        for owner, m, stride in (("NIXL_INIT_AGENT", memories[0], local), (peer, memories[1], remote))
    ]
    order = np.arange(count, dtype=np.int32)
    handle = a.make_prepped_xfer("WRITE", lists[0], order, lists[1], order, b"")
    state, end = a.transfer(handle), time.monotonic() + 60
    while state == "PROC":
        assert time.monotonic() < end
        state = a.check_xfer_state(handle)
        b.get_new_notifs()
    found = int(a.get_xfer_telemetry(handle).descCount)
    a.release_xfer_handle(handle)
    return found


@pytest.mark.parametrize(("local", "remote", "expected"), [(256, 256, 1), (256, 512, 64), (512, 256, 64)])
def test_fact_12_runs_merge_only_when_both_sides_are_dense(local, remote, expected):
    assert merged(64, local=local, remote=remote) == expected


ORDER = """
import sys, os
os.environ.pop("UCX_NET_DEVICES", None)
from nixl import _api
from pdtransfer.agent.nixl import NixlAgent
from pdtransfer.agent.port import AgentFailure
try:
    agent = NixlAgent("a", net_devices=sys.argv[1])
    print("made", agent.devices)
except AgentFailure as error:
    print("refused", error)
"""


@pytest.mark.parametrize(("device", "said"), [("lo", "made lo"), ("nosuch0", "refused")])
def test_fact_16_net_devices_hold_when_set_after_the_import_and_a_wrong_one_is_named(device, said):
    ran = subprocess.run(
        [sys.executable, "-c", ORDER, device], capture_output=True, text=True, timeout=60, env={**os.environ}
    )
    (line,) = [text for text in ran.stdout.splitlines() if text.startswith(("made", "refused"))]
    assert line.startswith(said), ran
    if said == "refused":
        assert "nixlBackendError" in line and "UCX_NET_DEVICES=nosuch0" in line and "UCX_TLS=tcp" in line
