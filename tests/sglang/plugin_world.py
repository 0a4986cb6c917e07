"""SGLang's engines reduced to what a transfer backend sees: pools of known bytes in KVArgs, one manager a rank, and
the calls of SGLang's schedulers. Everything runs in one process over pdtransfer's fake agent, so that what the CPU can
not run as a model (MLA, DSA, pipelines, host pools) still goes through SGLang's classes and ours.

SGLang keeps an engine's parallelism in one global; here each manager is made under its own (`Runtime.now`).
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.utils import DisaggregationMode

from free_ports import free_port
from pdtransfer.agent.fake import FakeHub
from pdtransfer.engines.sglang import decode, identity, manager, prefill, sender
from pdtransfer.engines.sglang.bootstrap import PdclusterKVBootstrapServer
from tests.sglang.plugin_pools import RankPool, Shape

DEADLINE_S = 90.0
"""Only a machine that stands still comes near it."""


class Store(dict[Any, Any]):
    """PPConsensusStore without its sockets: the stages of one engine share `peers`."""

    def __init__(self, size: int, rank: int, group: list[Store]) -> None:
        super().__init__()
        self.group = group
        group.append(self)

    def collect(self, key: Any) -> list[Any]:
        return [store.get(key) for store in self.group]


class Runtime:
    """Stands in for SGLang's process-wide context."""

    now = SimpleNamespace()

    @classmethod
    def of(
        cls, shape: Shape, place: tuple[int, int, int, int], port: int, group: Any, stages: list[Store]
    ) -> SimpleNamespace:
        """`place` is the rank's dp, pp, cp and tp."""
        dp, _, cp, tp = place
        groups, replicas = (1, shape.dp) if shape.copies else (shape.dp, 1)
        parallel = SimpleNamespace(
            tp_size=shape.tp * groups * shape.cp, attn_tp_size=shape.tp, attn_tp_rank=tp,
            attn_cp_size=shape.cp, attn_cp_rank=cp, attn_dcp_size=1, attn_dcp_rank=0,
            attn_dp_size=groups, attn_dp_rank=0 if shape.copies else dp, dp_size=replicas, pp_size=shape.pp,
            enable_kv_cache_sharding=False, enable_dsa_cache_layer_split=False, enable_cp_tp_group_sharing=False,
            dist_init_addr=None, nnodes=1, load_balance_method="follow_bootstrap_room", num_dp_ranks=shape.dp,
            pp_group=stages, world_group=group,
        )  # fmt: skip
        disagg = SimpleNamespace(
            disaggregation_bootstrap_port=port, disaggregation_decode_allocation_policy="early",
            disaggregation_transfer_backend="pdcluster",
        )  # fmt: skip
        return SimpleNamespace(
            parallel=parallel,
            disagg=disagg,
            serving=SimpleNamespace(host="127.0.0.1", port=shape.port),
            device=SimpleNamespace(device="cpu", gpu_id=0),
            spec=SimpleNamespace(speculative_algorithm="EAGLE" if shape.drafts else None),
            observability=SimpleNamespace(enable_trace=False),
            schedule=SimpleNamespace(max_prefill_tokens=4096),
        )


@dataclass
class Engine:
    """An engine's ranks: managers over pools."""

    shape: Shape
    pools: list[RankPool]
    managers: list[Any]
    address: str = ""
    server: Any = None
    incarnation: str = ""

    def close(self) -> None:
        for one in self.managers:
            one.teardown()
        if self.server is not None:
            self.server.close()

    def senders(self, room: int) -> list[Any]:
        return [sender.PdclusterKVSender(m, self.address, room) for m in self.managers]


