"""How the two sides meet without an operator, as SGLang's own backends do: on the prefill's bootstrap port.

Used only where such a backend is emulated. The prefill serves its ranks' cards there; before its first
request to an address a decode fetches them and leaves its own. Nobody is authenticated (nor is SGLang's
exchange): where the PDCluster backend runs, this port is closed and rosters decide.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import time

from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdtransfer.contract.base import Role
from pdtransfer.contract.card import RankCard
from pdtransfer.engines.reference.engine import Engine
from pdtransfer.engines.reference.problems import RequestError
from pdtransfer.engines.reference.requests import Asked

log = logging.getLogger(__name__)
ROUTE = "/route"
TIMEOUT_S = 5.0
FRESH_S = 5.0
"""Seconds for which an address is taken to be the same incarnation (SGLang's heartbeat interval)."""
MAX_BODY = 16 << 20
CARDS: TypeAdapter[tuple[RankCard, ...]] = TypeAdapter(tuple[RankCard, ...])


def bootstrap_app(engine: Engine) -> Starlette:
    """The prefill's side: PUT /route takes a decode pod's cards and answers the prefill's."""

    async def route(request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                return Response("too large", 413)
        try:
            cards = CARDS.validate_json(body)
        except ValidationError as error:
            return Response(f"not a list of cards: {error.error_count()} errors", 400)
        if any(c.role is not Role.DECODE or c.seal_broken for c in cards):
            return Response("only sealed cards of decode ranks are taken here", 400)
        engine.introduce(cards)
        return Response(CARDS.dump_json(engine.cards), media_type="application/json")

    return Starlette(routes=[Route(ROUTE, route, methods=["PUT"])])


class Introductions:
    """The decode's side: `prepare` makes the prefill behind a request's bootstrap address known."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._met: dict[str, float] = {}
        self._lock = asyncio.Lock()

    async def prepare(self, asked: Asked) -> None:
        """Exchange cards unless that was done a moment ago; RequestError when nobody answers there."""
        async with self._lock:
            now = time.monotonic()
            self._met = {a: t for a, t in self._met.items() if now - t < FRESH_S}
            if asked.bootstrap in self._met:
                return
            try:
                body = await asyncio.to_thread(_exchange, asked.bootstrap, CARDS.dump_json(self._engine.cards))
                cards = CARDS.validate_json(body)
            except (OSError, http.client.HTTPException, ValidationError) as error:
                raise RequestError(
                    "PeerUnreachable",
                    f"no prefill answers at the bootstrap address {asked.bootstrap}: {type(error).__name__}: {error}",
                    503,
                ) from error
            known = tuple(c for c in cards if c.bootstrap == asked.bootstrap and not c.seal_broken)
            if known:
                self._engine.introduce(known)
                self._met[asked.bootstrap] = now


def _exchange(address: str, body: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=TIMEOUT_S)
    try:
        connection.request("PUT", ROUTE, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        data = answer.read(MAX_BODY)
        if answer.status != 200:
            raise OSError(f"HTTP {answer.status}: {data[:200].decode(errors='replace')}")
        return data
    finally:
        connection.close()
