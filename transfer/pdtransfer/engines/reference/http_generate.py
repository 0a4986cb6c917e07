"""POST /generate: SGLang's native request and answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pdtransfer.engines.reference.answers import Answer, run, whole
from pdtransfer.engines.reference.http_base import Served, events, read_json, unless_gone
from pdtransfer.engines.reference.messages import Sampled
from pdtransfer.engines.reference.parse import Job, bad, make_job, number, per_prompt, rooms

MAX_TOP_LOGPROBS = 128
"""SGLang's prefill dies of more in a disaggregated setup (rule H12); here they are refused."""


async def generate(served: Served, request: Request) -> Response:
    """One prompt or a batch; text or input_ids; whole or streamed."""
    data = await read_json(request)
    jobs, batched = parse_generate(served, data)
    if data.get("stream"):
        if batched:
            raise bad("a batch can not be streamed; send one prompt a request")
        return await events(request, _stream(served, jobs[0]))
    answers = await unless_gone(request, together(served, jobs))
    bodies = [body(a) for a in answers]
    return JSONResponse(bodies if batched else bodies[0])


async def together(served: Served, jobs: list[Job]) -> list[Answer]:
    """All answers; the first failure cancels the rest."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_caught(served, job)) for job in jobs]
    found = []
    for task in tasks:
        result = task.result()
        if isinstance(result, Exception):
            raise result
        found.append(result)
    return found


async def _caught(served: Served, job: Job) -> Answer | Exception:
    # A task group would wrap the error; a batch of one must answer with the error itself.
    try:
        return await whole(served.engine, served.codec, job)
    except Exception as error:
        return error


async def _stream(served: Served, job: Job) -> AsyncIterator[dict[str, Any]]:
    if served.options.mode == "prefill":
        yield body(await whole(served.engine, served.codec, job))
        return
    async for answer in run(served.engine, served.codec, job):
        yield body(answer)


def parse_generate(served: Served, data: dict[str, Any]) -> tuple[list[Job], bool]:
    """The jobs of a request, and whether it is a batch."""
    prompts, batched = _prompts(served, data)
    count = len(prompts)
    params = per_prompt(data.get("sampling_params") or {}, count, "sampling_params", batched)
    if not all(isinstance(p, dict) for p in params):
        raise bad("sampling_params must be an object")
    rids = per_prompt(data.get("rid") or "", count, "rid", batched)
    if not all(isinstance(r, str) for r in rids) or (count > 1 and len(set(rids)) < count and any(rids)):
        raise bad("rid must be a string, another one for each prompt")
    logprobs = None
    if data.get("return_logprob"):
        logprobs = int(number(data, "top_logprobs_num", 0, 0, MAX_TOP_LOGPROBS))
    hosts = per_prompt(data.get("bootstrap_host"), count, "bootstrap_host", batched)
    ports = per_prompt(data.get("bootstrap_port"), count, "bootstrap_port", batched)
    room = rooms(data.get("bootstrap_room"), count, batched)
    jobs = [
        make_job(
            served.options,
            served.limits,
            prompts[i],
            params[i],
            rid=rids[i],
            bootstrap=(hosts[i], ports[i], room[i]),
            logprobs=logprobs,
        )
        for i in range(count)
    ]
    return jobs, batched


def _prompts(served: Served, data: dict[str, Any]) -> tuple[list[Any], bool]:
    text, ids = data.get("text"), data.get("input_ids")
    if (text is None) == (ids is None):
        raise bad("exactly one of text and input_ids must be given")
    if isinstance(text, str):
        return [served.codec.encode(text)], False
    if isinstance(text, list) and text and all(isinstance(t, str) for t in text):
        return [served.codec.encode(t) for t in text], True
    if isinstance(ids, list) and ids and all(isinstance(i, list) for i in ids):
        return ids, True
    if isinstance(ids, list):
        return [ids], False
    raise bad("text must be a string or a list of strings, input_ids a list of integers or a list of those")


def body(answer: Answer) -> dict[str, Any]:
    """SGLang's answer: text and ids from the start, also in a stream's chunks."""
    asked = answer.job.asked
    meta: dict[str, Any] = {
        "id": asked.rid,
        "finish_reason": answer.finish,
        "prompt_tokens": len(asked.prompt),
        "completion_tokens": len(answer.sampled),
        "cached_tokens": 0,
        "weight_version": "default",
        "e2e_latency": answer.seconds,
        "first_token_latency": answer.first_token_s,
    }
    if asked.sampling.logprob:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [[s.logprob, s.token, None] for s in answer.sampled]
        if answer.job.top_logprobs:
            meta["input_top_logprobs"] = []
            meta["output_top_logprobs"] = [_top(s) for s in answer.sampled]
    return {"text": answer.text, "output_ids": answer.ids, "meta_info": meta}


def _top(sampled: Sampled) -> list[list[Any]]:
    return [[logprob, token, None] for logprob, token in sampled.top]
