"""What a request costs before and after its bytes, at the least: a thread hands over to an event loop, that loop sends
one frame of 200 bytes to the loop of another process, which wakes a thread. No session, no NIXL: the floor under a
small request of any module that tells its peer over a connection and its engine in another thread."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

FRAME = b"x" * 200
ROUNDS, PAUSE = 60, 0.05
"""As long apart as the cells' runs, so that both sides' caches are as cold."""


def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _receive(pipe: Connection) -> None:
    """Tell the port, then of every frame when the waiting thread had it (seconds, monotonic)."""
    came = threading.Event()

    async def serve(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        while await reader.readexactly(len(FRAME)):
            came.set()

    loop = _loop()
    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(serve, "127.0.0.1", 0), loop).result(10)
    pipe.send(server.sockets[0].getsockname()[1])
    for _ in range(ROUNDS):
        if not came.wait(10):
            return
        pipe.send(time.perf_counter())
        came.clear()


def seconds(made: ForkServerContext) -> float:
    """Median from the hand-over in the first process to the thread of the second one."""
    near, far = made.Pipe()
    process = made.Process(target=_receive, args=(far,), daemon=True)
    process.start()
    loop = _loop()
    try:
        port = near.recv()
        _, writer = asyncio.run_coroutine_threadsafe(asyncio.open_connection("127.0.0.1", port), loop).result(10)
        found = []
        for _ in range(ROUNDS):
            time.sleep(PAUSE)
            began = time.perf_counter()
            loop.call_soon_threadsafe(writer.write, FRAME)
            if not near.poll(10):
                raise TimeoutError("a frame did not arrive")
            found.append(near.recv() - began)
        return statistics.median(found)
    finally:
        process.kill()
        process.join(5)
        loop.call_soon_threadsafe(loop.stop)
