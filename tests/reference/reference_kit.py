"""Starts real engine processes on loopback and asks `transformers` what they have to answer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

sys.path.append(str(Path(__file__).parents[1]))  # also where no suite runs

from free_ports import free_port

START_S = 120.0
"""Generous: importing torch on a busy machine takes its time."""
MIN_MARGIN = 2e-3
"""Logits. The two implementations differ by at most 1e-4 on this model (asserted in the tests)."""


@dataclass
class Running:
    """One engine: leader process and its address."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    bootstrap_port: int = 0
    start_seconds: float = 0.0

    @property
    def url(self) -> str:
        """Base address."""
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> httpx.Response:
        """GET."""
        return httpx.get(self.url + path, timeout=30)

    def post(self, path: str, body: dict[str, Any], timeout: float = 60) -> httpx.Response:
        """POST JSON."""
        return httpx.post(self.url + path, json=body, timeout=timeout)

    def generate(self, prompt: list[int], new: int, **more: Any) -> httpx.Response:
        """Greedy /generate."""
        params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        return self.post("/generate", {"input_ids": prompt, "sampling_params": params, **more})

    def info(self) -> dict[str, Any]:
        """Body of /server_info."""
        return dict(self.get("/server_info").json())

    def stop(self) -> int:
        """SIGTERM, then SIGKILL; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(60)


def launch(model: Path, log: Path, *flags: str, wait: bool = True) -> Running:
    """Start `pdtransfer-reference` and wait until it is healthy."""
    port, bootstrap = free_port(), free_port()
    command = [
        sys.executable,
        "-m",
        "pdtransfer.engines.reference.main",
        *("--model-path", str(model), "--port", str(port)),
        *("--disaggregation-bootstrap-port", str(bootstrap)),
        *flags,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "ERROR"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    engine = Running(process, port, log, bootstrap)
    if wait:
        await_healthy(engine)
    return engine


def await_healthy(engine: Running) -> None:
    """Block until /health is 200; the engine's log is in the error when it is not."""
    started = time.monotonic()
    while time.monotonic() - started < START_S:
        if engine.process.poll() is not None:
            raise AssertionError(f"engine exited {engine.process.returncode}: {engine.log.read_text()}")
        try:
            if engine.get("/health").status_code == 200:
                engine.start_seconds = time.monotonic() - started
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    engine.stop()
    raise AssertionError(f"engine not healthy in {START_S} s: {engine.log.read_text()}")


class Truth:
    """Greedy answers and logits of `transformers` for one checkpoint."""

    def __init__(self, model: Path) -> None:
        from transformers import LlamaForCausalLM

        torch.set_num_threads(1)
        self.net = LlamaForCausalLM.from_pretrained(str(model), dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """[tokens, vocab]"""
        return self.net(torch.tensor([ids])).logits[0]

    @torch.no_grad()
    def greedy(self, prompt: list[int], new: int) -> tuple[list[int], float]:
        """`new` tokens, and the smallest gap between best and second best logit on the way."""
        tokens: list[int] = []
        margin = float("inf")
        for _ in range(new):
            # The whole sequence each time: no cache, so that nothing of a cache can be wrong.
            best = torch.topk(self.logits([*prompt, *tokens])[-1], 2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
        return tokens, margin

    def decided(self, length: int, new: int, seed: int = 0) -> tuple[list[int], list[int]]:
        """A random prompt of `length` tokens whose greedy answer no rounding can change, and that answer."""
        generator = torch.Generator().manual_seed(seed * 7919 + length)
        for _ in range(20):
            prompt = torch.randint(3, self.net.config.vocab_size, (length,), generator=generator).tolist()
            tokens, margin = self.greedy(prompt, new)
            if margin > MIN_MARGIN:
                return prompt, tokens
        raise AssertionError(f"no prompt of {length} tokens has a margin over {MIN_MARGIN}")


@contextlib.contextmanager
def frozen(engine: Running) -> Iterator[list[int]]:
    """Its ranks stand still, in the middle of whatever they do: no request ends meanwhile. Gives their pids."""
    pids = [int(rank["pid"]) for rank in engine.info()["ranks"]]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def await_end(pids: list[int], seconds: float = 60) -> None:
    """Until none of them runs. One that waits to be reaped has ended: an orphan's parent is the machine's init."""
    until = time.monotonic() + seconds
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < until, "a process is left over"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
