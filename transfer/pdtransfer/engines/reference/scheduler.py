"""Decides, without any I/O, what the ranks do next: admission, chunks, batches, transfers, page release.

Continuous batching over one flat step: every running request decodes one token, and what is left of the
token budget goes to prompts, a chunk at a time. A request reserves all its pages when admitted, so none
has to be retracted. `commands` and `outputs` are what the engine carries out after each call.
"""

from __future__ import annotations

from collections import deque

from pdtransfer.engines.reference.messages import (
    AbortTransfer,
    LeaderMessage,
    Receive,
    Sampled,
    SendFinish,
    SendOpen,
    Step,
    StepItem,
    TransferUpdate,
)
from pdtransfer.engines.reference.options import Options
from pdtransfer.engines.reference.pages import PageAllocator, pages_for
from pdtransfer.engines.reference.problems import RequestError, failed_transfer
from pdtransfer.engines.reference.requests import (
    Asked,
    Output,
    Phase,
    Request,
    Transfer,
    pack_metadata,
    unpack_metadata,
)


class Scheduler:
    """State of all requests of one engine. Times are seconds of any monotonic clock."""

    def __init__(self, options: Options, pages: int) -> None:
        self._options = options
        self._page = options.page_size
        self.allocator = PageAllocator(pages)
        self._requests: dict[str, Request] = {}
        self._waiting: deque[str] = deque()
        self._step: Step | None = None
        self._steps = 0
        self._step_since = 0.0
        self._attempts = 0
        self.commands: deque[LeaderMessage] = deque()
        self.outputs: deque[Output] = deque()

    @property
    def live(self) -> int:
        """Requests whose client still waits."""
        return sum(r.phase is not Phase.ENDED for r in self._requests.values())

    @property
    def held(self) -> int:
        """Requests that hold anything: live ones, and ended ones whose pages may not return yet."""
        return len(self._requests)

    @property
    def queued(self) -> int:
        """Requests that wait for a place or for pages."""
        return len(self._waiting)

    def pages_needed(self, asked: Asked) -> int:
        """Pages a request reserves: a prefill needs the prompt's, the others the answer's too."""
        answer = 0 if self._options.mode == "prefill" else asked.max_new_tokens - 1
        return pages_for(len(asked.prompt) + answer, self._page)

    def add(self, asked: Asked, now: float) -> None:
        """Take a request into the queue, or refuse it at once."""
        needed = self.pages_needed(asked)
        if asked.rid in self._requests:
            self._refuse(asked.rid, RequestError("DuplicateRequest", f"rid {asked.rid} is running", 400))
        elif needed > self.allocator.total:
            self._refuse(
                asked.rid,
                RequestError(
                    "PoolTooSmall",
                    f"the request needs {needed} KV pages of {self._page} tokens, the pool has "
                    f"{self.allocator.total}; shorten it or raise --max-total-tokens",
                    400,
                ),
            )
        else:
            self._requests[asked.rid] = Request(asked, now + self._options.queue_timeout)
            self._waiting.append(asked.rid)

    def cancel(self, rid: str, error: RequestError) -> None:
        """End a request early (client gone, stop string, deadline, failed transfer)."""
        request = self._requests.get(rid)
        if request is None or request.phase is Phase.ENDED:
            return
        self._end(request, Output(rid, error=error))

    def plan(self, now: float) -> None:
        """Expire, admit, and put the next step into `commands` unless one is under way."""
        for request in list(self._requests.values()):
            if request.phase in (Phase.WAITING, Phase.RECEIVING, Phase.SENDING) and now >= request.deadline:
                self._expire(request)
        self._admit(now)
        if self._step is None:
            items = self._items()
            if items:
                self._steps += 1
                self._step_since = now
                self._step = Step(self._steps, tuple(items))
                self.commands.append(self._step)

    def next_deadline(self) -> float | None:
        """When `plan` has to be called at the latest."""
        bounded = (Phase.WAITING, Phase.RECEIVING, Phase.SENDING)
        return min((r.deadline for r in self._requests.values() if r.phase in bounded), default=None)

    def step_age(self, now: float) -> float:
        """Seconds that the step under way has taken, 0 when there is none."""
        return now - self._step_since if self._step is not None else 0.0

    def step_done(self, number: int, sampled: tuple[Sampled, ...], now: float) -> None:
        """Take the results of the step under way."""
        step, self._step = self._step, None
        if step is None or step.number != number:
            raise RuntimeError(f"step {number} ended, but {step.number if step else 'none'} is under way")
        by_rid = {s.rid: s for s in sampled}
        for item in step.items:
            request = self._requests[item.rid]
            request.in_step = False
            request.computed = item.start + len(item.tokens)
            request.sent_pages += len(item.send_pages)
            if request.phase is Phase.ENDED:
                self._release(request)
            elif item.sampling is not None:
                self._sampled(request, by_rid[item.rid], now)

    def transfer_update(self, update: TransferUpdate) -> None:
        """Take one rank's news of a request's transfer."""
        request = self._requests.get(update.rid)
        if request is None or request.transfer is None:
            return
        transfer = request.transfer
        transfer.updates[update.rank] = update
        failure = transfer.failure
        if request.phase is Phase.ENDED:
            if failure is not None:
                self._abort_transfer(request, failure.message)
        elif failure is not None:
            self._end(request, Output(update.rid, error=failed_transfer(failure.reason, failure.message)))
        elif transfer.succeeded:
            self._transferred(request)
        self._release(request)

    def _refuse(self, rid: str, error: RequestError) -> None:
        self.outputs.append(Output(rid, error=error))

    def _expire(self, request: Request) -> None:
        if request.phase is Phase.WAITING:
            error = RequestError("QueueTimeout", "no KV pages or no place became free in time", 503)
        else:
            error = failed_transfer(
                "DeadlineExceeded", f"the KV transfer took over {self._options.transfer_timeout:g} s"
            )
        self._end(request, Output(request.asked.rid, error=error))

    def _admit(self, now: float) -> None:
        while self._waiting:
            request = self._requests[self._waiting[0]]
            asked, needed = request.asked, self.pages_needed(request.asked)
            if self.live - len(self._waiting) >= self._options.max_running_requests:
                return
            if needed > self.allocator.available:
                return
            self._waiting.popleft()
            request.pages = self.allocator.allocate(needed)
            request.phase = Phase.RUNNING
            if self._options.mode == "null":
                continue
            request.transfer = Transfer(self._options.tp_size)
            request.deadline = now + self._options.transfer_timeout
            tokens = len(asked.prompt)
            assert asked.room is not None
            if self._options.mode == "prefill":
                self.commands.append(SendOpen(asked.rid, asked.room, tokens))
            else:
                request.phase = Phase.RECEIVING
                pages = request.pages[: pages_for(tokens, self._page)]
                # Never the same twice: a client may use its room again, and the prefill must not take
                # that for the request it has served.
                self._attempts += 1
                self.commands.append(Receive(asked.rid, asked.room, self._attempts, asked.bootstrap, pages, tokens))

    def _items(self) -> list[StepItem]:
        running = [r for r in self._requests.values() if r.phase is Phase.RUNNING]
        items = [self._decode_item(r) for r in running if not r.prefilling]
        budget = self._options.chunked_prefill_size
        for request in running:
            if not request.prefilling:
                continue
            left = len(request.asked.prompt) - request.computed
            count = left if left <= budget else budget // self._page * self._page
            if count == 0:
                break
            budget -= count
            items.append(self._prefill_item(request, count))
        for item in items:
            self._requests[item.rid].in_step = True
        return items

    def _decode_item(self, request: Request) -> StepItem:
        asked = request.asked
        return StepItem(asked.rid, (request.generated[-1],), request.computed, request.pages, asked.sampling)

    def _prefill_item(self, request: Request, count: int) -> StepItem:
        asked, start = request.asked, request.computed
        last = start + count == len(asked.prompt)
        send: tuple[int, ...] = ()
        if self._options.mode == "prefill":
            # A page is finished when its last token is computed; the prompt's last page with the prompt.
            done = len(request.pages) if last else (start + count) // self._page
            send = request.pages[request.sent_pages : done]
        return StepItem(
            rid=asked.rid,
            tokens=asked.prompt[start : start + count],
            start=start,
            pages=request.pages,
            sampling=asked.sampling if last else None,
            send_pages=send,
            send_first=request.sent_pages,
        )

    def _sampled(self, request: Request, sampled: Sampled, now: float) -> None:
        rid = request.asked.rid
        request.generated.append(sampled.token)
        if self._options.mode == "prefill":
            self.outputs.append(Output(rid, sampled))
            self.commands.append(SendFinish(rid, pack_metadata(request.asked.prompt, sampled)))
            request.phase = Phase.SENDING
            request.deadline = now + self._options.transfer_timeout
            if request.transfer is not None and request.transfer.succeeded:
                self._transferred(request)
            return
        finish = request.finish_reason(sampled.token)
        output = Output(rid, sampled, finish)
        if finish is None:
            self.outputs.append(output)
        else:
            self._end(request, output)

    def _transferred(self, request: Request) -> None:
        """Every rank has succeeded: prefill is done, decode takes the first token and goes on."""
        asked, transfer = request.asked, request.transfer
        assert transfer is not None
        if self._options.mode == "prefill":
            if request.phase is Phase.SENDING:
                finish = request.finish_reason(request.generated[-1])
                self._end(request, Output(asked.rid, finish=finish or {"type": "length", "length": 1}))
            return
        if request.phase is not Phase.RECEIVING:
            return
        try:
            first = unpack_metadata(asked.rid, asked.prompt, transfer.updates[0].metadata)
        except RequestError as error:
            self._end(request, Output(asked.rid, error=error))
            return
        request.phase = Phase.RUNNING
        request.computed = len(asked.prompt)
        request.generated.append(first.token)
        finish = request.finish_reason(first.token)
        if finish is None:
            self.outputs.append(Output(asked.rid, first))
        else:
            self._end(request, Output(asked.rid, first, finish))

    def _end(self, request: Request, output: Output) -> None:
        if request.phase is Phase.WAITING:
            self._waiting.remove(request.asked.rid)
        request.phase = Phase.ENDED
        self.outputs.append(output)
        if output.error is not None:
            self._abort_transfer(request, output.error.message)
        self._release(request)

    def _abort_transfer(self, request: Request, reason: str) -> None:
        transfer = request.transfer
        if transfer is not None and not transfer.aborted and not transfer.settled:
            transfer.aborted = True
            self.commands.append(AbortTransfer(request.asked.rid, reason))

    def _release(self, request: Request) -> None:
        if self._requests.get(request.asked.rid) is not request:
            return  # released already
        settled = request.transfer is None or request.transfer.settled
        if request.phase is Phase.ENDED and not request.in_step and settled:
            self.allocator.free(request.pages)
            del self._requests[request.asked.rid]
