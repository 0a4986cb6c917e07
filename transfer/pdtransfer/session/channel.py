"""One control connection: frames in and out, keep-alive, TLS contexts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from pathlib import Path

from pydantic import BaseModel

from pdtransfer.session.frames import HEADER, MAX_FRAME, Frame, FrameError, Ping, Pong, decode, encode

logger = logging.getLogger(__name__)

MAX_UNSENT = 64 << 20
"""Bytes a peer may leave unread before its connection is ended."""


class Channel:
    """Frames over an asyncio stream. `send` never blocks; a peer that does not read is cut off."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.heard = time.monotonic()
        self.closed_here = False

    def send(self, frame: BaseModel) -> bool:
        """Queue a frame; False when the connection is ending."""
        if self._writer.is_closing():
            return False
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT:
            self._abort()
            return False
        self._writer.write(encode(frame))
        return True

    async def receive(self, limit: int = MAX_FRAME) -> Frame | None:
        """Next frame; None at the end of the stream. Raises FrameError on anything else."""
        try:
            (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if length > limit:
                raise FrameError(f"a frame of {length} bytes is over the bound of {limit}")
            body = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            return None
        self.heard = time.monotonic()
        # What was still buffered when this side closed is not obeyed: the peer may have been told
        # since that nothing of it is in flight.
        return None if self.closed_here else decode(body)

    async def keep_alive(self, limit: float) -> None:
        """Ping while the peer is quiet; end the connection when it stays so for `limit` seconds."""
        while not self._writer.is_closing():
            await asyncio.sleep(limit / 3)
            quiet = time.monotonic() - self.heard
            if quiet > limit:
                self._abort()
            elif quiet > limit / 4:
                self.send(Ping())

    def _abort(self) -> None:
        # Given up here: that it ended says nothing about the other side.
        self.closed_here = True
        self._writer.transport.abort()

    @property
    def certificate_names(self) -> frozenset[str] | None:
        """DNS names in the other side's verified certificate; None without TLS."""
        if self._writer.get_extra_info("ssl_object") is None:
            return None
        shown = self._writer.get_extra_info("peercert") or {}
        return frozenset(name for kind, name in shown.get("subjectAltName", ()) if kind == "DNS")

    def answer_ping(self, frame: Frame) -> bool:
        """True when the frame was only a keep-alive."""
        if isinstance(frame, Ping):
            self.send(Pong())
        return isinstance(frame, Ping | Pong)

    @property
    def closing(self) -> bool:
        """No more frames go out."""
        return self._writer.is_closing()

    def close(self) -> None:
        """End the connection from this side, after what was queued."""
        self.closed_here = True
        self._writer.close()

    async def wait_closed(self) -> None:
        """Wait for the end, whatever it was."""
        with contextlib.suppress(OSError, ssl.SSLError):
            await self._writer.wait_closed()


def server_context(tls_dir: str | None) -> ssl.SSLContext | None:
    """Server side of mutual TLS: the dialling side must show a certificate of our CA."""
    return None if tls_dir is None else _server(Path(tls_dir))


def _server(folder: Path) -> ssl.SSLContext:
    context = _context(ssl.PROTOCOL_TLS_SERVER, folder)
    # A resumed session would carry over a client that the present CA may no longer vouch for.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    return context


def client_context(tls_dir: str | None) -> ssl.SSLContext | None:
    """Client side; made anew for each connection, so that renewed files are picked up."""
    if tls_dir is None:
        return None
    context = _context(ssl.PROTOCOL_TLS_CLIENT, Path(tls_dir))
    context.check_hostname = True
    return context


def _context(protocol: int, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(folder / "ca.crt")
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


async def renew(context: ssl.SSLContext, tls_dir: str, seen: tuple[int, ...], every: float = 5.0) -> None:
    """Have a listening context use renewed files, and these alone (a CA that is gone is trusted no
    more); a half-written set is tried again. `seen` is the stamp of the files it was made from."""
    folder = Path(tls_dir)
    newest = context

    def choose(tls: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        tls.context = newest

    context.sni_callback = choose
    while True:
        await asyncio.sleep(every)
        now = stamp(tls_dir)
        if now == seen:
            continue
        try:
            newest = _server(folder)
        except (OSError, ssl.SSLError) as error:
            logger.warning("renewed TLS files in %s are not usable yet: %s", tls_dir, error)
        else:
            seen = now


def stamp(tls_dir: str) -> tuple[int, ...]:
    """When the files were written; take it before they are loaded."""
    folder = Path(tls_dir)
    found = []
    for name in ("ca.crt", "tls.crt", "tls.key"):
        try:
            found.append((folder / name).stat().st_mtime_ns)
        except OSError:
            found.append(0)
    return tuple(found)
