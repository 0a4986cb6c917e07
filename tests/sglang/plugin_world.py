"""SGLang's engines reduced to what a transfer backend sees: pools of known bytes in KVArgs, one manager a rank, and
the calls of SGLang's schedulers. Everything runs in one process over pdtransfer's fake agent, so that what the CPU can
not run as a model (MLA, DSA, pipelines, host pools) still goes through SGLang's classes and ours.

SGLang keeps an engine's parallelism in one global; here each manager is made under its own (`Runtime.now`).
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.utils import DisaggregationMode

from pdtransfer.agent.fake import FakeHub
from pdtransfer.engines.sglang import identity, manager, prefill, receiver, sender
from pdtransfer.engines.sglang.bootstrap import PdclusterKVBootstrapServer

DEADLINE_S = 90.0
"""Only a machine that stands still comes near it."""
PAGE = 4
AUX = (16, 32, 64)
"""Bytes a row of the metadata buffers; the last holds the room first, as SGLang's does."""
ROWS = 8
Array = npt.NDArray[np.uint16]


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Store(dict[Any, Any]):
    """PPConsensusStore without its sockets: the stages of one engine share `peers`."""

    def __init__(self, size: int, rank: int, group: list[Store]) -> None:
        super().__init__()
        self.group = group
        group.append(self)

    def collect(self, key: Any) -> list[Any]:
        return [store.get(key) for store in self.group]


@dataclass
class Shape:
    """One engine. `kind`: mha or mla. `host`: it has host pools as well (decode). `window`, `index`, `state`: it has
    such a component. `drafts` draft layers."""

    role: str = "prefill"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    layers: int = 4
    heads: int = 4
    dim: int = 8
    kind: str = "mha"
    pages: int = 16
    drafts: int = 0
    index: bool = False
    state: bool = False
    host: bool = False
    dtype: str = "bfloat16"
    page_size: int = PAGE
    model: str = "Tiny"
    port: int = 30000
    radix: bool = False


def truth(room: int, page: int, layer: int, part: str, shape: Shape) -> Array:
    """Bytes of one prompt page over all heads, (tokens, heads or 1, dim), from a seeded generator."""
    rng = np.random.default_rng([room, page, layer, sum(part.encode())])
    heads = shape.heads if shape.kind == "mha" and part in ("K", "V", "dK", "dV") else 1
    return rng.integers(1, 65535, (shape.page_size, heads, shape.dim), dtype=np.uint16)


