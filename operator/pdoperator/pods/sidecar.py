"""Client of the pods' sidecars: mutual TLS, pooled, every request with a deadline, every answer checked.

A pod is dialled by its IP but must prove `pod_server_name(cluster UID)`. Each PDCluster has a pool
of its own: a pooled connection was proven for one name, and the pool would hand it out for another.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import httpx
from pydantic import ValidationError

from pdoperator.api.conditions import Reason
from pdoperator.api.names import CONTAINER_SIDECAR, PORT_SIDECAR_CONTROL, pod_server_name
from pdoperator.domain.observed import PodAnswer, PodSeen
from pdoperator.domain.view import FAILED_PHASES
from pdoperator.pods.http import BodyTooLarge, certificate_problem, origin, read_limited
from pdtransfer.contract.card import PodCards
from pdtransfer.contract.roster import Roster, RosterRefusal
from pdtransfer.contract.verdict import PodVerdicts

log = logging.getLogger(__name__)

ANSWER_BYTES = 64 << 20
IN_FLIGHT = 16
SslContext = Callable[[], ssl.SSLContext]
"""Gives the current context (the same object until the operator's certificate is renewed)."""


@dataclass(frozen=True)
class PutResult:
    """`taken`, or why not: the pod's own `refusal` (409, 412), or `error` (a Reason) with a message."""

    taken: bool
    refusal: RosterRefusal | None = None
    error: str = ""
    message: str = ""


class _Failed(Exception):
    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


class _Pool:
    """One PDCluster's connections and cards. `cards`: pod UID to (ETag, cards)."""

    def __init__(self, context: ssl.SSLContext, uid: str, in_flight: int) -> None:
        self.context = context
        self.server_name = pod_server_name(uid)
        self.client = httpx.AsyncClient(
            verify=context,
            trust_env=False,
            timeout=httpx.Timeout(5.0),
            limits=httpx.Limits(max_connections=512, max_keepalive_connections=512, keepalive_expiry=60.0),
        )
        self.slots = asyncio.Semaphore(in_flight)
        self.cards: dict[str, tuple[str, PodCards]] = {}


class SidecarClient:
    """`deadline` is seconds per request, connect to last byte; `jitter` spreads a round of requests."""

    def __init__(
        self,
        context: SslContext,
        *,
        port: int = PORT_SIDECAR_CONTROL,
        deadline: float = 2.0,
        jitter: float = 0.05,
        in_flight: int = IN_FLIGHT,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._context = context
        self._port = port
        self._deadline = deadline
        self._jitter = jitter
        self._in_flight = in_flight
        self._clock = clock
        self._pools: dict[str, _Pool] = {}
        self._retired: dict[str, httpx.AsyncClient] = {}

    async def ask(self, cluster_uid: str, pods: Iterable[PodSeen]) -> dict[str, PodAnswer]:
        """Cards and verdicts of every pod whose sidecar runs, by pod UID. Never raises for a pod."""
        asked = [p for p in pods if can_answer(p)]
        pool = await self._pool(cluster_uid)
        answers = await asyncio.gather(*(self._ask_one(pool, cluster_uid, p) for p in asked))
        uids = {p.uid for p in asked}
        for gone in set(pool.cards) - uids:
            del pool.cards[gone]
        return dict(zip((p.uid for p in asked), answers, strict=True))

    async def put_roster(self, pod_ip: str, roster: Roster) -> PutResult:
        """PUT /v1/roster. The pod decides by key, UID and incarnation."""
        pool = await self._pool(roster.cluster_uid)
        body = roster.model_dump_json().encode()
        try:
            status, data, _ = await self._request(pool, "PUT", pod_ip, "/v1/roster", body=body)
        except _Failed as failed:
            return PutResult(False, error=failed.reason, message=failed.message)
        if status in (200, 201, 204):
            return PutResult(True)
        if status in (409, 412):
            try:
                refusal = RosterRefusal.model_validate_json(data)
                return PutResult(False, refusal=refusal, message=refusal.message)
            except ValidationError:
                pass
        return PutResult(False, error=Reason.OPERATOR_CANNOT_REACH_PODS, message=f"PUT /v1/roster answered {status}")

    async def forget(self, cluster_uid: str) -> None:
        """The PDCluster is gone: close its connections."""
        pool, retired = self._pools.pop(cluster_uid, None), self._retired.pop(cluster_uid, None)
        for client in (pool.client if pool is not None else None, retired):
            if client is not None:
                await client.aclose()

    async def close(self) -> None:
        """Close every connection."""
        for uid in list(self._pools):
            await self.forget(uid)

    # --- inside -------------------------------------------------------------------------------

    async def _pool(self, uid: str) -> _Pool:
        context = self._context()
        pool = self._pools.get(uid)
        if pool is not None and pool.context is context:
            return pool
        fresh = self._pools[uid] = _Pool(context, uid, self._in_flight)
        if pool is not None:
            # Requests may still be under way on the old connections: closed one renewal later.
            last, self._retired[uid] = self._retired.get(uid), pool.client
            if last is not None:
                await last.aclose()
        return fresh

    async def _ask_one(self, pool: _Pool, cluster_uid: str, pod: PodSeen) -> PodAnswer:
        await asyncio.sleep(random.uniform(0.0, self._jitter))
        try:
            cards = await self._cards(pool, cluster_uid, pod)
            verdicts = await self._verdicts(pool, cluster_uid, pod)
        except _Failed as failed:
            return PodAnswer(error=failed.reason, message=failed.message, at=self._clock())
        return PodAnswer(cards=cards, verdicts=verdicts, at=self._clock())

    async def _cards(self, pool: _Pool, cluster_uid: str, pod: PodSeen) -> PodCards:
        known = pool.cards.get(pod.uid)
        headers = {"If-None-Match": known[0]} if known else {}
        status, data, etag = await self._request(pool, "GET", pod.ip, "/v1/cards", headers=headers)
        if status == 304 and known:
            return known[1]
        if status != 200:
            raise _unexpected("GET /v1/cards", status)
        try:
            cards = PodCards.model_validate_json(data)
        except ValidationError as error:
            raise _Failed(Reason.INVALID_CARD, f"GET /v1/cards: {_first(error)}") from error
        _same_pod(cards.cluster_uid, cards.pod_uid, cluster_uid, pod)
        for card in cards.cards:
            if (card.cluster_uid, card.pod_uid) != (cluster_uid, pod.uid):
                raise _Failed(Reason.INVALID_CARD, f"rank {card.rank} shows a card of pod {card.pod_uid}")
            if broken := card.seal_broken:
                raise _Failed(Reason.INVALID_CARD, f"rank {card.rank}: {broken}")
        if etag:
            pool.cards[pod.uid] = (etag, cards)
        else:
            pool.cards.pop(pod.uid, None)
        return cards

    async def _verdicts(self, pool: _Pool, cluster_uid: str, pod: PodSeen) -> PodVerdicts:
        status, data, _ = await self._request(pool, "GET", pod.ip, "/v1/verdicts")
        if status != 200:
            raise _unexpected("GET /v1/verdicts", status)
        try:
            verdicts = PodVerdicts.model_validate_json(data)
        except ValidationError as error:
            raise _Failed(Reason.INVALID_CARD, f"GET /v1/verdicts: {_first(error)}") from error
        _same_pod(verdicts.cluster_uid, verdicts.pod_uid, cluster_uid, pod)
        return verdicts

    async def _request(
        self,
        pool: _Pool,
        method: str,
        ip: str,
        path: str,
        *,
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
    ) -> tuple[int, bytes, str]:
        """Status, body and ETag. Raises _Failed with the reason that conditions show."""
        sent = {"Accept": "application/json", **(headers or {})}
        if body is not None:
            sent["Content-Type"] = "application/json"
        try:
            # The deadline starts when the request does: a pod must not be blamed for our queue.
            async with (
                pool.slots,
                asyncio.timeout(self._deadline),
                pool.client.stream(
                    method,
                    origin("https", ip, self._port) + path,
                    headers=sent,
                    content=body,
                    extensions={"sni_hostname": pool.server_name},
                ) as response,
            ):
                data = await read_limited(response, ANSWER_BYTES)
                return response.status_code, data, response.headers.get("etag", "")
        except TimeoutError as error:
            text = f"{method} {path} at {ip}: no answer within {self._deadline:g} s"
            raise _Failed(Reason.OPERATOR_CANNOT_REACH_PODS, text) from error
        except BodyTooLarge as error:
            raise _Failed(Reason.INVALID_CARD, f"{method} {path}: {error}") from error
        except (httpx.HTTPError, OSError) as error:
            if problem := certificate_problem(error):
                raise _Failed(Reason.WRONG_CERTIFICATE, problem) from error
            text = f"{method} {path} at {ip}: {type(error).__name__} {error}".rstrip()
            if isinstance(error, httpx.ReadError):
                # Under TLS 1.3 a server that refuses a client's certificate ends the connection after
                # the client's handshake is over, and its alert is often lost with the reset.
                text += " (cut off after the handshake: the pod may refuse the operator's certificate, or restarts)"
            raise _Failed(Reason.OPERATOR_CANNOT_REACH_PODS, text) from error


def can_answer(pod: PodSeen) -> bool:
    """True when the pod has an address and its sidecar runs; a pod that still starts is not unreachable."""
    if not pod.ip or pod.phase in FAILED_PHASES:
        return False
    return any(c.name == CONTAINER_SIDECAR and c.running for c in pod.containers)


def _unexpected(what: str, status: int) -> _Failed:
    if status in (401, 403):
        return _Failed(Reason.WRONG_CERTIFICATE, f"{what} answered {status}: the pod refuses the operator's identity")
    return _Failed(Reason.OPERATOR_CANNOT_REACH_PODS, f"{what} answered {status}")


def _same_pod(cluster_uid: str, pod_uid: str, wanted_cluster: str, pod: PodSeen) -> None:
    if (cluster_uid, pod_uid) != (wanted_cluster, pod.uid):
        # Its IP went to another pod of the same PDCluster meanwhile; that says nothing about this one.
        raise _Failed(Reason.OPERATOR_CANNOT_REACH_PODS, f"at {pod.ip} pod {pod_uid} answers, not {pod.uid}")


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(p) for p in found['loc']) or 'body'}: {found['msg']}"
