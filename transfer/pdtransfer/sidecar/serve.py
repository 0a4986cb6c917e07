"""Serves an ASGI app with uvicorn's HTTP/1.1 protocol, inside a loop that is already running.

uvicorn's own Server is left out on purpose: two of them in one process fight over signal handlers,
each ticks ten times a second for the life of the pod, and it sets no TLS handshake deadline. The
protocol gains what the sidecar needs: the peer's verified certificate in `scope["state"]["peer"]`, and a
deadline for clients that connect and say nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from pdtransfer.sidecar.identity import peer_of

FIRST_REQUEST = 10.0
"""Seconds from the connection until its first request must be read."""
KEEP_ALIVE = 75.0
"""Seconds an idle connection is kept: longer than a client pools it, so that the client ends it."""
HANDSHAKE = 5.0
DISCARD = 1.0
"""Seconds the rest of a body is read and dropped after an early answer, so that the client can see it."""
SHUTDOWN = 3.0


class PeerProtocol(H11Protocol):
    """uvicorn's protocol, plus the client's identity and a bound on silent or trickling clients."""

    _answered = False
    _since = 0.0
    _check: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        self.app_state = {**self.app_state, "peer": peer_of(tls.getpeercert()) if tls is not None else None}
        self._since = self.loop.time()
        self._arm(FIRST_REQUEST)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._check is not None:
            self._check.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._answered = True
        self._since = self.loop.time()
        if self.conn.their_state is h11.SEND_BODY:
            # Answered early (403, 413 ...) and the client goes on sending: uvicorn would read it for ever.
            self.loop.call_later(DISCARD, self._end_discarding, self.cycle)
        super().on_response_complete()

    def _end_discarding(self, cycle: object) -> None:
        if self.cycle is cycle and self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()

    def _arm(self, delay: float) -> None:
        self._check = self.loop.call_later(delay, self._judge)

    def _judge(self) -> None:
        # A request in work has its own deadlines (body, handler); anything else must not stay for ever.
        busy = self.cycle is not None and not self.cycle.response_complete
        limit = KEEP_ALIVE if self._answered else FIRST_REQUEST
        left = self._since + limit - self.loop.time()
        if busy:
            self._arm(limit)
        elif left > 0:
            self._arm(left)
        else:
            self.transport.abort()


class HTTPServer:
    """One listening port for one app. `port` is the real one once started."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        max_connections: int = 64,
    ) -> None:
        self.host, self.port = host, port
        self._tls = tls
        self._config = uvicorn.Config(
            app,
            http=PeerProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=int(KEEP_ALIVE),
            limit_concurrency=max_connections,
        )
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Bind and listen; OSError when the port is taken."""
        self._config.load()
        self._state.default_headers = list(self._config.encoded_headers)
        loop = asyncio.get_running_loop()
        deadline: dict[str, Any] = {"ssl": self._tls, "ssl_handshake_timeout": HANDSHAKE} if self._tls else {}
        self._server = await loop.create_server(
            lambda: PeerProtocol(config=self._config, server_state=self._state, app_state={}),
            self.host,
            self.port,
            backlog=128,
            **deadline,
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def drop_idle(self) -> None:
        """Close connections after what they are doing (their TLS identity is of older certificates)."""
        for connection in list(self._state.connections):
            connection.shutdown()

    async def stop(self) -> None:
        """No new connections; finish what is in work, within SHUTDOWN seconds."""
        if self._server is None:
            return
        self._server.close()
        self.drop_idle()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN):
                while self._state.connections or self._state.tasks:  # noqa: ASYNC110 (uvicorn's sets)
                    await asyncio.sleep(0.02)
        for task in list(self._state.tasks):
            task.cancel()
        for connection in list(self._state.connections):
            connection.transport.close()
