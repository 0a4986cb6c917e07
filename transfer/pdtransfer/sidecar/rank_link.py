"""Link from an engine rank to its pod's sidecar: a daemon thread inside the rank.

It shows the rank's card, keeps it alive with heartbeats, reports verdicts and hands rosters to the
endpoint. It connects again for ever: losing the sidecar never touches what is wired. When idle it
wakes twice a second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import selectors
import socket
import threading
import time
from pathlib import Path

from pydantic import ValidationError

from pdtransfer.contract.card import RankCard
from pdtransfer.contract.link import (
    Drain,
    Failed,
    Heartbeat,
    Hello,
    Peers,
    Probe,
    RankMessage,
    Refuse,
    Verdicts,
)
from pdtransfer.contract.metrics import Samples
from pdtransfer.contract.verdict import Verdict
from pdtransfer.session.api import Endpoint
from pdtransfer.sidecar.peer_lines import PeerLines

log = logging.getLogger(__name__)

HEARTBEAT = 0.5
MIN_GAP = 0.05
"""Seconds between two reports of changes: a busy endpoint signals thousands of times a second."""
BACKOFF = (0.1, 5.0)
SEND_DEADLINE = 5.0
MAX_LINE = 256 << 20
MAX_REASON = 1000
"""Characters of a failure's text."""
QUIET = 5.0
"""Seconds between two looks of a link whose rank has failed: nothing is awaited."""
METRICS_EVERY = 2.0
"""Seconds between two reports of the metrics: a few KB, and they are scraped every 10 s or more."""


class _Ended(Exception):
    """The connection is over; the text says why."""


