"""The operator's real request: what both engines are sent, how answers are judged, and that it always ends."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from runtime_world import NOW, make_reconciler, pdcluster

from pdoperator.domain.actions import Decision, Memory, ProbeEnd, StartProbe
from pdoperator.domain.observed import Observed
from pdoperator.domain.realprobe import ProbeOutcome, ProbeResult, ProbesSeen
from pdoperator.domain.settings import DecideSettings
from pdoperator.kube.fake import FakeKube
from pdoperator.pods import engine_probe
from pdoperator.pods.engine_probe import EngineProber, judge
from pdoperator.runtime.carried import ClusterState
from pdoperator.runtime.metrics import Metrics

UID = "cluster"
GOOD = {"text": "x", "output_ids": [5, 6], "meta_info": {"completion_tokens": 2, "finish_reason": {"type": "length"}}}
ABORTED = {"meta_info": {"completion_tokens": 0, "finish_reason": {"type": "abort", "message": "gone"}}}
Page = Callable[[dict[str, Any]], Awaitable[tuple[int, bytes]]]


@dataclass
class FakeEngine:
    """An HTTP server on an address of its own that answers /generate as `page` says."""

    ip: str
    page: Page
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    connections: set[asyncio.Task[Any]] = field(default_factory=set)
    abort_answer: bytes = b"HTTP/1.1 200 X\r\nContent-Length: 0\r\n\r\n"
    """What an abort is answered with, then a byte of it at a time, without end if it is no whole answer."""
    server: asyncio.Server | None = None
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.connections.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split()[1]
                headers = [h.lower() for h in head.split("\r\n")]
                length = next(int(h.split(":")[1]) for h in headers if h.startswith("content-length"))
                body = json.loads(await reader.readexactly(length))
                self.asked.append((path, body))
                if path == "/abort_request":
                    self.aborted.set()
                    writer.write(self.abort_answer)
                    while not self.abort_answer.endswith(b"\r\n\r\n"):
                        writer.write(b"x")
                        await writer.drain()
                        await asyncio.sleep(0.01)
                    continue
                self.arrived.set()
                status, data = await self.page(body)
                writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(data)) + data)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def close(self) -> None:
        if self.server is not None:
            self.server.close()
        for task in self.connections:
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)

    @property
    def generated(self) -> list[dict[str, Any]]:
        return [body for path, body in self.asked if path == "/generate"]


def answers(status: int = 200, body: Any = GOOD) -> Page:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def page(_: dict[str, Any]) -> tuple[int, bytes]:
        return status, data

    return page


async def hangs(_: dict[str, Any]) -> tuple[int, bytes]:
    await asyncio.Event().wait()
    raise AssertionError


async def cuts(_: dict[str, Any]) -> tuple[int, bytes]:
    raise ConnectionResetError


class Pair:
    """A prober and two engines."""

    def __init__(self) -> None:
        self.prober = EngineProber(bootstrap_port=8998, chance=random.Random(1))
        self.prefill, self.decode = FakeEngine("127.0.0.2", answers()), FakeEngine("127.0.0.3", answers())
        self.told: asyncio.Queue[str] = asyncio.Queue()
        self.prober.news = self.told.put_nowait

    async def start(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.server = await asyncio.start_server(engine.serve, engine.ip, 0)
            engine.port = engine.server.sockets[0].getsockname()[1]

    def request(self, **changes: Any) -> StartProbe:
        ends = (
            ProbeEnd("p0", "up", self.prefill.ip, port=self.prefill.port),
            ProbeEnd("d0", "ud", self.decode.ip, port=self.decode.port),
        )
        return StartProbe(*ends, **({"deadline": 20.0} | changes))

    async def probe(self, **changes: Any) -> ProbeResult:
        self.prober.start(UID, self.request(**changes))
        assert await asyncio.wait_for(self.told.get(), 30) == UID
        (result,) = self.prober.look(UID).results
        return result


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    await made.start()
    try:
        yield made
    finally:
        await made.prober.close()
        await made.prefill.close()
        await made.decode.close()


async def test_both_engines_get_the_same_request_with_prefills_bootstrap_address(pair: Pair) -> None:
    result = await pair.probe()
    assert result.outcome is ProbeOutcome.SERVED and result.message == "" and result.seconds > 0
    (to_prefill,), (to_decode,) = pair.prefill.generated, pair.decode.generated
    assert to_prefill == to_decode
    assert to_prefill["bootstrap_host"] == "127.0.0.2" and to_prefill["bootstrap_port"] == 8998
    assert to_prefill["sampling_params"] == {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    assert 0 <= to_prefill["bootstrap_room"] < 2**63
    assert len(to_prefill["input_ids"]) == 40 and all(10 <= t <= 250 for t in to_prefill["input_ids"])
    assert not pair.prefill.aborted.is_set()


async def test_every_request_is_counted_by_its_outcome(pair: Pair) -> None:
    metrics = Metrics()
    pair.prober.measured = metrics.probed
    await pair.probe()
    pair.decode.page = answers(500, b"")
    await pair.probe()
    count = metrics.registry.get_sample_value
    assert count("pdcluster_operator_probes_total", {"outcome": "served"}) == 1
    assert count("pdcluster_operator_probes_total", {"outcome": "failed"}) == 1
    assert count("pdcluster_operator_probe_seconds_count") == 2


async def test_no_two_requests_share_a_room_or_a_prompt(pair: Pair) -> None:
    for _ in range(3):
        await pair.probe()
    bodies = pair.decode.generated
    assert len({b["bootstrap_room"] for b in bodies}) == len({tuple(b["input_ids"]) for b in bodies}) == 3
    assert len({b["rid"] for b in bodies}) == 3


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_room_chooses_the_attention_data_parallel_rank(size: int) -> None:
    prober = EngineProber(chance=random.Random(2))
    for rank in range(size):
        request = StartProbe(ProbeEnd("p", "u", "1.2.3.4"), ProbeEnd("d", "v", "1.2.3.5"), rank, size)
        for _ in range(20):
            room = prober.body(request)["bootstrap_room"]
            assert room % size == rank and 0 <= room < 2**63


@pytest.mark.parametrize(
    "side, page, outcome, says",
    [
        (
            "decode",
            answers(500, b"KVTransferError"),
            ProbeOutcome.FAILED,
            "decode d0 answers HTTP 500: KVTransferError",
        ),
        ("prefill", answers(500, b"boom"), ProbeOutcome.FAILED, "prefill p0 answers HTTP 500: boom"),
        ("decode", answers(400, b""), ProbeOutcome.FAILED, "decode d0 answers HTTP 400: no text"),
        ("decode", answers(503, b"queue full"), ProbeOutcome.BUSY, "takes no request now (HTTP 503: queue full)"),
        (
            "decode",
            answers(503, {"error": {"type": "PeerUnreachable"}}),
            ProbeOutcome.FAILED,
            "decode d0 answers HTTP 503",
        ),
        ("prefill", answers(429, b""), ProbeOutcome.BUSY, "prefill p0 takes no request now"),
        ("decode", answers(401, b""), ProbeOutcome.UNAUTHORIZED, "wants an API key"),
        ("decode", answers(200, b"<html>"), ProbeOutcome.FAILED, "its answer can not be read"),
        ("decode", answers(200, {"text": "x"}), ProbeOutcome.FAILED, "meta_info: Field required"),
        (
            "decode",
            answers(200, {"meta_info": {"completion_tokens": 1}}),
            ProbeOutcome.FAILED,
            "made 1 tokens of 2",
        ),
        ("decode", answers(200, GOOD | {"output_ids": [1]}), ProbeOutcome.FAILED, "made 2 tokens of 2"),
        (
            "decode",
            answers(200, ABORTED),
            ProbeOutcome.FAILED,
            "ended the request: gone",
        ),
        ("decode", cuts, ProbeOutcome.FAILED, "decode d0 ended the connection"),
    ],
)
async def test_an_answer_that_does_not_serve_is_named_and_both_sides_are_released(
    pair: Pair, side: str, page: Page, outcome: ProbeOutcome, says: str
) -> None:
    # The other side waits for its peer, as a real engine would.
    bad, other = (pair.decode, pair.prefill) if side == "decode" else (pair.prefill, pair.decode)
    bad.page, other.page = page, hangs
    result = await pair.probe()
    assert result.outcome is outcome and says in result.message
    await asyncio.wait_for(other.aborted.wait(), 10)
    (rid,) = {body["rid"] for path, body in other.asked if path == "/abort_request"}
    assert rid == other.generated[0]["rid"]


async def test_a_request_that_hangs_ends_at_its_deadline_and_names_who_was_silent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_probe, "ABORT_SECONDS", 60.0)  # a slow machine may take long over them
    pair.prefill.page = pair.decode.page = hangs
    result = await pair.probe(deadline=0.2)
    assert result.outcome is ProbeOutcome.TIMED_OUT
    assert result.message == "no answer of prefill p0 and decode d0 within 0.2 s"
    assert pair.prefill.aborted.is_set() and pair.decode.aborted.is_set()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 X\r\nX: ", b"HTTP/1.1 200 X\r\nContent-Length: 999999999\r\n\r\nx"])
async def test_an_abort_that_is_answered_without_end_does_not_hold_the_probe(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(engine_probe, "ABORT_SECONDS", 3.0)  # in which they surely arrive
    pair.prefill.page = pair.decode.page = hangs
    pair.prefill.abort_answer = pair.decode.abort_answer = answer
    result = await asyncio.wait_for(pair.probe(deadline=0.2), 30)
    assert result.outcome is ProbeOutcome.TIMED_OUT and pair.decode.aborted.is_set()
    assert pair.prober.look(UID).running == ()  # the next one can come


async def test_prefill_that_never_ends_its_part_is_named_alone(pair: Pair) -> None:
    pair.prefill.page = hangs
    result = await pair.probe(deadline=3.0)  # in which decode's answer surely comes
    assert result.outcome is ProbeOutcome.TIMED_OUT and result.message == "no answer of prefill p0 within 3 s"


async def test_an_engine_that_can_not_be_reached_is_no_failure(pair: Pair) -> None:
    pair.prefill.page = hangs
    await pair.decode.close()
    result = await pair.probe()
    assert result.outcome is ProbeOutcome.UNREACHABLE
    assert result.message.startswith("decode d0 can not be reached by the operator")


async def test_a_prefill_has_one_probe_at_a_time(pair: Pair) -> None:
    pair.decode.page = hangs
    pair.prober.start(UID, pair.request())
    pair.prober.start(UID, pair.request())
    assert pair.prober.look(UID).running == (pair.request(),)
    await asyncio.wait_for(pair.decode.arrived.wait(), 10)
    assert len(pair.decode.generated) == 1


async def test_results_are_handed_out_once(pair: Pair) -> None:
    await pair.probe()
    assert pair.prober.look(UID).results == () and pair.prober.look(UID).running == ()
    assert pair.prober.look("another").results == ()


async def test_a_cluster_that_is_gone_ends_its_probes(pair: Pair) -> None:
    pair.decode.page = pair.prefill.page = hangs
    pair.prober.start(UID, pair.request())
    await asyncio.wait_for(pair.decode.arrived.wait(), 10)
    await asyncio.wait_for(pair.prober.forget(UID), 30)
    assert pair.prober.look(UID).running == ()
    assert [t for t in asyncio.all_tasks() if t.get_name().startswith("probe")] == []


async def test_an_error_of_the_operators_own_is_no_evidence_and_the_next_probe_comes(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("bug")

    with monkeypatch.context() as patch:
        patch.setattr(engine_probe, "judge", broken)
        result = await pair.probe()
    assert result.outcome is ProbeOutcome.UNREACHABLE and "RuntimeError" in result.message
    assert (await pair.probe()).outcome is ProbeOutcome.SERVED


async def test_a_look_starts_a_probe_and_the_look_that_it_wakes_sees_the_result(pair: Pair) -> None:
    kube = FakeKube(now=lambda: NOW)
    meta = kube.put(pdcluster())["metadata"]
    seen: list[ProbesSeen] = []

    def decide(observed: Observed, memory: Memory, settings: DecideSettings) -> Decision:
        seen.append(observed.probes)
        return Decision((pair.request(),) if len(seen) == 1 else (), None, memory, 5.0)

    reconciler = make_reconciler(kube, decide, prober=pair.prober)
    state = ClusterState(meta["namespace"], meta["name"], meta["uid"])
    await reconciler.once(state)
    assert await asyncio.wait_for(pair.told.get(), 30) == meta["uid"]
    await reconciler.once(state)
    assert seen[0] == ProbesSeen()
    assert [r.outcome for r in seen[1].results] == [ProbeOutcome.SERVED] and seen[1].running == ()
    await reconciler.forget(meta["uid"])


def test_an_answer_without_token_ids_counts_by_its_own_count() -> None:
    body = json.dumps({"text": "x", "meta_info": {"completion_tokens": 2, "finish_reason": None}}).encode()
    assert judge(200, body, decode=True).outcome is ProbeOutcome.SERVED


async def test_an_answer_without_end_is_cut(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_probe, "ANSWER_BYTES", 100)
    pair.decode.page = answers(200, b" " * 1000)
    result = await pair.probe()
    assert result.outcome is ProbeOutcome.FAILED and "larger than 100 bytes" in result.message
