"""A bare agent over real NIXL in a process of its own, for tests of NIXL itself: asked by JSON lines.

python nixl_target.py NAME BYTES
"""

from __future__ import annotations

import base64
import ctypes
import json
import mmap
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
from asked_process import AskedProcess, say


class Target(AskedProcess):
    """The process; it can be stopped too."""

    def __init__(self, name: str, nbytes: int, ucx_tls: str = "tcp") -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "NIXL_LOG_LEVEL": "FATAL", "UCX_NET_DEVICES": "lo"}
        if ucx_tls:
            env["UCX_TLS"] = ucx_tls
        super().__init__([sys.executable, str(Path(__file__)), name, str(nbytes)], env, quiet=True)
        hello = self.answer()
        self.metadata = base64.b64decode(hello["metadata"])
        self.address = int(hello["address"])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def rows(self, at: int, size: int) -> np.ndarray:
        return np.array([[self.address + at, size, 0]], dtype=np.uint64)


def main() -> None:
    from pdtransfer.agent.nixl import NixlAgent
    from pdtransfer.contract.base import MemoryKind

    name, nbytes = sys.argv[1], int(sys.argv[2])
    agent = NixlAgent(name)
    mapped = mmap.mmap(-1, nbytes)
    memory = np.frombuffer(mapped, dtype=np.uint8)
    registration = agent.register(np.array([[memory.ctypes.data, nbytes, 0]], dtype=np.uint64), MemoryKind.DRAM)
    notes: list[str] = []
    stop = threading.Event()
    lock = threading.Lock()

    def progress() -> None:
        # TCP writes land only while their target makes progress.
        while not stop.wait(0.001):
            with lock:
                notes.extend(text.decode() for _, text in agent.progress())

    threading.Thread(target=progress, daemon=True).start()

    say(metadata=base64.b64encode(agent.metadata()).decode(), address=int(memory.ctypes.data))
    for line in sys.stdin:
        command = json.loads(line)
        with lock:
            if command["do"] == "count":
                say(count=int((memory == command["value"]).sum()))
            elif command["do"] == "clear":
                memory[:] = 0
                say(ok=True)
            elif command["do"] == "notes":
                say(notes=notes)
            elif command["do"] == "hold":
                say(ok=True)
                json.loads(sys.stdin.readline())  # until the next command, no progress
                if command.get("deregister"):
                    agent.deregister(registration)
                if command.get("unmap"):
                    ctypes.CDLL(None).munmap(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(nbytes))
                say(ok=True)


if __name__ == "__main__":
    main()
