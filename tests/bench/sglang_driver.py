"""Driver of SGLang's transfer classes, in SGLang's environment: JSON lines on stdin and stdout.

{"do": "open", ...shape...} starts fresh rank processes (forked from a server that has imported SGLang) and stops them
(SIGSTOP: their agents' progress threads would burn a core while others are measured); {"do": "run", "pages": n} lets
them go on for one request and answers with seconds; {"do": "close"} ends them. Every answer is one line that starts
with "{".
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import socket
import sys
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

LEAD, SETTLE = 0.005, 0.05
"""Seconds: to the start, and after the processes go on."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
"""SGLang's ServerArgs reads a model's configuration; the transfer classes use none of it."""


def free_ports() -> int:
    """A port that is free, and the next one too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


class Ranks:
    """Processes of one shape."""

    def __init__(self, context: Any, model: str, shape: dict[str, Any]) -> None:
        import sglang_rank

        self._list: list[tuple[BaseProcess, Connection]] = []
        self._random = np.random.default_rng(7)
        self._rooms = 0
        self.pool = shape["pool_pages"]
        port = free_ports()
        self.prefill = shape["prefill"]
        for role in ("prefill", "decode"):
            for tp in range(shape[role]):
                spec = sglang_rank.Spec(role=role, tp=tp, port=port, model=model, **shape)
                near, far = context.Pipe()
                process = context.Process(target=sglang_rank.main, args=(spec, far), daemon=True)
                process.start()
                far.close()
                self._list.append((process, near))
        senders, receivers = self._list[: self.prefill], self._list[self.prefill :]
        self._do(self._list, "make")
        self._do(senders, "manage")
        self._do(receivers, "manage")
        self._do(receivers, "meet")

    def _do(self, ranks: list[tuple[BaseProcess, Connection]], *command: Any) -> list[Any]:
        for _, pipe in ranks:
            pipe.send(command)
        return [self._answer(pipe) for _, pipe in ranks]

    @staticmethod
    def _answer(pipe: Connection) -> Any:
        if not pipe.poll(120):
            raise TimeoutError("a rank of SGLang does not answer")
        state, value = pipe.recv()
        if state == "error":
            raise RuntimeError(value)
        return value

    def signal(self, number: int) -> None:
        """To all ranks."""
        for process, _ in self._list:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    def run(self, count: int, verify: bool) -> float:
        """One request of `count` pages; seconds from the first source's start to the last Success at decode."""
        senders, receivers = self._list[: self.prefill], self._list[self.prefill :]
        self._rooms += 1
        source = self._random.permutation(self.pool)[:count].astype(np.int32)
        target = self._random.permutation(self.pool)[:count].astype(np.int32)
        picked = self._random.permutation(count)[:16]
        if verify:
            self._do(receivers, "forget", target)
        self._do(receivers, "ask", self._rooms, target)
        self._do(senders, "open", self._rooms, count)
        start = time.perf_counter() + LEAD
        for _, pipe in receivers:
            pipe.send(("wait",))
        began = self._do(senders, "send", source, start)
        ended = [self._answer(pipe) for _, pipe in receivers]
        if verify and any(bad := self._do(receivers, "wrong", target[picked], source[picked])):
            raise RuntimeError(f"SGLang: {bad} numbers differ from what prefill holds")
        return float(max(ended) - min(began))

    def close(self) -> None:
        """End them."""
        self.signal(signal.SIGKILL)
        for process, pipe in self._list:
            process.join(5)
            pipe.close()


def main() -> None:
    """Until stdin ends."""
    warnings.filterwarnings("ignore")
    context = mp.get_context("forkserver")
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # the server does not take over sys.path
    context.set_forkserver_preload(["sglang_rank"])
    answers = os.fdopen(os.dup(1), "w")  # what libraries print goes elsewhere
    os.dup2(2, 1)
    ranks: Ranks | None = None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        for line in sys.stdin:
            command = json.loads(line)
            do = command.pop("do")
            answer: dict[str, Any] = {}
            try:
                if do == "open":
                    ranks = Ranks(context, folder, command)
                    ranks.signal(signal.SIGSTOP)
                elif do == "run" and ranks is not None:
                    ranks.signal(signal.SIGCONT)
                    time.sleep(SETTLE)
                    answer["seconds"] = ranks.run(command["pages"], command["verify"])
                    ranks.signal(signal.SIGSTOP)
                elif ranks is not None:
                    ranks.close()
                    ranks = None
            except Exception as error:
                answer["error"] = f"{type(error).__name__}: {error}"
            print(json.dumps(answer), file=answers, flush=True)
        if ranks is not None:
            ranks.close()


if __name__ == "__main__":
    main()
