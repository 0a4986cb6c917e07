"""One real SGLang server on the CPU: its command, its processes, its answers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from kit_machine import cpu_variables, environment, free_port, kill_session, session_members
from kit_plugins import PDCLUSTER, python_path

START_S = 600.0
"""A server imports torch four times over; on two busy cores that takes minutes."""
PAGE = 16
CHUNK = 64
"""Tokens of a prefill chunk: prompts above it travel in several pieces."""
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-overlap-schedule", "--mem-fraction-static", "0.3"),
    *("--max-running-requests", "8", "--skip-server-warmup", "--host", "127.0.0.1", "--enable-metrics"),
)
NIXL_DRAM = "nixl + DRAM hook"
"""SGLang's stock backend with the test plugin `kit_nixl_dram`."""


@dataclass(frozen=True)
class Setting:
    """What a server is started with."""

    model: Path
    role: str
    """prefill, decode or null (not disaggregated)."""
    tp: int = 1
    backend: str = PDCLUSTER
    flags: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    tokens: int = 8192
    """KV pool."""
    page: int = PAGE
    chunk: int = CHUNK

    def command(self, python: Path, port: int, bootstrap_port: int) -> list[str]:
        """Of the launcher."""
        command = [
            *(str(python), "-m", "sglang.launch_server", "--model-path", str(self.model), *CPU_FLAGS),
            *("--dtype", "float32", "--page-size", str(self.page), "--chunked-prefill-size", str(self.chunk)),
            *("--max-total-tokens", str(self.tokens), "--tp-size", str(self.tp), "--port", str(port)),
        ]
        if self.role != "null":
            command += ["--disaggregation-mode", self.role, "--disaggregation-bootstrap-port", str(bootstrap_port)]
            command += ["--disaggregation-transfer-backend", "nixl" if self.backend == NIXL_DRAM else self.backend]
        if self.role == "decode":
            # The other ways to back up a retracted request call CUDA.
            command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        return [*command, *self.flags]

    def plugins(self) -> str:
        """Value of SGLANG_PLUGINS; a name nobody has where no plugin is wanted."""
        return {PDCLUSTER: PDCLUSTER, NIXL_DRAM: "pdcluster-test-nixl-dram"}.get(self.backend, "none")