class RankLink:
    """`RankLink(path, endpoint, expected_ranks).start()`; `stop()` removes the rank's card.

    `expected_ranks` is how many ranks the engine has in this pod. `refused` is the sidecar's answer
    when it does not take this rank (it keeps asking); `failed` is set only if the thread ended by
    an error of its own, `error` is the last error of the endpoint or the connection."""

    def __init__(self, socket_path: str | os.PathLike[str], endpoint: Endpoint, expected_ranks: int) -> None:
        self._path = str(Path(socket_path))
        self._endpoint = endpoint
        self._expected = expected_ranks
        self._stop = threading.Event()
        self._changed = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._fd_lock = threading.Lock()
        self._lines = PeerLines(lambda: endpoint.inflight > 0, self._stop.wait)
        self._thread = threading.Thread(target=self._run, name="pdtransfer-rank-link", daemon=True)
        self.connected = False
        self.refused: Refuse | None = None
        self.failed: BaseException | None = None
        self.error: str = ""

    def start(self) -> RankLink:
        """Start the thread; returns at once, the sidecar may come up later."""
        self._endpoint.on_change(self._on_change)
        self._thread.start()
        return self

    def stop(self, timeout: float = 5.0) -> None:
        """End the connection (the card goes with it) and the thread."""
        self._stop.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        if not self._thread.is_alive():
            with self._fd_lock:
                if self._wake_fd >= 0:
                    os.close(self._wake_fd)
                    self._wake_fd = -1

    def _on_change(self) -> None:
        # Called on the transfer's hot path: one flag test unless the link sleeps.
        if not self._changed.is_set():
            self._changed.set()
            self._wake()

    def _wake(self) -> None:
        with self._fd_lock:
            if self._wake_fd >= 0:
                with contextlib.suppress(BlockingIOError):  # already awake
                    os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        try:
            delay = BACKOFF[0]
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    self._serve()
                except (_Ended, OSError) as e:
                    text = str(e) or type(e).__name__
                    if text != self.error:
                        log.warning("link to the sidecar ended, trying again socket=%s error=%s", self._path, text)
                    self.error = text
                except Exception as e:
                    self.error = f"{type(e).__name__}: {e}"
                    log.exception("link to the sidecar failed, trying again socket=%s", self._path)
                self.connected = False
                lived = time.monotonic() - began
                delay = BACKOFF[0] if lived > BACKOFF[1] else min(delay * 2, BACKOFF[1])
                self._stop.wait(delay * random.uniform(0.5, 1.0))
        except BaseException as e:
            self.failed = e
            self.connected = False
            log.critical("the rank's link to its sidecar is dead error=%r", e)
            raise

    def _check_endpoint(self) -> None:
        """A rank whose endpoint has died must not keep its card and its old verdicts standing."""
        failed = self._endpoint.failed
        if failed is not None:
            raise _Ended(f"the rank's endpoint has failed, its card is withdrawn: {failed!r}")

    def _serve(self) -> None:
        """One connection, from connect to its end."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, selectors.DefaultSelector() as sel:
            sock.settimeout(SEND_DEADLINE)
            sock.connect(self._path)
            sel.register(sock, selectors.EVENT_READ)
            sel.register(self._wake_fd, selectors.EVENT_READ)
            session = _Session(self, sock, sel)
            failed = self._endpoint.failed
            if failed is None:
                session.run()
            else:
                session.tell_failed(failed)


class _Session:
    """State of one connection."""

    def __init__(self, link: RankLink, sock: socket.socket, sel: selectors.BaseSelector) -> None:
        self._link, self._sock, self._sel = link, sock, sel
        self._endpoint = link._endpoint
        self._card: RankCard | None = None
        self._verdicts: tuple[Verdict, ...] | None = None
        self._idle = True
        self._next_beat = 0.0
        self._next_metrics = 0.0
        self._buffer = bytearray()
        self._scanned = 0
        self._began = time.monotonic()

    def run(self) -> None:
        link = self._link
        self._report()
        link.connected = True
        while not link._stop.is_set():
            timeout = max(0.0, self._next_beat - time.monotonic())
            woken = False
            for key, _ in self._sel.select(timeout):
                if key.fileobj is self._sock:
                    self._read()
                else:
                    woken = True
            if woken and not link._stop.is_set():
                link._stop.wait(MIN_GAP)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(link._wake_fd)
                link._changed.clear()  # before the report: what changes from now on wakes again
                self._report()
            elif time.monotonic() >= self._next_beat:
                self._report()

    def tell_failed(self, failed: Exception) -> None:
        """Say why this rank moves no KV any more, for as long as its process lives."""
        link, card = self._link, self._endpoint.card
        text = " ".join(str(failed).split())[:MAX_REASON]
        self._send(Failed(rank=card.rank, incarnation=card.incarnation, message=text))
        log.error("the sidecar is told that this rank failed rank=%d error=%s", card.rank, text)
        while not link._stop.is_set():
            for key, _ in self._sel.select(QUIET):
                if key.fileobj is self._sock:
                    self._read()
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(link._wake_fd)
                    link._changed.clear()

    def _report(self) -> None:
        """Send what changed, and a heartbeat when one is due or work began or ended."""
        endpoint, link = self._endpoint, self._link
        link._check_endpoint()
        card = endpoint.card
        if self._card is None or (card is not self._card and card != self._card):
            self._send(Hello(card=card, expected_ranks=link._expected))
            log.info("card shown to the sidecar rank=%d incarnation=%s", card.rank, card.incarnation)
        self._card = card
        verdicts = endpoint.verdicts
        if self._verdicts is None or (verdicts is not self._verdicts and verdicts != self._verdicts):
            self._send(Verdicts(verdicts=verdicts))
        self._verdicts = verdicts
        now, inflight = time.monotonic(), endpoint.inflight
        if now >= self._next_beat or (inflight == 0) != self._idle:
            self._send(Heartbeat(inflight=inflight, metrics=self._metrics(now)))
            self._idle = inflight == 0
            self._next_beat = now + HEARTBEAT
        if link.refused is not None and now - self._began > 2 * HEARTBEAT:
            link.refused = None  # taken this time: a refusal comes at once

    def _metrics(self, now: float) -> Samples | None:
        """The rank's metrics when they are due. That they can't be read must not end the link."""
        if now < self._next_metrics:
            return None
        self._next_metrics = now + METRICS_EVERY
        try:
            return self._endpoint.metrics
        except Exception:
            log.exception("the rank's metrics can not be read")
            return None

    def _send(self, message: RankMessage) -> None:
        try:
            self._sock.sendall(message.model_dump_json().encode() + b"\n")
        except OSError:
            self._read_last()  # a Refuse may lie there, and says more than EPIPE
            raise

    def _read_last(self) -> None:
        try:
            self._sock.settimeout(0.2)
            while True:
                self._read()
        except OSError:
            return

    def _read(self) -> None:
        data = self._sock.recv(1 << 18)
        if not data:
            raise _Ended("the sidecar closed the connection")
        self._buffer += data
        while (end := self._buffer.find(b"\n", self._scanned)) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._scanned = 0
            self._handle(line)
        self._scanned = len(self._buffer)
        if self._scanned > MAX_LINE:
            raise _Ended(f"the sidecar sent a line over {MAX_LINE} bytes")

    def _handle(self, line: bytes) -> None:
        try:
            message = self._link._lines.message(line)
        except ValidationError as e:
            raise _Ended(f"the sidecar sent a line that can not be read ({e.error_count()} errors)") from e
        link, endpoint = self._link, self._endpoint
        if isinstance(message, Refuse):
            if message != link.refused:
                log.error("SIDECAR REFUSES THIS RANK reason=%s message=%s", message.reason, message.message)
            link.refused = message
            raise _Ended(f"refused: {message.reason}: {message.message}")
        link.refused = None
        try:
            if isinstance(message, Peers):
                endpoint.apply_peers(message.peers)
            elif isinstance(message, Drain):
                endpoint.drain()
            elif isinstance(message, Probe):
                endpoint.probe(message.pod_uids)
        except Exception as e:
            # The next roster, or the same one after a reconnect, is another chance.
            log.exception("the endpoint failed on a message of the sidecar type=%s", message.type)
            raise _Ended(f"the endpoint failed on {message.type}: {type(e).__name__}: {e}") from e
