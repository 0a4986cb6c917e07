"""Prefill's HTTP registry: SGLang's own, with the ranks' cards and the incarnation beside it.

Runs in the engine's first process. SGLang counts registrations, so that a rank that registers twice makes it
"ready" too soon; here places are counted.
"""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web
from pydantic import ValidationError
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from pdtransfer.engines.sglang.registry import FIELD, HEADER, PATH, RegisteredRank, Registry

log = logging.getLogger(__name__)


class PdclusterKVBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """SGLang's registry and ours."""

    def __init__(self, host: str, port: int) -> None:
        self._ranks: dict[int, RegisteredRank] = {}
        super().__init__(host, port)

    def _setup_routes(self) -> None:
        self.app.router.add_get(PATH, self._handle_ranks)
        super()._setup_routes()

    async def _handle_route_put(self, request: web.Request) -> web.Response:
        data = await request.json()
        try:
            rank = RegisteredRank(ip=data["rank_ip"], port=data["rank_port"], card=data[FIELD]["card"])
        except (KeyError, TypeError, ValidationError) as error:
            log.error("a registration without a card of pdcluster is refused: %s", error)
            return web.Response(text="pdcluster: this registration carries no card", status=400)
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

    async def _handle_ranks(self, request: web.Request) -> web.Response:
        registry = Registry(complete=self._is_ready(), ranks=tuple(r for _, r in sorted(self._ranks.items())))
        return web.Response(text=registry.model_dump_json(), content_type="application/json")

    async def _handle_health_check(self, request: web.Request) -> web.Response:
        held = sorted({r.card.incarnation for r in self._ranks.values()})
        return web.Response(text="OK", headers={HEADER: ",".join(held)} if self._is_ready() else None)

    def poll(self) -> Any:
        """SGLang's base class asks for it; nothing calls it."""
        return None