@dataclass
class RankPool:
    """One rank's buffers. `parts` maps (name, layer) to (pages, tokens, heads of the rank, dim)."""

    shape: Shape
    tp: int
    pp: int
    parts: dict[tuple[str, int], Array] = field(default_factory=dict)
    host: dict[tuple[str, int], Array] = field(default_factory=dict)
    slots: dict[tuple[str, int], Array] = field(default_factory=dict)
    aux: list[npt.NDArray[np.uint8]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = self.shape
        self.stage = range(self.pp * shape.layers // shape.pp, (self.pp + 1) * shape.layers // shape.pp)
        names = ("K", "V") if shape.kind == "mha" else ("L",)
        for name, layer in itertools.product(names, self.stage):
            self.parts[name, layer] = self._buffer(name)
        for name, layer in itertools.product([f"d{n}" for n in names], range(shape.drafts)):
            self.parts[name, layer] = self._buffer(name)
        if shape.host:
            self.host = {key: np.zeros_like(array) for key, array in self.parts.items()}
        if shape.index:
            for layer in self.stage:
                self.slots["I", layer] = np.zeros((shape.pages, 6), dtype=np.uint16)
        if shape.state:
            for layer in (0, 1):
                self.slots["S", layer] = np.zeros((ROWS, 40), dtype=np.uint16)
        self.aux = [np.zeros((ROWS, size), dtype=np.uint8) for size in AUX]

    @property
    def count(self) -> int:
        return max(1, self.shape.heads // self.shape.tp)

    def _buffer(self, name: str) -> Array:
        heads = self.count if self.shape.kind == "mha" else 1
        return np.zeros((self.shape.pages, self.shape.page_size, heads, self.shape.dim), dtype=np.uint16)

    def share(self, whole: Array) -> Array:
        """This rank's heads of a page of all heads."""
        if self.shape.kind != "mha":
            return whole
        first = self.tp * self.shape.heads // self.shape.tp
        return whole[:, first : first + self.count]

    def fill(self, room: int, pages: Sequence[int], first: int = 0) -> None:
        for (name, layer), array in self.parts.items():
            for i, page in enumerate(pages):
                array[page] = self.share(truth(room, first + i, layer, name, self.shape))

    def wrong(self, room: int, pages: Sequence[int], first: int = 0, host: bool = False) -> list[str]:
        """What does not hold the room's bytes."""
        return [
            f"{name} layer {layer} page {page}"
            for (name, layer), array in (self.host if host else self.parts).items()
            for i, page in enumerate(pages)
            if not np.array_equal(array[page], self.share(truth(room, first + i, layer, name, self.shape)))
        ]

    def args(self) -> KVArgs:
        """As SGLang's queues fill them."""
        k, shape = KVArgs(), self.shape
        k.engine_rank, k.pp_rank, k.system_dp_rank, k.gpu_id = self.tp, self.pp, None, 0
        k.kv_cache_dtype_str, k.page_size, k.ib_device = "auto", shape.page_size, None
        k.kv_layer_ids, k.num_draft_entries = [], sum(name.startswith("d") for name, _ in self.parts)
        k.kv_data_ptrs, k.kv_data_lens, k.kv_item_lens = _lists(self.parts.values())
        k.prefill_start_layer, k.prefill_end_layer = self.stage.start, self.stage.stop
        k.aux_data_ptrs, k.aux_data_lens, k.aux_item_lens = _lists(self.aux)
        if self.host:
            k.host_kv_data_ptrs, k.host_kv_data_lens, k.host_kv_item_lens = _lists(self.host.values())
        k.is_hybrid_mla_backend, k.swa_kv_cache_layout, k.mla_compression_ratios = False, None, None
        k.state_types, k.state_layer_ids, k.state_dim_per_tensor = [], [], []
        k.state_data_ptrs, k.state_data_lens, k.state_item_lens = [], [], []
        for letter, word in (("I", "dsa"), ("S", "mamba")):
            held = [array for (name, _), array in self.slots.items() if name == letter]
            if held:
                pointers, lengths, items = _lists(held)
                k.state_types.append(word)
                k.state_data_ptrs.append(pointers)
                k.state_data_lens.append(lengths)
                k.state_item_lens.append(items)
                k.state_layer_ids.append([])
                k.state_dim_per_tensor.append([])
        return k

    def set_row(self, index: int, room: int, token: int) -> None:
        """What SGLang's set_buf leaves for decode: here a token, and the room in the last buffer."""
        self.aux[0][index].view(np.uint64)[0] = token
        self.aux[-1][index].view(np.uint64)[0] = room

    def row(self, index: int) -> tuple[int, int]:
        """Token and room that decode would read."""
        return int(self.aux[0][index].view(np.uint64)[0]), int(self.aux[-1][index].view(np.uint64)[0])


def _lists(arrays: Iterable[Any]) -> tuple[list[int], list[int], list[int]]:
    held = list(arrays)
    return [a.ctypes.data for a in held], [a.nbytes for a in held], [a[0].nbytes for a in held]


class Runtime:
    """Stands in for SGLang's process-wide context."""

    now = SimpleNamespace()

    @classmethod
    def of(
        cls, shape: Shape, place: tuple[int, int, int, int], port: int, group: Any, stages: list[Store]
    ) -> SimpleNamespace:
        """`place` is the rank's dp, pp, cp and tp."""
        dp, _, cp, tp = place
        parallel = SimpleNamespace(
            tp_size=shape.tp * shape.dp * shape.cp, attn_tp_size=shape.tp, attn_tp_rank=tp,
            attn_cp_size=shape.cp, attn_cp_rank=cp,
            attn_dcp_size=1, attn_dcp_rank=0, attn_dp_size=shape.dp, attn_dp_rank=dp, dp_size=1, pp_size=shape.pp,
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
        self.kills: list[tuple[int, int]] = []
        for key, value in {
            "SGLANG_HOST_IP": "127.0.0.1",
            "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "inf",
            "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "3600",
            **(tmp_env or {}),
        }.items():
            monkeypatch.setenv(key, value)
        self._shape = Shape()

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
            engine.managers.append(manager.PdclusterKVManager(pool.args(), mode, args, shape.kind == "mla"))
        return engine

    def close(self) -> None:
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


@dataclass
class Request:
    """One request over all ranks of a pair, driven as the two schedulers do."""

    room: int
    prefill: Engine
    decode: Engine
    prompt: int
    prefix: int = 0
    """Pages that decode has already."""
    source: tuple[int, ...] = ()
    target: tuple[int, ...] = ()
    row: int = 1
    senders: list[Any] = field(default_factory=list)
    receivers: list[Any] = field(default_factory=list)
    states: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.source = self.source or tuple(range(1, 1 + self.prompt))
        self.target = self.target or tuple(range(2, 2 + self.prompt - self.prefix))

    def begin(self) -> Request:
        """Senders and receivers are there, decode knows prefill."""
        self.senders = self.prefill.senders(self.room)
        self.join()
        return self

    def join(self) -> None:
        """Decode's half of `begin`."""
        address = self.prefill.address
        self.receivers = [receiver.PdclusterKVReceiver(m, address, self.room) for m in self.decode.managers]
        for m in self.decode.managers:
            wait_for(
                lambda m=m: m.try_ensure_parallel_info(address) or m.request_status.get(self.room) == KVPoll.Failed,
                "the first contact",
            )
        for one in self.receivers:
            if one.poll() != KVPoll.Failed:
                one.init(self.room % self.prefill.shape.dp)

    def ask(self, **how: Any) -> None:
        """Decode has pages: it asks."""
        for one, pool in zip(self.receivers, self.decode.pools, strict=True):
            pool.aux[-1][self.row] = 0
            state = how.get("state")
            one.send_metadata(
                np.array(self.target, dtype=np.int32), self.row, state,
                decode_prefix_len=self.prefix * self.decode.shape.page_size,
                **{k: v for k, v in how.items() if k != "state"},
            )  # fmt: skip

    def asked(self) -> None:
        """Prefill's scheduler sees WaitingForInput on all ranks, and begins. SGLang asks the first pipeline stage
        only (poll_and_all_reduce_prefill_pp), which has the states of the others."""
        if self.prefill.shape.pp > 1:
            first = self.group[: len(self.group) // self.prefill.shape.pp]
            self.reach(first, KVPoll.WaitingForInput, "poll_pp_consensus")
        else:
            self.reach(self.group, KVPoll.WaitingForInput)
        for one in self.group:
            assert one.pop_decode_prefix_len() == self.prefix * self.prefill.shape.page_size
            one.init(self.prompt - self.prefix, self.row)

    @property
    def group(self) -> list[Any]:
        """The senders of the request's data-parallel group."""
        size = len(self.senders) // self.prefill.shape.dp
        at = (self.room % self.prefill.shape.dp) * size
        return self.senders[at : at + size]

    @property
    def filled(self) -> list[RankPool]:
        size = len(self.senders) // self.prefill.shape.dp
        at = (self.room % self.prefill.shape.dp) * size
        return self.prefill.pools[at : at + size]

    def send(self, chunks: Sequence[int] | None = None, token: int = 4711, **how: Any) -> None:
        """Prefill computes and hands over, in chunks of so many pages."""
        pages = list(self.source[self.prefix :])
        sizes = list(chunks or [len(pages)])
        assert sum(sizes) == len(pages)
        for pool in self.filled:
            pool.set_row(self.row, self.room, token)
        at = 0
        for n, size in enumerate(sizes):
            for one, pool in zip(self.group, self.filled, strict=True):
                pool.fill(self.room, pages[at : at + size], self.prefix + at)
                last = n == len(sizes) - 1
                one.send(np.array(pages[at : at + size], dtype=np.int32), how.get("state") if last else None, size)
            at += size

    def reach(self, ends: Sequence[Any], state: int, poll: str = "poll") -> None:
        """Until all of them are in a state (MIN over ranks, as SGLang reduces them)."""
        wait_for(lambda: min(int(getattr(e, poll)()) for e in ends) == state, f"state {state}")

    def finish(self) -> None:
        """Both sides see success."""
        self.reach(self.receivers, KVPoll.Success)
        self.reach(self.group, KVPoll.Success)

    def clear(self) -> None:
        for one in (*self.group, *self.receivers):
            one.clear()

    def run(self, chunks: Sequence[int] | None = None, **how: Any) -> None:
        """All of it."""
        self.begin()
        self.ask()
        self.asked()
        self.send(chunks, **how)
        self.finish()

    def wrong(self, host: bool = False) -> list[str]:
        """What decode holds wrongly, over all ranks."""
        return [w for pool in self.decode.pools for w in pool.wrong(self.room, self.target, self.prefix, host)]

    def reason(self, end: Any) -> str:
        """Why one end failed, as SGLang learns it."""
        with pytest.raises(conn.KVTransferError) as caught:
            end.failure_exception()
        return str(caught.value)
