"""Prefill's HTTP registry: SGLang's own, with the ranks' cards and the incarnation beside it.

Runs in the engine's first process. SGLang counts registrations, so that a rank that registers twice makes it
"ready" too soon; here places are counted. SGLang only logs that its port is taken; here the engine does not start.
The port is open to everyone: a rank shows that it is of this engine start by what its processes have in common.
"""

from __future__ import annotations

import errno
import hmac
import logging
import math
import os
import signal
import socket
import time
from contextlib import closing
from typing import Any

from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from pdtransfer.engines.sglang.plugin import LAUNCH
from pdtransfer.engines.sglang.registry import FIELD, HEADER, PATH, RegisteredRank, Registry

log = logging.getLogger(__name__)
BIND_S = 10.0
"""How long a port that is taken is tried: the engine that had it may be about to end."""
BIND_PAUSE_S = 0.2


class PdclusterKVBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """SGLang's registry and ours. Raises RuntimeError when its port is taken."""

    def __init__(self, host: str, port: int) -> None:
        self._ranks: dict[int, RegisteredRank] = {}
        self._launch = os.environ.get(LAUNCH, "")
        self._closing = False
        await_port(host, port)
        super().__init__(host, port)

    def _setup_routes(self) -> None:
        self.app.router.add_get(PATH, self._handle_ranks)
        super()._setup_routes()

    def _run_server(self) -> None:
        """In a thread of its own, until `close`. SGLang only logs why it ends."""
        try:
            super()._run_server()
        finally:
            if not self._closing:
                log.critical("pdcluster ends this engine: no decode finds it, its bootstrap server has ended")
                os.kill(os.getpid(), signal.SIGQUIT)  # as SGLang's processes end their engine

    def close(self) -> None:
        """No more registrations."""
        self._closing = True
        super().close()

    async def _handle_route_put(self, request: web.Request) -> web.Response:
        try:
            data = await request.json()
            rank = RegisteredRank(ip=data["rank_ip"], port=data["rank_port"], card=data[FIELD]["card"])
            launch = str(data[FIELD].get("launch", ""))
        except (KeyError, TypeError, ValueError) as error:
            log.error("a registration without a card of pdcluster is refused: %s", str(error)[:500])
            return web.Response(text="pdcluster: this registration carries no card", status=400)
        if self._launch and not hmac.compare_digest(self._launch.encode(), launch.encode(errors="replace")):
            log.error(
                "a registration of another engine start is refused: %s rank %d", rank.card.pod_uid, rank.card.rank
            )
            told = f"pdcluster: this server is of another engine start (its processes have another {LAUNCH})"
            return web.Response(text=told, status=403)
        answer: web.Response = await super()._handle_route_put(request)
        if answer.status == 200:
            # Ranks of an incarnation that is over are not served beside those of the next one.
            place = rank.card.layout.coordinates.dp
            self._ranks = {
                n: r
                for n, r in self._ranks.items()
                if r.card.layout.coordinates.dp != place or r.card.incarnation == rank.card.incarnation
            }
            self._ranks[rank.card.rank] = rank
            self._registered_count = self._places()
        return answer

    def _places(self) -> int:
        table = self.prefill_port_table
        return sum(len(stages) for dp in table.values() for cp in dp.values() for stages in cp.values())

    def _complete(self) -> bool:
        """Every rank has registered since the incarnation changed: SGLang's table never shrinks, `_ranks` does."""
        sizes = (self.dp_size, self.attn_cp_size, self.attn_tp_size, self.pp_size)
        return bool(self._is_ready()) and len(self._ranks) == math.prod(sizes)

    async def _handle_ranks(self, request: web.Request) -> web.Response:
        registry = Registry(complete=self._complete(), ranks=tuple(r for _, r in sorted(self._ranks.items())))
        return web.Response(text=registry.model_dump_json(), content_type="application/json")

    async def _handle_health_check(self, request: web.Request) -> web.Response:
        held = sorted({r.card.incarnation for r in self._ranks.values()})
        return web.Response(text="OK", headers={HEADER: ",".join(held)} if self._is_ready() else None)

    def poll(self) -> Any:
        """SGLang's base class asks for it; nothing calls it."""
        return None


def await_port(host: str, port: int) -> None:
    """Until the port can be bound, BIND_S at most. Raises RuntimeError, which names it."""
    until = time.monotonic() + BIND_S
    while True:
        try:
            for family, kind, number, _, at in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                with closing(socket.socket(family, kind, number)) as one:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    if family == socket.AF_INET6:
                        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    one.bind(at)
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise RuntimeError(
                    f"pdcluster: the bootstrap server can not have {host}:{port}: {error}. Another engine "
                    "may be there; set --disaggregation-bootstrap-port"
                ) from None
        time.sleep(BIND_PAUSE_S)
