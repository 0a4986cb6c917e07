"""What all routes share: the body, errors as JSON, server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from pdtransfer.engines.reference.engine import Engine
from pdtransfer.engines.reference.model_config import LlamaConfig
from pdtransfer.engines.reference.options import Options
from pdtransfer.engines.reference.parse import Limits, bad
from pdtransfer.engines.reference.problems import RequestError
from pdtransfer.engines.reference.tokenizer import TextCodec

T = TypeVar("T")
MAX_BODY = 16 << 20


@dataclass(frozen=True)
class Served:
    """What the routes work with."""

    options: Options
    config: LlamaConfig
    codec: TextCodec
    engine: Engine

    @property
    def limits(self) -> Limits:
        """Bounds for the checks of requests."""
        return Limits(self.config.max_position, self.config.vocab, self.config.eos_ids)


async def read_json(request: Request) -> dict[str, Any]:
    """The body as a JSON object."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise RequestError("BadRequest", f"the body is over {MAX_BODY} bytes", 413)
    try:
        data = json.loads(body)
    except ValueError as error:
        raise bad(f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise bad("the body must be a JSON object")
    return data


def error_response(error: RequestError) -> JSONResponse:
    """An error as {"error": {"type", "message", "code"}}."""
    return JSONResponse(error.body(), error.status)


def route(handler: Callable[[Served, Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Give the handler what is served, and turn RequestError into its status."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request.app.state.served, request)
        except RequestError as error:
            return error_response(error)

    return answer


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await `work`, but cancel it when the client disconnects (the engine then frees its pages)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RequestError("Aborted", "the client closed the connection", 499)
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def events(request: Request, chunks: AsyncIterator[dict[str, Any]]) -> Response:
    """Server-sent events ending with [DONE]. The first chunk is awaited before the status is sent, so
    that a request that fails before its first token has a real status code."""
    first = await unless_gone(request, _next(chunks))

    async def body() -> AsyncIterator[str]:
        try:
            chunk = first
            while chunk is not None:
                yield f"data: {json.dumps(chunk)}\n\n"
                chunk = await _next(chunks)
        except RequestError as error:
            yield f"data: {json.dumps(error.body())}\n\n"
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]
        yield "data: [DONE]\n\n"

    return StreamingResponse(body(), media_type="text/event-stream")


async def _next(chunks: AsyncIterator[dict[str, Any]]) -> dict[str, Any] | None:
    return await anext(chunks, None)
