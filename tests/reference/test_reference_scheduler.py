"""The scheduler as a pure machine: who runs, what is sent when, and when pages may return."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdtransfer.engines.reference.messages import (
    AbortTransfer,
    Receive,
    Sampled,
    Sampling,
    SendFinish,
    SendOpen,
    Step,
    TransferUpdate,
)
from pdtransfer.engines.reference.options import Options
from pdtransfer.engines.reference.problems import RequestError
from pdtransfer.engines.reference.requests import Asked, prompt_digest
from pdtransfer.engines.reference.scheduler import Scheduler
from pdtransfer.session.api import TransferState

GREEDY = Sampling(temperature=0)
S, F, W = TransferState.SUCCESS, TransferState.FAILED, TransferState.TRANSFERRING


def make(mode: str = "null", pages: int = 16, **more: object) -> Scheduler:
    options = Options(Path("m"), "m", page_size=4, chunked_prefill_size=8, mode=mode, max_running_requests=2, **more)
    return Scheduler(options, pages)


def ask(rid: str, length: int = 10, new: int = 3, **more: object) -> Asked:
    return Asked(rid, tuple(range(length)), new, GREEDY, room=7, bootstrap="h:1", **more)


def turn(scheduler: Scheduler, now: float = 0.0) -> list[object]:
    scheduler.plan(now)
    found = list(scheduler.commands)
    scheduler.commands.clear()
    return found


def complete(scheduler: Scheduler, step: object, token: int = 42) -> None:
    assert isinstance(step, Step)
    sampled = tuple(Sampled(i.rid, token) for i in step.items if i.sampling is not None)
    scheduler.step_done(step.number, sampled, 0.0)


def update(rid: str, rank: int, state: TransferState, releasable: bool = True, **more: object) -> TransferUpdate:
    return TransferUpdate(rank, rid, state, releasable, **more)


def metadata(length: int, digest: str | None = None) -> bytes:
    digest = digest or prompt_digest(range(length))
    data = {"first_token": 5, "logprob": None, "top_logprobs": [], "prompt_tokens": length}
    return json.dumps({**data, "prompt_digest": digest}).encode()


def test_a_prompt_runs_in_chunks_and_then_token_by_token() -> None:
    scheduler = make()
    scheduler.add(ask("a"), 0)
    spans = []
    for _ in range(4):
        (step,) = turn(scheduler)
        assert turn(scheduler) == []  # one step at a time
        spans.append((step.items[0].start, len(step.items[0].tokens), step.items[0].sampling is not None))
        complete(scheduler, step)
    assert spans == [(0, 8, False), (8, 2, True), (10, 1, True), (11, 1, True)]
    assert [o.finish for o in scheduler.outputs] == [None, None, {"type": "length", "length": 3}]
    assert scheduler.held == 0 and scheduler.allocator.available == 16


def test_decodes_go_on_while_another_prompt_is_computed() -> None:
    scheduler = make()
    scheduler.add(ask("a", length=4, new=9), 0)
    complete(scheduler, turn(scheduler)[0])
    scheduler.add(ask("b"), 0)
    (step,) = turn(scheduler)
    assert [(i.rid, len(i.tokens)) for i in step.items] == [("a", 1), ("b", 8)]


def test_more_than_max_running_requests_wait_their_turn() -> None:
    scheduler = make()
    for rid in "abc":
        scheduler.add(ask(rid, length=4, new=2), 0)
    (step,) = turn(scheduler)
    assert [i.rid for i in step.items] == ["a", "b"] and scheduler.queued == 1
    complete(scheduler, step)
    complete(scheduler, turn(scheduler)[0])
    assert [i.rid for i in turn(scheduler)[0].items] == ["c"]


def test_a_request_that_can_never_fit_is_refused_and_one_that_waits_too_long_times_out() -> None:
    scheduler = make(pages=4)
    scheduler.add(ask("huge", length=17, new=1), 0)
    assert scheduler.outputs.popleft().error.reason == "PoolTooSmall"  # type: ignore[union-attr]
    scheduler.add(ask("a", length=13, new=4), 0)
    scheduler.add(ask("b", length=13, new=4), 0)
    turn(scheduler)
    turn(scheduler, now=60.0)
    error = scheduler.outputs.popleft().error
    assert error is not None and (error.reason, error.status) == ("QueueTimeout", 503)


def test_pages_of_a_cancelled_request_return_only_after_its_step() -> None:
    scheduler = make()
    scheduler.add(ask("a"), 0)
    (step,) = turn(scheduler)
    scheduler.cancel("a", RequestError("Aborted", "gone", 499))
    assert scheduler.allocator.available == 13  # 10 + 2 tokens: 3 pages
    complete(scheduler, step)
    assert scheduler.allocator.available == 16 and scheduler.held == 0


def test_prefill_hands_over_whole_pages_as_chunks_end_and_the_rest_with_the_last() -> None:
    scheduler = make("prefill", tp_size=2)
    scheduler.add(ask("a"), 0)
    opened, first = turn(scheduler)
    assert opened == SendOpen("a", 7, 10)
    pages = first.items[0].pages
    assert (first.items[0].send_pages, first.items[0].send_first) == (pages[:2], 0)
    complete(scheduler, first)
    (second,) = turn(scheduler)
    assert (second.items[0].send_pages, second.items[0].send_first) == (pages[2:], 2)
    complete(scheduler, second)
    (finish,) = turn(scheduler)
    assert isinstance(finish, SendFinish)
    told = json.loads(finish.metadata)
    assert told["first_token"] == 42 and told["prompt_tokens"] == 10
    scheduler.transfer_update(update("a", 0, S))
    assert scheduler.outputs[-1].finish is None  # one rank is not all
    scheduler.transfer_update(update("a", 1, S))
    assert scheduler.outputs[-1].finish == {"type": "length", "length": 1}
    assert scheduler.allocator.available == 16


def test_decode_starts_only_when_every_rank_has_the_kv() -> None:
    scheduler = make("decode", tp_size=2)
    scheduler.add(ask("a"), 0)
    (receive,) = turn(scheduler)
    assert isinstance(receive, Receive) and len(receive.pages) == 3 and receive.bootstrap == "h:1"
    scheduler.transfer_update(update("a", 1, S, metadata=metadata(10)))
    assert turn(scheduler) == []
    scheduler.transfer_update(update("a", 0, S, metadata=metadata(10)))
    assert scheduler.outputs[-1].sampled == Sampled("a", 5)
    (step,) = turn(scheduler)
    assert (step.items[0].tokens, step.items[0].start) == ((5,), 10)


def test_one_failed_rank_fails_the_request_aborts_the_others_and_keeps_the_pages_until_all_settle() -> None:
    scheduler = make("decode", tp_size=2)
    scheduler.add(ask("a"), 0)
    turn(scheduler)
    scheduler.transfer_update(update("a", 0, W, False))
    scheduler.transfer_update(update("a", 1, F, True, reason="PeerUnreachable", message="gone"))
    error = scheduler.outputs[-1].error
    assert error is not None and (error.reason, error.status) == ("PeerUnreachable", 503)
    assert turn(scheduler) == [AbortTransfer("a", "gone")]
    scheduler.transfer_update(update("a", 0, F, False, reason="Aborted"))
    assert scheduler.allocator.available == 13 and scheduler.held == 1
    scheduler.transfer_update(update("a", 0, F, True, reason="Aborted"))
    assert scheduler.allocator.available == 16 and scheduler.held == 0


@pytest.mark.parametrize(
    ("data", "reason"),
    [(metadata(9), "PromptMismatch"), (metadata(10, "f" * 32), "PromptMismatch"), (b"{", "BadMetadata")],
)
def test_metadata_of_another_prompt_is_an_error_and_never_a_token(data: bytes, reason: str) -> None:
    scheduler = make("decode")
    scheduler.add(ask("a"), 0)
    turn(scheduler)
    scheduler.transfer_update(update("a", 0, S, metadata=data))
    (output,) = scheduler.outputs
    assert output.error is not None and output.error.reason == reason and output.sampled is None
    assert scheduler.allocator.available == 16


def test_a_transfer_that_never_ends_is_given_up_at_its_deadline() -> None:
    scheduler = make("decode", waiting_timeout=10.0, kv_timeout=20.0)
    scheduler.add(ask("a"), 0)
    turn(scheduler, now=1.0)
    assert scheduler.next_deadline() == 61.0
    assert [type(c) for c in turn(scheduler, now=61.0)] == [AbortTransfer]
    assert scheduler.outputs[-1].error.reason == "DeadlineExceeded"  # type: ignore[union-attr]
    assert scheduler.allocator.available == 13  # no rank has said that nothing writes any more
    scheduler.transfer_update(update("a", 0, F, True, reason="Aborted"))
    assert scheduler.allocator.available == 16


def test_a_room_that_comes_again_is_asked_for_under_a_new_identity() -> None:
    scheduler = make("decode")
    identities = []
    for rid in ("a", "b"):
        scheduler.add(ask(rid), 0.0)
        (received,) = [c for c in turn(scheduler) if isinstance(c, Receive)]
        identities.append((received.room, received.attempt))
        scheduler.cancel(rid, RequestError("Aborted", "gone", 499))
        scheduler.transfer_update(update(rid, 0, F))
    assert identities[0][0] == identities[1][0] and identities[0][1] < identities[1][1]


def test_the_age_of_a_step_is_known_until_it_ends() -> None:
    scheduler = make()
    assert scheduler.step_age(5.0) == 0.0
    scheduler.add(ask("a"), 0.0)
    (step,) = turn(scheduler, 1.0)
    assert scheduler.step_age(4.5) == 3.5
    complete(scheduler, step)
    assert scheduler.step_age(9.0) == 0.0


def test_a_first_token_that_ends_the_answer_needs_no_step() -> None:
    scheduler = make("decode")
    scheduler.add(ask("a", new=1), 0)
    turn(scheduler)
    scheduler.transfer_update(update("a", 0, S, metadata=metadata(10)))
    assert scheduler.outputs[-1].finish == {"type": "length", "length": 1}
    assert turn(scheduler) == [] and scheduler.held == 0
