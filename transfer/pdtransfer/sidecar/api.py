"""HTTP apps of the sidecar: the control API (operator only) and the health port (probes, metrics).

Bodies are bounded in size and time before they are parsed. Errors are JSON {reason, message}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pdtransfer.contract.roster import RosterRefusal
from pdtransfer.sidecar import rosters, views
from pdtransfer.sidecar.hub import Hub
from pdtransfer.sidecar.identity import why_not
from pdtransfer.sidecar.model import HeldRoster

log = logging.getLogger(__name__)

BODY_DEADLINE = 20.0
SMALL_BODY = 256 << 10
LARGE_BODY = 1 << 20
JSON = "application/json"


class BadBody(Exception):
    """The body can not be taken; `status` is the HTTP status to answer with."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message


def problem(status: int, reason: str, message: str) -> JSONResponse:
    """Error answer."""
    return JSONResponse({"reason": reason, "message": message}, status_code=status)


async def read_body(request: Request, limit: int) -> bytearray:
    """The body, at most `limit` bytes within BODY_DEADLINE seconds; BadBody otherwise."""
    too_large = BadBody(413, "TooLarge", f"the body is over {limit} bytes")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_DEADLINE):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_large
    except TimeoutError as e:
        raise BadBody(408, "TooSlow", f"the body did not arrive within {BODY_DEADLINE:g} s") from e
    except ClientDisconnect as e:
        raise BadBody(400, "BadRequest", "the client went away") from e
    return body


def parse_and_trim(body: bytes | bytearray) -> HeldRoster:
    """`rosters.parse`, and the memory that parsing a large body took goes back to the system: glibc
    would keep some 60 MiB of it for the life of the pod."""
    try:
        return rosters.parse(body)
    finally:
        if len(body) > LARGE_BODY:
            import ctypes  # only a large fleet pays for it

            with contextlib.suppress(OSError, AttributeError):  # another libc
                ctypes.CDLL(None).malloc_trim(0)


class ControlAPI:
    """Handlers of the control API over one hub."""

    def __init__(self, hub: Hub, max_roster: int) -> None:
        self._hub = hub
        self._max_roster = max_roster
        self._writing = asyncio.Lock()
        self._cache: tuple[object, str, bytes] = (None, "", b"")

    def app(self, client_identity: str | None) -> ASGIApp:
        """The ASGI app. `client_identity` None lets anyone in (--insecure, loopback only)."""
        routes = [
            Route("/v1/cards", self._guard(self.cards), methods=["GET"]),
            Route("/v1/roster", self._guard(self.roster), methods=["PUT"]),
            Route("/v1/verdicts", self._guard(self.verdicts), methods=["GET"]),
            Route("/v1/probe", self._guard(self.probe), methods=["POST"]),
            Route("/v1/drain", self._guard(self.drain), methods=["POST"]),
        ]
        app = Starlette(routes=routes)
        return app if client_identity is None else OnlyClient(app, client_identity, self._hub)

    @staticmethod
    def _guard(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                return await handler(request)
            except BadBody as e:
                return problem(e.status, e.reason, e.message)
            except Exception as e:
                log.exception("request failed method=%s path=%s", request.method, request.url.path)
                return problem(500, "InternalError", f"{type(e).__name__} in the sidecar, see its log")

        return guarded

    async def cards(self, request: Request) -> Response:
        """GET /v1/cards: PodCards, or 304 when If-None-Match has its ETag."""
        state, now = self._hub.state, self._hub.clock()
        stale, refused = views.stale_ranks(state, now), views.current_refusals(state, now)
        seen = (state.revision, stale, tuple((r.rank, r.reason, r.message) for r in refused))
        if self._cache[0] != seen:
            answer = views.pod_cards(state, now)
            self._cache = (seen, f'"{answer.digest}"', answer.model_dump_json().encode())
        _, etag, body = self._cache
        known = {t.strip().removeprefix("W/") for t in request.headers.get("if-none-match", "").split(",")}
        headers = {"etag": etag, "cache-control": "no-cache"}
        if etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=JSON, headers=headers)

    async def roster(self, request: Request) -> Response:
        """PUT /v1/roster: 200 with what is held, 400, 409 or 412."""
        async with self._writing:  # one large body in memory at a time, and rosters in order
            body = await read_body(request, self._max_roster)
            try:
                roster = await asyncio.to_thread(parse_and_trim, body)
            except rosters.BadRoster as e:
                raise BadBody(400, "BadRoster", str(e)) from e
            role = self._hub.state.identity.role
            if (own := next((p for p in roster.pairs if p[1].role is role), None)) is not None:
                text = f"peers.{own[0]} names a {role.value} rank of pod {own[1].pod_uid}, this pod's own role"
                raise BadBody(400, "BadRoster", text)
            refusal = self._hub.put_roster(roster, body)
            del body, roster
        if isinstance(refusal, RosterRefusal):
            status = 409 if refusal.reason in ("LowerKey", "SameKeyOtherContent") else 412
            return Response(refusal.model_dump_json(), status, media_type=JSON)
        state = self._hub.state
        held = {"term": state.key.term, "counter": state.key.counter, "hash": state.roster_hash}
        return JSONResponse({**held, "incarnation": state.incarnation})

    async def verdicts(self, request: Request) -> Response:
        """GET /v1/verdicts: PodVerdicts."""
        return Response(views.pod_verdicts(self._hub.state).model_dump_json(), media_type=JSON)

    async def probe(self, request: Request) -> Response:
        """POST /v1/probe {"pod_uids": [...]}: 202, the findings show in /v1/verdicts."""
        body = await read_body(request, SMALL_BODY)
        try:
            data = json.loads(body or b"{}")
            uids = data.get("pod_uids", [])
            if not isinstance(uids, list) or not all(isinstance(u, str) for u in uids):
                raise ValueError("pod_uids is not a list of strings")
        except (ValueError, AttributeError) as e:
            raise BadBody(400, "BadRequest", f'expected {{"pod_uids": [...]}}: {e}') from e
        return JSONResponse({"ranks": self._hub.probe(tuple(uids))}, 202)

    async def drain(self, request: Request) -> Response:
        """POST /v1/drain: PodVerdicts, whose `inflight` is to reach 0. Idempotent and final."""
        await read_body(request, SMALL_BODY)
        self._hub.drain()
        return await self.verdicts(request)


class OnlyClient:
    """ASGI middleware: only the client whose verified certificate carries this name."""

    def __init__(self, app: ASGIApp, identity: str, hub: Hub) -> None:
        self._app, self._identity, self._hub = app, identity, hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # nothing else is served here
        peer = scope.get("state", {}).get("peer")
        if why := why_not(peer, self._identity, time.time()):
            self._hub.counts["refused_clients", "Forbidden"] += 1
            log.warning("client refused client=%s message=%r", (scope.get("client") or ("?",))[0], why)
            await problem(403, "Forbidden", why)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def health_app(hub: Hub, wiring: bool) -> ASGIApp:
    """Anonymous and read-only: GET /healthz, /readyz, /metrics."""

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        answer = views.readiness(hub.state, hub.clock(), wiring, hub.tls_problem, hub.tls_warning)
        return PlainTextResponse(answer.text, 200 if answer.ready else 503)

    async def metrics(request: Request) -> Response:
        from pdtransfer.sidecar import metrics as m  # loaded at the first scrape only

        body, kind = m.render(hub, wiring)
        return Response(body, headers={"content-type": kind})

    return Starlette(routes=[Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)])
