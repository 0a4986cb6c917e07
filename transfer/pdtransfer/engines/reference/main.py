"""`pdtransfer-reference`: the leader process. Checks, starts the ranks, serves HTTP, ends as one group.

Exit codes: 0 after SIGTERM, 2 when the flags or the checkpoint are wrong (the text says what to do),
1 when a rank or the engine died (so that the kubelet starts a new incarnation).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from pdtransfer.engines.reference.engine import Engine
from pdtransfer.engines.reference.http_app import make_app
from pdtransfer.engines.reference.http_base import Served
from pdtransfer.engines.reference.messages import Stop
from pdtransfer.engines.reference.model_config import load_config
from pdtransfer.engines.reference.options import parse_options
from pdtransfer.engines.reference.problems import SetupError
from pdtransfer.engines.reference.ranks import RankGroup
from pdtransfer.engines.reference.tokenizer import TextCodec

log = logging.getLogger(__name__)
CRASH_GRACE_S = 2.0
"""Seconds at most for the HTTP side to write its errors; without open requests the end comes at once."""
DRAIN_POLL_S = 0.05


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: SIGTERM drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


class _Crash:
    """Ends the whole group once, from any thread: answers what is open, kills the ranks, exits 1."""

    def __init__(self) -> None:
        self._once = threading.Lock()
        self.engine: Engine | None = None
        self.ranks: RankGroup | None = None
        self.answered: Callable[[], bool] = lambda: True
        """Whether no request is open."""

    def __call__(self, text: str) -> None:
        if not self._once.acquire(blocking=False):
            return
        log.critical("the engine ends: %s", text)
        threading.Thread(target=self._end, name="crash", daemon=True).start()
        if self.engine is not None:
            self.engine.fail(text)

    def _end(self) -> None:
        # A moment for the HTTP side to write its errors; then out, whatever hangs.
        try:
            deadline = time.monotonic() + CRASH_GRACE_S
            while not self.answered() and time.monotonic() < deadline:
                time.sleep(0.01)
            if self.ranks is not None:
                self.ranks.stop()
            logging.shutdown()
        finally:
            os._exit(1)


def main(argv: list[str] | None = None) -> int:
    """Run the engine until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s leader %(levelname)s %(message)s")
    try:
        options = parse_options(argv)
        config = load_config(options.model_path)
        config.check_tensor_parallel(options.tp_size)
        codec = TextCodec(options.model_path, config.vocab)
        # Before the seconds or minutes of loading: a taken port is refused at once, and kept until then.
        listening = bind(options.host, options.port)
    except SetupError as error:
        return _refuse(error)
    # Until the server's loop takes the signal over, SIGTERM ends the group at once.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    crash = _Crash()
    ranks = RankGroup(options)
    crash.ranks = ranks
    try:
        engine = Engine(options, ranks, crash)
        crash.engine = engine
        ranks.watch(lambda rank, code: crash(f"rank {rank} died with exit code {code}"))
        engine.start()
        asyncio.run(_serve(Served(options, config, codec, engine), listening, crash))
        engine.stop()
    except SetupError as error:
        return _refuse(error)
    except RuntimeError as error:
        log.critical("the engine did not start: %s", error)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
        listening.close()
        ranks.stop(Stop() if crash.engine is not None and not crash.engine.failed else None)
    return 1 if engine.failed else 0


def _refuse(error: SetupError) -> int:
    print(f"pdtransfer-reference: {error}", file=sys.stderr, flush=True)
    return 2


def _server(app: Starlette, host: str, port: int) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
        )
    )


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; SetupError when the address can not be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SetupError(f"--host {host} is no address of this machine: {error}") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise SetupError(f"--host {host} --port {port} can not be listened on: {error.strerror}") from error
    return made


async def _serve(served: Served, listening: socket.socket, crash: _Crash) -> None:
    options = served.options
    server = _server(make_app(served), options.host, options.port)
    crash.answered = lambda: not server.server_state.tasks
    drains: list[asyncio.Future[None]] = []

    def on_term() -> None:
        # Not "already draining": the sidecar may have told the ranks to drain before.
        if not drains:
            drains.append(asyncio.ensure_future(_drain(served, server)))

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_term)
    log.info("serving %s on %s:%d as %s", options.served_model_name, options.host, options.port, options.mode)
    if options.introduces and options.mode == "decode":
        from pdtransfer.engines.reference.bootstrap import Introductions

        served.engine.prepare = Introductions(served.engine).prepare
    if not (options.introduces and options.mode == "prefill"):
        await server.serve([listening])
        return
    from pdtransfer.engines.reference.bootstrap import bootstrap_app

    log.warning("backend %s is emulated; peers meet unauthenticated on its bootstrap port", options.backend)
    meeting = _server(bootstrap_app(served.engine), options.host, options.bootstrap_port)
    beside = asyncio.ensure_future(meeting.serve())
    try:
        await server.serve([listening])
    finally:
        meeting.should_exit = True
        await beside


async def _drain(served: Served, server: uvicorn.Server) -> None:
    """Refuse what is new, let what runs finish within the budget, then end."""
    log.info("SIGTERM: draining for at most %.0f s", served.options.drain_timeout)
    served.engine.drain()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + served.options.drain_timeout
    # The count changes in the engine's thread: polled.
    while served.engine.load["num_held_reqs"] and loop.time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(DRAIN_POLL_S)
    left = served.engine.load["num_held_reqs"]
    if left:
        log.warning("%d requests were still open after the drain", left)
    server.should_exit = True


def console() -> None:
    """Entry point of `python -m`."""
    raise SystemExit(main(sys.argv[1:]))


if __name__ == "__main__":
    console()
