"""Runs a checked job on the engine and turns its tokens into text: what every HTTP shape is built from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from pdtransfer.engines.reference.engine import Engine
from pdtransfer.engines.reference.messages import Sampled
from pdtransfer.engines.reference.parse import Job
from pdtransfer.engines.reference.problems import RequestError
from pdtransfer.engines.reference.requests import Output
from pdtransfer.engines.reference.tokenizer import TextCodec


@dataclass
class Answer:
    """A job's answer so far; the last one of a stream has `finish`."""

    job: Job
    started: float
    text: str = ""
    sampled: list[Sampled] = field(default_factory=list)
    finish: dict[str, object] | None = None
    first_token_s: float | None = None

    @property
    def ids(self) -> list[int]:
        """Token ids of the answer."""
        return [s.token for s in self.sampled]

    @property
    def seconds(self) -> float:
        """Since the request came in."""
        return time.monotonic() - self.started


async def run(engine: Engine, codec: TextCodec, job: Job) -> AsyncIterator[Answer]:
    """The growing answer, once for every token; raises RequestError when the request fails.

    Leaving the iterator early (client gone) cancels the request on the engine."""
    if engine.draining:
        raise RequestError("Draining", "this engine is shutting down and takes no new requests", 503)
    if not engine.healthy:
        raise RequestError("EngineDied", engine.failed or "the engine loop does not turn", 503)
    if engine.prepare is not None:
        await engine.prepare(job.asked)
    loop = asyncio.get_running_loop()
    outputs: asyncio.Queue[Output] = asyncio.Queue()
    answer = Answer(job, time.monotonic())

    def sink(output: Output) -> None:
        try:
            loop.call_soon_threadsafe(outputs.put_nowait, output)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    engine.submit(job.asked, sink)
    ended = False
    try:
        while not ended:
            output = await outputs.get()
            if output.error is not None:
                ended = True
                raise output.error
            if output.sampled is not None:
                answer.sampled.append(output.sampled)
                answer.first_token_s = answer.first_token_s or answer.seconds
            ended = output.finish is not None
            answer.finish = output.finish
            _render(answer, codec)
            yield answer
            if answer.finish is not None:
                return  # of its own, or a stop string: then `finally` cancels the rest
    finally:
        if not ended:
            engine.cancel(job.asked.rid, "the client is gone or has what it asked for")


async def whole(engine: Engine, codec: TextCodec, job: Job) -> Answer:
    """The finished answer."""
    last: Answer | None = None
    async for answer in run(engine, codec, job):
        last = answer
    if last is None or last.finish is None:
        raise RequestError("EngineDied", "the engine gave no answer", 500)
    return last


def _render(answer: Answer, codec: TextCodec) -> None:
    """Set text, cutting at a stop string and holding back half a character at the stream's end."""
    ids = answer.ids
    matched = answer.finish.get("matched") if answer.finish else None
    text = codec.decode(ids[:-1] if ids and matched == ids[-1] else ids)
    cuts = [(at, s) for s in answer.job.stop if (at := text.find(s)) >= 0]
    if cuts:
        at, stop = min(cuts)
        text = text[:at]
        answer.finish = {"type": "stop", "matched": stop}
    elif answer.finish is None:
        text = text.rstrip("\ufffd")
    answer.text = text
