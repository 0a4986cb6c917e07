"""The scheduler under any order of events: every request ends exactly once, no page is lost, none is reused
while a step or a transfer may still touch it."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from pdtransfer.engines.reference.requests import Asked, Transfer, prompt_digest
from pdtransfer.engines.reference.scheduler import Scheduler
from pdtransfer.session.api import TransferState as S

RANKS, PAGES = 2, 12


class World:
    """Ranks that answer in any order: a model of what the real ones may do."""

    def __init__(self, mode: str, seed: int) -> None:
        options = Options(
            Path("m"),
            "m",
            page_size=4,
            chunked_prefill_size=8,
            mode=mode,
            tp_size=RANKS,
            max_running_requests=3,
            waiting_timeout=5,
            kv_timeout=5,
            queue_timeout=20,
        )
        self.scheduler = Scheduler(options, PAGES)
        self.random = random.Random(seed)
        self.step: Step | None = None
        self.open: dict[tuple[str, int], S] = {}
        self.finished: set[str] = set()
        self.touched: dict[str, set[int]] = {}
        self.prompts: dict[str, int] = {}
        self.ends: Counter[str] = Counter()
        self.now = 0.0

    def pump(self) -> None:
        """Let the scheduler plan, hear its news, then carry out its commands."""
        self.hear()
        self.scheduler.plan(self.now)
        self.hear()
        while self.scheduler.commands:
            command = self.scheduler.commands.popleft()
            if isinstance(command, Step):
                assert self.step is None
                self.step = command
                for item in command.items:
                    self._touch(item.rid, item.pages)
            elif isinstance(command, SendOpen | Receive):
                for rank in range(RANKS):
                    self.open[command.rid, rank] = S.WAITING
                if isinstance(command, Receive):
                    self._touch(command.rid, command.pages)
            elif isinstance(command, SendFinish):
                self.finished.add(command.rid)
            elif isinstance(command, AbortTransfer):
                assert any(rid == command.rid for rid, _ in self.open)

    def hear(self) -> None:
        """Take the news; pages of ended requests that nothing touches any more are free."""
        while self.scheduler.outputs:
            output = self.scheduler.outputs.popleft()
            assert self.ends[output.rid] == 0, "news after the end"
            self.ends[output.rid] += output.finish is not None or output.error is not None
        for rid in list(self.touched):
            in_step = self.step is not None and any(i.rid == rid for i in self.step.items)
            if self.ends[rid] and not in_step and not any(r == rid for r, _ in self.open):
                del self.touched[rid]

    def _touch(self, rid: str, pages: tuple[int, ...]) -> None:
        for other, held in self.touched.items():
            assert other == rid or not held & set(pages), "a page is used by two requests"
        self.touched[rid] = self.touched.get(rid, set()) | set(pages)

    def finish_step(self) -> None:
        if self.step is None:
            return
        step, self.step = self.step, None
        sampled = tuple(Sampled(i.rid, 9) for i in step.items if i.sampling is not None)
        self.scheduler.step_done(step.number, sampled, self.now)
        self.pump()

    def move_transfer(self, failing: bool) -> None:
        if not self.open:
            return
        (rid, rank), state = self.random.choice(sorted(self.open.items()))
        metadata = None
        if failing or state is S.FAILED:
            releasable = state is S.FAILED or self.random.random() < 0.5
            state = S.FAILED
        else:
            sendable = self.scheduler._options.mode == "decode" or rid in self.finished
            state, releasable = (S.SUCCESS, True) if sendable else (S.TRANSFERRING, False)
            length = self.prompts[rid]
            metadata = json.dumps(
                {
                    "first_token": 5,
                    "logprob": None,
                    "top_logprobs": [],
                    "prompt_tokens": length,
                    "prompt_digest": prompt_digest(range(length)),
                }
            ).encode()
        self.open[rid, rank] = state
        if releasable:
            del self.open[rid, rank]
        self.scheduler.transfer_update(TransferUpdate(rank, rid, state, releasable, "X", "x", metadata))
        self.pump()

    def add(self, rid: str, length: int, new: int) -> None:
        self.prompts[rid] = length
        asked = Asked(rid, tuple(range(length)), new, Sampling(temperature=0), room=len(self.prompts), bootstrap="h:1")
        self.scheduler.add(asked, self.now)
        self.pump()


@settings(max_examples=150, deadline=None)
@given(
    mode=st.sampled_from(["null", "prefill", "decode"]),
    seed=st.integers(0, 1 << 30),
    events=st.lists(st.integers(0, 9), max_size=60),
)
def test_every_request_ends_once_and_every_page_returns(mode: str, seed: int, events: list[int]) -> None:
    drive(mode, seed, events)


def test_the_check_sees_pages_that_return_before_their_transfer_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the fence some order of events uses a page twice."""
    monkeypatch.setattr(Transfer, "settled", property(lambda self: True))
    caught = 0
    for seed in range(60):
        chooser = random.Random(seed)
        try:
            drive("decode", seed, [chooser.randrange(10) for _ in range(60)])
        except AssertionError:
            caught += 1
    assert caught > 0


def drive(mode: str, seed: int, events: list[int]) -> None:
    """Run one world to its end; AssertionError when an invariant breaks on the way."""
    world = World(mode, seed)
    added = 0
    for event in events:
        if event <= 2:
            world.add(f"r{added}", world.random.randint(1, 30), world.random.randint(1, 12))
            added += 1
        elif event <= 5:
            world.finish_step()
        elif event <= 7:
            world.move_transfer(failing=world.random.random() < 0.3)
        elif event == 8 and added:
            rid = f"r{world.random.randrange(added)}"
            world.scheduler.cancel(rid, RequestError("Aborted", "gone", 499))
            world.pump()
        else:
            world.now += 4.0
            world.pump()
    # Then the world only settles: deadlines pass and every transfer fails in the end.
    for _ in range(40):
        world.now += 6.0
        world.pump()
        for _ in range(8):
            world.finish_step()
            world.move_transfer(failing=True)
    assert world.ends == Counter({f"r{n}": 1 for n in range(added)})
    assert world.scheduler.held == 0 and world.scheduler.allocator.available == PAGES