class World:
    """Makes engines. One a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_env: dict[str, str] | None = None) -> None:
        self.hub = FakeHub()
        self.engines: list[Engine] = []
        self._starts = itertools.count(1)
        self.patch = monkeypatch
        for name in ("parallel", "disagg", "serving", "device", "spec", "observability", "schedule"):
            for module in (conn, manager, prefill):
                if hasattr(module, f"get_{name}"):
                    monkeypatch.setattr(module, f"get_{name}", lambda name=name: getattr(Runtime.now, name))
        monkeypatch.setattr(conn, "linear_attn_tp_size", lambda: Runtime.now.parallel.attn_tp_size)
        monkeypatch.setattr(conn, "PPConsensusStore", Store)
        monkeypatch.setattr(conn, "get_dsv41_spec_layout", lambda args: None)
        hub = self.hub
        monkeypatch.setattr(
            manager.PdclusterKVManager, "agent_factory", staticmethod(lambda name, config: hub.agent(name))
        )
        monkeypatch.setattr(identity, "read_model", self._model)
        monkeypatch.setattr(manager.os, "kill", self._killed)
        for module in (decode, prefill):
            monkeypatch.setattr(module, "POLL_MS", 20)  # how long a thread takes to see that it is over
        self.kills: list[tuple[int, int]] = []
        for key, value in {
            "SGLANG_HOST_IP": "127.0.0.1",
            "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "inf",
            "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "3600",
            **(tmp_env or {}),
        }.items():
            monkeypatch.setenv(key, value)

    def _killed(self, pid: int, number: int) -> None:
        self.kills.append((pid, number))

    def _model(self, server_args: Any, latent: bool) -> identity.ModelFacts:
        shape: Shape = server_args.shape
        return identity.ModelFacts(shape.model, "r1", shape.dtype, shape.layers, None if latent else shape.heads)

    def engine(self, port: int | None = None, **what: Any) -> Engine:
        """A started engine of this shape; a prefill engine with its bootstrap server (on `port`, if it is given)."""
        shape = Shape(**what)
        incarnation = f"start-{next(self._starts)}"
        group = SimpleNamespace(broadcast_object=lambda value, src: incarnation)
        self.patch.setattr(identity, "new_incarnation", lambda: incarnation)
        port = port or free_port()
        server = None
        if shape.role == "prefill":
            server = PdclusterKVBootstrapServer("127.0.0.1", port)
            wait_for(lambda: listens(port), "the bootstrap server")
        engine = Engine(shape, [], [], f"127.0.0.1:{port}", server, incarnation)
        self.engines.append(engine)
        stages: list[Store] = []
        for place in itertools.product(*map(range, (shape.dp, shape.pp, shape.cp, shape.tp))):
            pool = RankPool(shape, place[3], place[1])
            Runtime.now = Runtime.of(shape, place, port, group, stages)
            mode = DisaggregationMode.PREFILL if shape.role == "prefill" else DisaggregationMode.DECODE
            args = SimpleNamespace(shape=shape, enable_pd_role_switch=False, model_path="tiny")
            engine.pools.append(pool)
            held = pool.args()
            held.system_dp_rank = place[0] if shape.copies else None
            engine.managers.append(manager.PdclusterKVManager(held, mode, args, shape.kind == "mla"))
        return engine

    def close(self) -> None:
        for engine in self.engines:
            for one in engine.managers:
                one._stop.set()  # all at once: their threads end beside each other
        for engine in self.engines:
            engine.close()


def listens(port: int) -> bool:
    """Somebody accepts connections there."""
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def wait_for(what: Callable[[], Any], name: str, seconds: float = DEADLINE_S) -> Any:
    """Until it is true; its value."""
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, f"{name}: not within {seconds} s"
        time.sleep(0.002)
    return found


@contextmanager
def world(monkeypatch: pytest.MonkeyPatch, env: dict[str, str] | None = None) -> Iterator[World]:
    """A world, closed at the end."""
    made = World(monkeypatch, env)
    try:
        yield made
    finally:
        made.close()


def pair(here: World, **what: Any) -> tuple[Engine, Engine]:
    """Prefill and decode of one shape."""
    return here.engine(**what), here.engine(role="decode", port=1, **what)


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
