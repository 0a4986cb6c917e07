"""The operator's proof by a small real request, sent to servers that run here."""

from __future__ import annotations

import asyncio

from kit_pair import Pair
from kit_server import Server

from pdoperator.domain.actions import ProbeEnd, StartProbe
from pdoperator.domain.realprobe import ProbeResult
from pdoperator.pods.engine_probe import EngineProber


def end(server: Server) -> ProbeEnd:
    """A server as the operator names a pod's."""
    return ProbeEnd(server.setting.role, f"uid-{server.setting.role}", "127.0.0.1", port=server.port)


def probe(both: Pair, deadline: float) -> ProbeResult:
    """What came of one request; `deadline` in seconds."""

    async def once() -> ProbeResult:
        told: asyncio.Queue[str] = asyncio.Queue()
        prober = EngineProber(bootstrap_port=both.prefill.bootstrap_port)
        prober.news = told.put_nowait
        try:
            prober.start("c", StartProbe(end(both.prefill), end(both.decode), deadline=deadline))
            await asyncio.wait_for(told.get(), deadline + 30)
            (result,) = prober.look("c").results
            return result
        finally:
            await prober.close()

    return asyncio.run(once())
