"""POST /v1/completions and /v1/chat/completions: OpenAI's shapes, with SGLang's bootstrap fields."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pdtransfer.engines.reference.answers import Answer, run, whole
from pdtransfer.engines.reference.http_base import Served, events, read_json, unless_gone
from pdtransfer.engines.reference.http_generate import MAX_TOP_LOGPROBS, together
from pdtransfer.engines.reference.parse import Job, bad, make_job, number, per_prompt, rooms

COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for /v1/completions."""
SAME_NAME = (
    "top_p",
    "top_k",
    "stop",
    "ignore_eos",
    "stop_token_ids",
    "n",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "regex",
    "ebnf",
)


async def completions(served: Served, request: Request) -> Response:
    """Text completion."""
    data = await read_json(request)
    if data.get("echo") or data.get("suffix"):
        raise bad("echo and suffix are not supported by the Reference engine")
    prompts = _completion_prompts(served, data.get("prompt"))
    wanted = data.get("logprobs")
    logprobs = int(number(data, "logprobs", 0, 0, MAX_TOP_LOGPROBS)) if wanted not in (None, False) else None
    jobs = _jobs(served, data, prompts, logprobs, COMPLETION_TOKENS)
    return await _answer(served, request, data, jobs, _completion_choice, "text_completion", "cmpl")


async def chat_completions(served: Served, request: Request) -> Response:
    """Chat completion."""
    data = await read_json(request)
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages or not all(_is_message(m) for m in messages):
        raise bad("messages must be a list of objects with role and content")
    if data.get("tools"):
        raise bad("tools are not supported by the Reference engine")
    logprobs = int(number(data, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS)) if data.get("logprobs") else None
    prompt = served.codec.encode(served.codec.chat(messages))
    jobs = _jobs(served, data, [prompt], logprobs, None)
    choice = _chat_chunk if data.get("stream") else _chat_choice
    kind = "chat.completion.chunk" if data.get("stream") else "chat.completion"
    return await _answer(served, request, data, jobs, choice, kind, "chatcmpl")


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _completion_prompts(served: Served, prompt: object) -> list[Any]:
    if isinstance(prompt, str):
        return [served.codec.encode(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(p, str) for p in prompt):
            return [served.codec.encode(p) for p in prompt]
        return prompt if all(isinstance(p, list) for p in prompt) else [prompt]
    raise bad("prompt must be a string, a list of strings, or token ids")


def _jobs(
    served: Served, data: dict[str, Any], prompts: list[Any], logprobs: int | None, default_tokens: int | None
) -> list[Job]:
    params = {key: data[key] for key in SAME_NAME if data.get(key) is not None}
    limit = data.get("max_completion_tokens") or data.get("max_tokens") or default_tokens
    params |= {"max_new_tokens": limit, "temperature": data.get("temperature"), "sampling_seed": data.get("seed")}
    count, batched = len(prompts), len(prompts) > 1
    hosts = per_prompt(data.get("bootstrap_host"), count, "bootstrap_host", batched)
    ports = per_prompt(data.get("bootstrap_port"), count, "bootstrap_port", batched)
    room = rooms(data.get("bootstrap_room"), count, batched)
    rid = data.get("rid") if isinstance(data.get("rid"), str) and count == 1 else ""
    return [
        make_job(
            served.options,
            served.limits,
            prompts[i],
            params,
            rid=str(rid or ""),
            bootstrap=(hosts[i], ports[i], room[i]),
            logprobs=logprobs,
        )
        for i in range(count)
    ]


Choice = Callable[[Served, int, Answer, str], dict[str, Any]]


async def _answer(
    served: Served,
    request: Request,
    data: dict[str, Any],
    jobs: list[Job],
    choice: Choice,
    kind: str,
    prefix: str,
) -> Response:
    head = {
        "id": f"{prefix}-{jobs[0].asked.rid}",
        "object": kind,
        "created": int(time.time()),
        "model": served.options.served_model_name,
    }
    if data.get("stream"):
        if len(jobs) > 1:
            raise bad("several prompts can not be streamed; send one prompt a request")
        usage = bool((data.get("stream_options") or {}).get("include_usage"))
        return await events(request, _stream(served, jobs[0], head, choice, usage))
    answers = await unless_gone(request, together(served, jobs))
    choices = [choice(served, i, a, a.text) for i, a in enumerate(answers)]
    return JSONResponse({**head, "choices": choices, "usage": _usage(answers)})


async def _stream(
    served: Served, job: Job, head: dict[str, Any], choice: Choice, usage: bool
) -> AsyncIterator[dict[str, Any]]:
    sent, last = 0, None
    if served.options.mode == "prefill":
        last = await whole(served.engine, served.codec, job)
        yield {**head, "choices": [choice(served, 0, last, last.text)]}
    else:
        async for last in run(served.engine, served.codec, job):
            delta, sent = last.text[sent:], len(last.text)
            yield {**head, "choices": [choice(served, 0, last, delta)]}
    if usage and last is not None:
        yield {**head, "choices": [], "usage": _usage([last])}


def _usage(answers: list[Answer]) -> dict[str, int]:
    prompt = sum(len(a.job.asked.prompt) for a in answers)
    completion = sum(len(a.sampled) for a in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _finish(answer: Answer) -> str | None:
    return str(answer.finish["type"]) if answer.finish else None


def _completion_choice(served: Served, index: int, answer: Answer, text: str) -> dict[str, Any]:
    logprobs = None
    if answer.job.asked.sampling.logprob:
        decode = served.codec.decode
        logprobs = {
            "tokens": [decode([s.token]) for s in answer.sampled],
            "token_logprobs": [s.logprob for s in answer.sampled],
            "top_logprobs": [{decode([t]): p for p, t in s.top} for s in answer.sampled],
            "text_offset": [],
        }
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": _finish(answer)}


def _chat_logprobs(served: Served, answer: Answer) -> dict[str, Any] | None:
    if not answer.job.asked.sampling.logprob:
        return None

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text = served.codec.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [{**entry(s.token, s.logprob), "top_logprobs": [entry(t, p) for p, t in s.top]} for s in answer.sampled]
    return {"content": content}


def _chat_choice(served: Served, index: int, answer: Answer, text: str) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": text},
        "logprobs": _chat_logprobs(served, answer),
        "finish_reason": _finish(answer),
    }


def _chat_chunk(served: Served, index: int, answer: Answer, text: str) -> dict[str, Any]:
    role = {"role": "assistant"} if len(answer.sampled) == 1 else {}
    return {"index": index, "delta": {**role, "content": text}, "finish_reason": _finish(answer)}
