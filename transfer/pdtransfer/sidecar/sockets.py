"""Unix-socket side of the sidecar: one connection per rank, one JSON object a line (contract.link).

Lines are bounded, a connection has a deadline for its Hello, and what waits to be written to a slow
rank is bounded too: a newer message of a kind takes the place of the older one. A line that can not
be read ends the connection (the rank then comes back and sends everything anew); skipping it could
leave a verdict standing that no longer holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import stat
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from pdtransfer.contract.link import Probe, SidecarMessage, rank_messages
from pdtransfer.sidecar.hub import Hub
from pdtransfer.sidecar.model import Effect, Push, Send
from pdtransfer.sidecar.rosters import error_text

log = logging.getLogger(__name__)

HELLO_DEADLINE = 10.0
CLOSE_DEADLINE = 2.0
MAX_CONNECTIONS = 256


class _Connection:
    """Outbox and tasks of one accepted connection."""

    def __init__(self, number: int, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.writer = writer
        self._outbox: dict[str, SidecarMessage | bytes] = {}
        self._wake = asyncio.Event()
        self._ending = False

    def send(self, message: SidecarMessage) -> None:
        old = self._outbox.pop(message.type, None)
        if isinstance(old, Probe) and isinstance(message, Probe):
            both = set(old.pod_uids) | set(message.pod_uids)
            all_of_them = not old.pod_uids or not message.pod_uids
            message = Probe(pod_uids=() if all_of_them else tuple(sorted(both)))
        self._outbox[message.type] = message
        self._wake.set()

    def push(self, line: bytes) -> None:
        self._outbox.pop("peers", None)
        self._outbox["peers"] = line
        self._wake.set()

    def end(self) -> None:
        """Close after what is in the outbox."""
        self._ending = True
        self._wake.set()

    async def pump(self) -> None:
        """Write the outbox until the end; returns once the connection should be closed."""
        while True:
            while self._outbox:
                message = self._outbox.pop(next(iter(self._outbox)))
                line = message if isinstance(message, bytes) else message.model_dump_json().encode() + b"\n"
                self.writer.write(line)
                await self.writer.drain()
            if self._ending:
                return
            self._wake.clear()
            await self._wake.wait()


class RankServer:
    """Listens on `path` for ranks and feeds `hub`."""

    def __init__(self, hub: Hub, path: Path, mode: int, max_line: int) -> None:
        self._hub, self._path, self._mode, self._max_line = hub, path, mode, max_line
        self._numbers = itertools.count(1)
        self._connections: dict[int, _Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._inode = 0
        hub.connect(self._effects)

    async def start(self) -> None:
        """Bind, clearing a socket that an earlier sidecar left. OSError or ValueError when it can't."""
        if len(str(self._path).encode()) > 107:
            raise ValueError(f"socket path {self._path} is longer than the 107 bytes Linux allows")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self._path.lstat().st_mode):
                raise ValueError(f"{self._path} exists and is no socket; it is left alone")
            self._path.unlink()
        self._server = await asyncio.start_unix_server(self._accept, path=self._path, limit=self._max_line)
        self._path.chmod(self._mode)
        self._inode = self._path.stat().st_ino
        log.info("listening for ranks socket=%s mode=%o", self._path, self._mode)

    async def stop(self) -> None:
        """Close every connection, within a bound."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_DEADLINE)
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def _effects(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            connection = self._connections.get(effect.conn)
            if connection is None:
                continue
            if isinstance(effect, Send):
                connection.send(effect.message)
            elif isinstance(effect, Push):
                connection.push(effect.line)
            else:
                connection.end()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(next(self._numbers), writer)
        self._connections[connection.number] = connection
        tasks = [
            asyncio.create_task(self._read(connection, reader)),
            asyncio.create_task(connection.pump()),
        ]
        me = asyncio.current_task()
        assert me is not None
        self._tasks.add(me)
        try:
            if len(self._connections) > MAX_CONNECTIONS:
                self._hub.refuse(
                    connection.number, None, "TooManyConnections", f"more than {MAX_CONNECTIONS} connections"
                )
            # The pump ends when the hub closed the connection, the reader when the rank did.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and not task.cancelled() and (e := task.exception()) is not None:
                    level = logging.INFO if isinstance(e, OSError) else logging.ERROR
                    log.log(level, "rank connection failed conn=%d error=%r", connection.number, e)
            if tasks[0].done() and not tasks[1].done():
                connection.end()
                await asyncio.wait([tasks[1]], timeout=CLOSE_DEADLINE)
        except asyncio.CancelledError:
            pass  # stop(): the connection is closed below
        finally:
            for task in tasks:
                task.cancel()
            self._hub.closed(connection.number)
            del self._connections[connection.number]
            self._tasks.discard(me)
            writer.close()

    async def _read(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        number = connection.number
        first = True
        while True:
            try:
                async with asyncio.timeout(HELLO_DEADLINE if first else None):
                    line = await reader.readuntil(b"\n")
            except asyncio.IncompleteReadError:
                return
            except TimeoutError:
                self._hub.refuse(number, None, "NoHello", f"no Hello within {HELLO_DEADLINE:g} s")
                return
            except asyncio.LimitOverrunError:
                self._hub.refuse(number, self._rank(number), "OversizeLine", f"a line over {self._max_line} bytes")
                return
            try:
                message = rank_messages.validate_json(line)
            except ValidationError as e:
                what = "first line is no Hello that can be read" if first else "line can not be read"
                self._hub.refuse(number, self._rank(number), "BadMessage", f"{what}: {error_text(e)}")
                return
            if first and message.type not in ("hello", "failed"):
                self._hub.refuse(number, None, "NoHello", f"first line is {message.type}, not hello")
                return
            self._hub.message(number, message)
            if first and not self._hub.state.knows(number):
                return  # refused
            first = False

    def _rank(self, conn: int) -> int | None:
        entry = self._hub.state.by_conn(conn)
        return entry.rank if entry is not None else None
