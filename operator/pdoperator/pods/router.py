"""Client of a router pod's worker API (smg 1.13, SGLang's gateway).

Adding and removing are accepted (202) and happen in the background; a URL that is still being
removed answers 409. Both are seen again in the next GET /workers, so nothing here waits for them.
A removal takes 5 s, in which the worker is `draining` and gets no new request. It must not be asked for
twice: the second one drops the worker at once, and the first one, when its time is over, whatever was
added at that URL meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from pdoperator.api.names import PORT_ROUTER_HTTP
from pdoperator.domain.actions import DesiredWorker, SetWorkers
from pdoperator.domain.observed import Worker
from pdoperator.pods.http import BodyTooLarge, origin, read_limited

ANSWER_BYTES = 8 << 20
REMOVAL_SECONDS = 10.0
"""An accepted removal is not asked for again for so long, also while a busy router does not show yet that it drains."""


class RouterError(Exception):
    """A router pod did not do what was asked; the message says what it answered."""


class _WorkerAnswer(BaseModel):
    """One entry of GET /workers; the many other fields are smg's own."""

    model_config = ConfigDict(extra="ignore")
    id: str
    url: str
    worker_type: str = ""
    bootstrap_port: int | None = None
    pairing_protocol: str | None = None
    is_healthy: bool = False
    status: object = None
    """`draining` while it is being removed; other versions of smg may tell something else, or nothing."""


class _WorkersAnswer(BaseModel):
    model_config = ConfigDict(extra="ignore")
    workers: tuple[_WorkerAnswer, ...]


class RouterClient:
    """One for the process; the key goes with each call. `deadline` is seconds per request."""

    def __init__(
        self,
        *,
        port: int = PORT_ROUTER_HTTP,
        deadline: float = 2.0,
        in_flight: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port = port
        self._clock = clock
        self._removing: dict[tuple[str, str], float] = {}
        """(router address, worker id) -> when its removal was accepted."""
        self._deadline = deadline
        self._slots = asyncio.Semaphore(in_flight)
        self._client = httpx.AsyncClient(trust_env=False, timeout=httpx.Timeout(5.0))

    async def workers(self, router_ip: str, key: str) -> tuple[Worker, ...]:
        """What this router pod lists now. Raises RouterError."""
        status, data = await self._request("GET", router_ip, "/workers", key)
        if status != 200:
            raise RouterError(_refused("GET /workers", status, data))
        try:
            answer = _WorkersAnswer.model_validate_json(data)
        except ValidationError as error:
            raise RouterError(f"GET /workers: the answer is not understood ({error.error_count()} errors)") from error
        return tuple(
            Worker(
                w.id,
                w.url,
                w.worker_type,
                w.bootstrap_port,
                w.pairing_protocol or "",
                w.is_healthy,
                draining=w.status == "draining",
            )
            for w in answer.workers
        )

    async def set_workers(self, action: SetWorkers, key: str) -> None:
        """Remove first, then add; every entry is tried, RouterError then lists what failed."""
        removals = await asyncio.gather(
            *(self._remove(action.router_ip, i, key) for i in action.remove), return_exceptions=True
        )
        additions = await asyncio.gather(
            *(self._add(action.router_ip, w, key) for w in action.add), return_exceptions=True
        )
        failed = [r for r in (*removals, *additions) if r is not None]
        for result in failed:
            if not isinstance(result, RouterError):
                raise result
        if failed:
            raise RouterError("; ".join(str(f) for f in failed))

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def _add(self, ip: str, worker: DesiredWorker, key: str) -> None:
        body: dict[str, Any] = {"url": worker.url, "worker_type": worker.worker_type}
        if worker.bootstrap_port is not None:
            body["bootstrap_port"] = worker.bootstrap_port
        if worker.pairing_protocol:
            body["pairing_protocol"] = worker.pairing_protocol
        status, data = await self._request("POST", ip, "/workers", key, body)
        # 409: listed already, or its removal is still under way; the next GET tells which.
        if status not in (200, 201, 202, 409):
            raise RouterError(_refused(f"POST /workers {worker.url}", status, data))

    async def _remove(self, ip: str, worker_id: str, key: str) -> None:
        now = self._clock()
        self._removing = {which: at for which, at in self._removing.items() if now - at < REMOVAL_SECONDS}
        if (ip, worker_id) in self._removing:
            return
        status, data = await self._request("DELETE", ip, f"/workers/{worker_id}", key)
        if status not in (200, 202, 204, 404):
            raise RouterError(_refused(f"DELETE /workers/{worker_id}", status, data))
        self._removing[ip, worker_id] = now

    async def _request(
        self, method: str, ip: str, path: str, key: str, body: dict[str, Any] | None = None
    ) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {key}", "Accept": "application/json"}
        try:
            async with self._slots, asyncio.timeout(self._deadline):
                url = origin("http", ip, self._port) + path
                async with self._client.stream(method, url, headers=headers, json=body) as response:
                    return response.status_code, await read_limited(response, ANSWER_BYTES)
        except TimeoutError as error:
            raise RouterError(f"{method} {path} at {ip}: no answer within {self._deadline:g} s") from error
        except (httpx.HTTPError, OSError, BodyTooLarge) as error:
            raise RouterError(f"{method} {path} at {ip}: {type(error).__name__} {error}") from error


def _refused(what: str, status: int, data: bytes) -> str:
    return f"{what} answered {status} {data[:200].decode(errors='replace')}"