@dataclass
class Server:
    """A started server. `port` and `bootstrap_port` are kept when it is started again."""

    setting: Setting
    folder: Path
    port: int = field(default_factory=free_port)
    bootstrap_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    start_seconds: float = 0.0
    _began: float = 0.0

    @property
    def url(self) -> str:
        """Base address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        """Output of the latest start."""
        return self.folder / f"{self.setting.role}-{self.port}-{self.starts}.log"

    def start(self) -> None:
        """Start its processes; `await_healthy` says when it serves."""
        if self.process is not None:
            raise RuntimeError("stop it before it is started again")
        folder = environment()
        if folder is None:
            raise RuntimeError("SGLang's environment is missing: run make sglang-env")
        self.starts += 1
        variables = {
            **os.environ,
            **cpu_variables(),
            "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
            "SGLANG_PLUGINS": self.setting.plugins(),
            "PYTHONPATH": python_path(self.folder),
            "PYTHONUNBUFFERED": "1",
            "NIXL_LOG_LEVEL": "ERROR",
            **dict(self.setting.variables),
        }
        self._began = time.monotonic()
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                self.setting.command(folder / "bin" / "python", self.port, self.bootstrap_port),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=variables,
                cwd=self.folder,
                start_new_session=True,
            )

    def await_healthy(self, seconds: float = START_S) -> None:
        """Until /health is 200 (SGLang generates a token for it); its log is in the error otherwise."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.process is None or self.process.poll() is not None:
                raise AssertionError(f"SGLang {self.setting.role} ended while it started:\n{self.tail()}")
            if self.healthy():
                self.start_seconds = time.monotonic() - self._began
                return
            time.sleep(0.5)
        raise AssertionError(f"SGLang {self.setting.role} not healthy in {seconds:.0f} s:\n{self.tail()}")

    def healthy(self, timeout: float = 25.0) -> bool:
        """GET /health is 200."""
        try:
            return httpx.get(self.url + "/health", timeout=timeout).status_code == 200
        except httpx.TransportError:
            return False

    def tail(self, characters: int = 6000) -> str:
        """End of its output."""
        return self.log.read_text(errors="replace")[-characters:]

    def said(self) -> int:
        """Bytes of output so far: where `await_output` begins to look."""
        return self.log.stat().st_size

    def await_output(self, pattern: str, since: int, times: int = 1, seconds: float = 60.0) -> None:
        """Until the output after `since` holds `pattern` (a regular expression) that often."""
        until = time.monotonic() + seconds
        while len(re.findall(pattern, self.log.read_bytes()[since:].decode(errors="replace"))) < times:
            if time.monotonic() > until or self.ended():
                raise AssertionError(f"SGLang {self.setting.role} did not say {pattern!r}:\n{self.tail()}")
            time.sleep(0.02)

    def load(self) -> dict[str, Any]:
        """Its first rank's entry of /v1/loads: running and queued requests, tokens in use."""
        answer = httpx.get(self.url + "/v1/loads", params={"include": "all"}, timeout=20)
        answer.raise_for_status()
        return dict(answer.json()["loads"][0])

    def held(self, after: float = 0.0) -> dict[str, int]:
        """What is not zero of the requests it runs or queues and of the tokens its KV pool has lent; `unknown` where
        it published nothing after that time (seconds since 1970)."""
        load = self.load()
        if load["timestamp"] < after:
            return {"unknown": 1}
        counts = {name: load[name] for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")}
        counts |= {k: v for k, v in load["disaggregation"].items() if k.endswith("_reqs")}
        return {name: count for name, count in counts.items() if count}

    def await_idle(self, seconds: float = 30.0) -> None:
        """Until it holds nothing. SGLang publishes its load all the time when idle, and now and then only while it
        decodes: what it published before this call says nothing."""
        asked, until = time.time(), time.monotonic() + seconds
        while held := self.held(asked):
            if time.monotonic() > until:
                raise AssertionError(f"SGLang {self.setting.role} holds after {seconds:.0f} s: {held}\n{self.tail()}")
            time.sleep(0.2)

    def await_held(self, name: str, seconds: float = 30.0) -> None:
        """Until `held` shows this count."""
        until = time.monotonic() + seconds
        while name not in self.held():
            if time.monotonic() > until:
                raise AssertionError(f"SGLang {self.setting.role} never showed {name}\n{self.tail()}")
            time.sleep(0.1)

    def members(self) -> dict[int, str]:
        """Its living processes: process id -> command line."""
        return {} if self.process is None else session_members(self.process.pid)

    def schedulers(self) -> list[int]:
        """Process ids of its scheduler processes, one a rank, by rank."""
        found = [(title, pid) for pid, title in self.members().items() if title.startswith("sglang::scheduler")]
        return [pid for _, pid in sorted(found)]

    def ended(self) -> bool:
        """The launcher ended."""
        return self.process is None or self.process.poll() is not None

    def stop(self) -> None:
        """Kill all its processes."""
        if self.process is not None:
            kill_session(self.process)
            self.process = None

    def generate(self, prompt: list[int], new: int, timeout: float = 90.0, **more: Any) -> httpx.Response:
        """Greedy /generate of `new` tokens."""
        return httpx.post(self.url + "/generate", json=body(prompt, new, **more), timeout=timeout)

    def first_token_seconds(self, prompt: list[int], new: int, timeout: float = 90.0, **more: Any) -> float:
        """The same, streamed: seconds until the first token came; the stream is read to its end."""
        began, first = time.monotonic(), 0.0
        asked = body(prompt, new, stream=True, **more)
        with httpx.stream("POST", self.url + "/generate", json=asked, timeout=timeout) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                first = first or time.monotonic() - began
        if not first:
            raise RuntimeError("the stream ended without a token")
        return first

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics, summed over labels (TP ranks): name without `sglang:` -> value."""
        found: dict[str, float] = {}
        for line in httpx.get(self.url + "/metrics", timeout=20).text.splitlines():
            match = re.match(r"sglang:(\w+)(?:\{[^}]*\})? (\S+)$", line)
            if match and not match[1].endswith("_bucket"):
                found[match[1]] = found.get(match[1], 0.0) + float(match[2])
        return found


def body(prompt: list[int], new: int, **more: Any) -> dict[str, Any]:
    """Of a greedy /generate request."""
    params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": params, **more}


@contextlib.contextmanager
def asking(server: Server, prompt: list[int], **fields: object) -> Iterator[None]:
    """A client whose request is sent, and who closes the connection at the end without reading an answer."""
    asked = json.dumps(body(prompt, 8, **fields)).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: {server.url}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as line:
        line.sendall(f"{head}Content-Length: {len(asked)}\r\n\r\n".encode() + asked)
        yield


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[None]:
    """All of them started and healthy; killed in the end, also when one did not come up."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.await_healthy()
        yield
    finally:
        for server in servers:
            server.stop()
