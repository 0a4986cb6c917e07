"""One control connection: frames in and out, keep-alive, TLS contexts."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel

from pdtransfer.session.frames import HEADER, MAX_FRAME, MAX_HELLO, Frame, FrameError, Ping, Pong, decode, encode

logger = logging.getLogger(__name__)

MAX_UNSENT = 64 << 20
"""Bytes a peer may leave unread before its connection is ended."""


class Channel(asyncio.Protocol):
    """Frames over a connection. `send` never blocks; a peer that does not read is cut off.

    A protocol and no stream: a frame is handled in the turn of the loop in which its bytes came. A stream wakes a
    task, once for the length and once for the body: two more turns, at the end of each request too."""

    def __init__(self, opened: Callable[[Channel], None] = lambda channel: None) -> None:
        """`opened` is called once, when there is a connection."""
        self._opened = opened
        self._transport: asyncio.Transport
        self._came = bytearray()
        self._handle: Callable[[Frame], None] | None = None
        """Takes frames as they come; None: they wait for `receive`."""
        self._news = asyncio.Event()
        self._lost = asyncio.Event()
        self._broken: Exception | None = None
        """What ended `serve`."""
        self.heard = time.monotonic()
        self.closed_here = False

    # --- asyncio's calls --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there, its TLS handshake done."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._opened(self)

    def data_received(self, data: bytes) -> None:
        """Cut frames and hand them on."""
        self._came += data
        if self._handle is not None:
            self._hand_on(self._handle)
        elif len(self._came) > MAX_HELLO + HEADER.size:
            self._transport.pause_reading()  # nobody reads yet
        self._news.set()

    def connection_lost(self, error: Exception | None) -> None:
        """It ended, in whatever way."""
        self._lost.set()
        self._news.set()

    # --- frames -----------------------------------------------------------------------------

    def send(self, frame: BaseModel) -> bool:
        """Queue a frame; False when the connection is ending."""
        if self._transport.is_closing():
            return False
        if self._transport.get_write_buffer_size() > MAX_UNSENT:
            self._abort()
            return False
        self._transport.write(encode(frame))
        return True

    async def receive(self, limit: int = MAX_FRAME) -> Frame | None:
        """Next frame; None at the end of the connection. Raises FrameError on anything else. Not after `serve`."""
        while (body := cut(self._came, limit)) is None:
            if self._lost.is_set():
                return None
            self._transport.resume_reading()
            self._news.clear()
            await self._news.wait()
        self.heard = time.monotonic()
        return None if self.closed_here else decode(body)

    async def serve(self, handle: Callable[[Frame], None]) -> None:
        """Hand every frame to `handle` until the connection ends. Raises FrameError for what is none, and what
        `handle` raised; nothing is handed on after that."""
        self._handle = handle
        self._hand_on(handle)
        if not self._lost.is_set():
            self._transport.resume_reading()
        while self._broken is None and not self._lost.is_set():
            self._news.clear()
            await self._news.wait()
        if self._broken is not None:
            raise self._broken

    def _hand_on(self, handle: Callable[[Frame], None]) -> None:
        # What still comes after this side closed is not obeyed: the peer may have been told since that nothing of
        # it is in flight.
        try:
            while self._broken is None and not self.closed_here and (body := cut(self._came, MAX_FRAME)) is not None:
                self.heard = time.monotonic()
                frame = decode(body)
                if isinstance(frame, Ping):
                    self.send(Pong())
                elif not isinstance(frame, Pong):
                    handle(frame)
        except Exception as error:
            self._broken = error
        if self._broken is not None or self.closed_here:
            self._came.clear()

    async def keep_alive(self, limit: float) -> None:
        """Ping while the peer is quiet; end the connection when it stays so for `limit` seconds."""
        while not self._transport.is_closing():
            await asyncio.sleep(limit / 3)
            quiet = time.monotonic() - self.heard
            if quiet > limit:
                self._abort()
            elif quiet > limit / 4:
                self.send(Ping())

    def _abort(self) -> None:
        # Given up here: that it ended says nothing about the other side.
        self.closed_here = True
        self._transport.abort()

    @property
    def certificate_names(self) -> frozenset[str] | None:
        """DNS names in the other side's verified certificate; None without TLS."""
        if self._transport.get_extra_info("ssl_object") is None:
            return None
        shown = self._transport.get_extra_info("peercert") or {}
        return frozenset(name for kind, name in shown.get("subjectAltName", ()) if kind == "DNS")

    @property
    def closing(self) -> bool:
        """No more frames go out."""
        return self._transport.is_closing()

    def close(self) -> None:
        """End the connection from this side, after what was queued."""
        self.closed_here = True
        self._transport.close()


def cut(came: bytearray, limit: int) -> bytes | None:
    """Take the first frame's body off `came`; None while it is not whole. Raises FrameError over `limit` bytes."""
    if len(came) < HEADER.size:
        return None
    (length,) = HEADER.unpack_from(came)
    if length > limit:
        raise FrameError(f"a frame of {length} bytes is over the bound of {limit}")
    if len(came) < HEADER.size + length:
        return None
    body = bytes(memoryview(came)[HEADER.size : HEADER.size + length])
    del came[: HEADER.size + length]
    return body


async def connect(host: str, port: int, tls: ssl.SSLContext | None, server_name: str) -> Channel:
    """Dial. Raises OSError, ssl.SSLError."""
    loop = asyncio.get_running_loop()
    _, channel = await loop.create_connection(
        Channel, host, port, ssl=tls, server_hostname=server_name if tls else None
    )
    return channel


async def listen(
    accept: Callable[[Channel], None], host: str, port: int, tls: ssl.SSLContext | None, handshake: float
) -> asyncio.Server:
    """Call `accept` for each connection; one with TLS that is not there within `handshake` seconds is dropped."""
    loop = asyncio.get_running_loop()
    timeout = handshake if tls else None
    return await loop.create_server(lambda: Channel(accept), host, port, ssl=tls, ssl_handshake_timeout=timeout)


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
