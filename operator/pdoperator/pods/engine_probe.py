"""Sends one small real request through a prefill and a decode pod, as a router does, and judges the answers.

Both engines get the same body with the prefill's bootstrap address and a random room; decode's answer is the user's.
Probes run in tasks of their own: a request that hangs for its whole deadline must not hold up a look at the cluster.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from pdoperator.api.names import PORT_BOOTSTRAP
from pdoperator.domain.actions import ProbeEnd, StartProbe
from pdoperator.domain.realprobe import ProbeOutcome, ProbeResult, ProbesSeen
from pdoperator.pods.http import BodyTooLarge, origin, read_limited

log = logging.getLogger(__name__)

PROMPT_TOKENS = 40
NEW_TOKENS = 2
"""The first comes from prefill with the KV; the second only a decode that has the KV can make."""
LOWEST_TOKEN, HIGHEST_TOKEN = 10, 250
"""Tokens of the prompt: random, so that no prefix cache spares the transfer, and within every vocabulary."""
ANSWER_BYTES = 1 << 20
ABORT_SECONDS = 2.0
KEPT_RESULTS = 256


class _Meta(BaseModel):
    model_config = ConfigDict(extra="ignore")
    completion_tokens: int
    finish_reason: dict[str, Any] | None = None


class _Generated(BaseModel):
    """What is read of an answer of /generate."""

    model_config = ConfigDict(extra="ignore")
    meta_info: _Meta
    output_ids: list[int] | None = None


class _Error(BaseModel):
    model_config = ConfigDict(extra="ignore")
    type: str


class _Refused(BaseModel):
    """An error answer of Reference."""

    model_config = ConfigDict(extra="ignore")
    error: _Error


@dataclass(frozen=True)
class _Answer:
    """Of one engine: its outcome, and what it said where it did not serve."""

    outcome: ProbeOutcome
    message: str = ""


@dataclass
class _Cluster:
    tasks: dict[str, tuple[StartProbe, asyncio.Task[None]]] = field(default_factory=dict)
    results: list[ProbeResult] = field(default_factory=list)


def judge(status: int, body: bytes, *, decode: bool) -> _Answer:
    """What an engine's answer says. Decode must have made both tokens; prefill's own answer needs no more than 200."""
    if status in (401, 403):
        return _Answer(ProbeOutcome.UNAUTHORIZED, f"answers HTTP {status}: it wants an API key, the operator has none")
    if status in (429, 503) and not _about_its_peer(body):
        return _Answer(ProbeOutcome.BUSY, f"takes no request now (HTTP {status}: {_short(body)})")
    if status != 200:
        return _Answer(ProbeOutcome.FAILED, f"answers HTTP {status}: {_short(body)}")
    if not decode:
        return _Answer(ProbeOutcome.SERVED)
    try:
        told = _Generated.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(p) for p in first["loc"]) or "the body"
        return _Answer(ProbeOutcome.FAILED, f"its answer can not be read: {where}: {first['msg']}")
    made = told.meta_info.completion_tokens
    reason = told.meta_info.finish_reason or {}
    if reason.get("type") == "abort":
        return _Answer(ProbeOutcome.FAILED, f"ended the request: {str(reason.get('message', 'aborted'))[:200]}")
    if made != NEW_TOKENS or (told.output_ids is not None and len(told.output_ids) != made):
        return _Answer(ProbeOutcome.FAILED, f"made {made} tokens of {NEW_TOKENS}")
    return _Answer(ProbeOutcome.SERVED)


def _about_its_peer(body: bytes) -> bool:
    """Whether an error is about the other side (Reference answers those with 503 too, since another pod may serve)."""
    try:
        return _Refused.model_validate_json(body).error.type.startswith("Peer")
    except ValidationError:
        return False


def _short(body: bytes) -> str:
    return " ".join(body[:200].decode(errors="replace").split()) or "no text"


class EngineProber:
    """One for the process. `start` and `look` never block; `news` is called with a PDCluster's UID when a probe of it
    has ended, `measured` with its outcome and its seconds."""

    def __init__(
        self,
        *,
        bootstrap_port: int = PORT_BOOTSTRAP,
        now: Callable[[], float] = time.time,
        chance: random.Random | None = None,
    ) -> None:
        self._bootstrap_port, self._now = bootstrap_port, now
        self._chance = chance or random.SystemRandom()
        # Requests have deadlines of their own; the pool must not add one.
        self._client = httpx.AsyncClient(trust_env=False, timeout=httpx.Timeout(None, connect=5.0))
        self._clusters: dict[str, _Cluster] = {}
        self.news: Callable[[str], None] = lambda uid: None
        self.measured: Callable[[str, float], None] = lambda outcome, seconds: None

    def start(self, uid: str, request: StartProbe) -> None:
        """Begin a probe, unless that prefill has one under way."""
        cluster = self._clusters.setdefault(uid, _Cluster())
        key = request.prefill.incarnation
        if key in cluster.tasks:
            return
        name = f"probe {request.prefill.name} {request.decode.name}"
        task = asyncio.create_task(self._run(uid, cluster, request), name=name)
        cluster.tasks[key] = request, task

    def look(self, uid: str) -> ProbesSeen:
        """What is under way, and the results since the last look, which are handed out once."""
        cluster = self._clusters.get(uid)
        if cluster is None:
            return ProbesSeen()
        results, cluster.results = tuple(cluster.results), []
        return ProbesSeen(tuple(request for request, _ in cluster.tasks.values()), results)

    async def forget(self, uid: str) -> None:
        """End the probes of a PDCluster that is gone."""
        cluster = self._clusters.pop(uid, None)
        if cluster is not None:
            await _end([task for _, task in cluster.tasks.values()])

    async def close(self) -> None:
        """End every probe and connection."""
        for uid in list(self._clusters):
            await self.forget(uid)
        await self._client.aclose()

    # --- one probe ----------------------------------------------------------------------------

    async def _run(self, uid: str, cluster: _Cluster, request: StartProbe) -> None:
        began, at = time.monotonic(), self._now()
        try:
            answer = await self._probe(request)
        except Exception as error:
            # Nothing is known about the pods then, and the next probe must still come.
            names = (request.prefill.name, request.decode.name)
            log.exception("action=probe prefill=%s decode=%s error=unexpected", *names)
            answer = _Answer(ProbeOutcome.UNREACHABLE, f"the operator's probe failed ({type(error).__name__})")
        finally:
            cluster.tasks.pop(request.prefill.incarnation, None)
        seconds = time.monotonic() - began
        cluster.results.append(ProbeResult(request, answer.outcome, answer.message, seconds, at + seconds))
        del cluster.results[:-KEPT_RESULTS]
        level = logging.INFO if answer.outcome is ProbeOutcome.SERVED else logging.WARNING
        log.log(level, "action=probe prefill=%s decode=%s rank=%d outcome=%r seconds=%.3f message=%r",
                request.prefill.name, request.decode.name, request.dp_rank, answer.outcome.value, seconds,
                answer.message)  # fmt: skip
        self.measured(answer.outcome.value, seconds)
        self.news(uid)

    def body(self, request: StartProbe) -> dict[str, Any]:
        """The request for both engines. Its room chooses prefill's attention-DP rank: the room modulo their number."""
        room = self._chance.getrandbits(62)
        room += (request.dp_rank - room) % request.dp_size
        return {
            "rid": f"pdcluster-probe-{room}",
            "input_ids": [self._chance.randint(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(PROMPT_TOKENS)],
            "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            "stream": False,
            "bootstrap_host": request.prefill.ip,
            "bootstrap_port": self._bootstrap_port,
            "bootstrap_room": room,
        }

    async def _probe(self, request: StartProbe) -> _Answer:
        body = self.body(request)
        sides = {
            asyncio.create_task(self._ask(request.prefill, "prefill", body, decode=False)): "prefill",
            asyncio.create_task(self._ask(request.decode, "decode", body, decode=True)): "decode",
        }
        served: set[str] = set()
        pending = set(sides)
        try:
            async with asyncio.timeout(request.deadline):
                while pending:
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    for task in sorted(done, key=lambda t: sides[t]):
                        answer = task.result()
                        if answer.outcome is not ProbeOutcome.SERVED:
                            await self._give_up(request, body["rid"])
                            return answer
                        served.add(sides[task])
            return _Answer(ProbeOutcome.SERVED)
        except TimeoutError:
            ends = {"prefill": request.prefill.name, "decode": request.decode.name}
            silent = " and ".join(f"{side} {name}" for side, name in ends.items() if side not in served)
            await self._give_up(request, body["rid"])
            return _Answer(ProbeOutcome.TIMED_OUT, f"no answer of {silent} within {request.deadline:g} s")
        finally:
            await _end(sides)

    async def _ask(self, end: ProbeEnd, side: str, body: dict[str, Any], *, decode: bool) -> _Answer:
        url = origin("http", end.ip, end.port) + "/generate"
        try:
            async with self._client.stream("POST", url, json=body) as response:
                data = await read_limited(response, ANSWER_BYTES)
                answer = judge(response.status_code, data, decode=decode)
        except BodyTooLarge as error:
            answer = _Answer(ProbeOutcome.FAILED, str(error))
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            answer = _Answer(ProbeOutcome.UNREACHABLE, f"can not be reached by the operator ({type(error).__name__})")
        except httpx.HTTPError as error:
            # The connection ended in the middle of the request: an engine that dies of it looks like this.
            answer = _Answer(ProbeOutcome.FAILED, f"ended the connection ({type(error).__name__})")
        if answer.outcome is ProbeOutcome.SERVED:
            return answer
        return _Answer(answer.outcome, f"{side} {end.name} {answer.message}")

    async def _give_up(self, request: StartProbe, rid: str) -> None:
        """Neither engine shall go on waiting for a request that nobody waits for. Best effort, bounded."""

        async def abort(end: ProbeEnd) -> None:
            url = origin("http", end.ip, end.port) + "/abort_request"
            # A deadline over all of it: httpx's own starts anew with each byte. The answer's body is not waited for.
            with suppress(httpx.HTTPError, TimeoutError):
                async with asyncio.timeout(ABORT_SECONDS), self._client.stream("POST", url, json={"rid": rid}):
                    pass

        await asyncio.gather(abort(request.prefill), abort(request.decode))


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel what still runs, and take note of what nobody asks for any more."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=ABORT_SECONDS)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()
