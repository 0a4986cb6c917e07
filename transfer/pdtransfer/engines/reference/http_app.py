"""The engine's HTTP side: SGLang's routes as the router and a user of SGLang expect them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from pdtransfer.engines.reference.answers import whole
from pdtransfer.engines.reference.facts import model_info, server_info
from pdtransfer.engines.reference.http_base import Served, read_json, route, unless_gone
from pdtransfer.engines.reference.http_generate import generate
from pdtransfer.engines.reference.http_openai import chat_completions, completions
from pdtransfer.engines.reference.parse import bad, make_job
from pdtransfer.engines.reference.problems import RequestError


async def health(served: Served, request: Request) -> Response:
    """200 while the engine loop lives."""
    if not served.engine.healthy:
        raise RequestError("EngineDied", served.engine.failed or "the engine loop does not turn", 503)
    return PlainTextResponse("ok")


async def health_generate(served: Served, request: Request) -> Response:
    """200 when a token can be computed (in a disaggregated engine: when the loop lives; a token there
    needs a peer, and a probe must not use one)."""
    if served.options.disaggregated:
        return await health(served, request)
    job = make_job(served.options, served.limits, (0,), {"max_new_tokens": 1, "temperature": 0})
    await unless_gone(request, whole(served.engine, served.codec, job))
    return PlainTextResponse("ok")


async def ready(served: Served, request: Request) -> Response:
    """503 while draining or unhealthy."""
    if served.engine.draining:
        raise RequestError("Draining", "this engine is shutting down", 503)
    return await health(served, request)


async def get_server_info(served: Served, request: Request) -> Response:
    """Facts read back from the running ranks."""
    return JSONResponse(server_info(served.options, served.config, served.engine.facts, served.engine.load))


async def get_model_info(served: Served, request: Request) -> Response:
    """What model this is."""
    return JSONResponse(model_info(served.options, served.config))


async def list_models(served: Served, request: Request) -> Response:
    """OpenAI's list of one model."""
    card = {
        "id": served.options.served_model_name,
        "object": "model",
        "created": 0,
        "owned_by": "pdcluster",
        "root": str(served.options.model_path),
        "max_model_len": served.config.max_position,
    }
    return JSONResponse({"object": "list", "data": [card]})


async def get_load(served: Served, request: Request) -> Response:
    """Counts of running and waiting requests and of pages (SGLang: one entry for each DP rank)."""
    load = served.engine.load
    used = (load["pages_total"] - load["pages_free"]) * served.options.page_size
    return JSONResponse([{"dp_rank": 0, "num_tokens": used, **load}])


async def abort_request(served: Served, request: Request) -> Response:
    """Give up the request with this rid (nothing happens when there is none)."""
    data = await read_json(request)
    if not isinstance(data.get("rid"), str):
        raise bad("rid must name the request to abort")
    served.engine.cancel(data["rid"], "aborted through /abort_request")
    return PlainTextResponse("ok")


def make_app(served: Served) -> Starlette:
    """The application; all state is in `served`."""
    get, post = ["GET"], ["POST"]
    app = Starlette(
        routes=[
            Route("/health", route(health), methods=get),
            Route("/health_generate", route(health_generate), methods=get),
            Route("/ready", route(ready), methods=get),
            Route("/server_info", route(get_server_info), methods=get),
            Route("/get_server_info", route(get_server_info), methods=get),
            Route("/model_info", route(get_model_info), methods=get),
            Route("/get_model_info", route(get_model_info), methods=get),
            Route("/get_load", route(get_load), methods=get),
            Route("/v1/models", route(list_models), methods=get),
            Route("/generate", route(generate), methods=[*post, "PUT"]),
            Route("/abort_request", route(abort_request), methods=post),
            Route("/v1/completions", route(completions), methods=post),
            Route("/v1/chat/completions", route(chat_completions), methods=post),
        ]
    )
    app.state.served = served
    return app
