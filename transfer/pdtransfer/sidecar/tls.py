"""The sidecar's TLS context from a mounted folder, reloaded while it runs.

A new folder content is tried out in memory (a handshake with itself: key fits certificate, chain
leads to ca.crt, dates hold) before it replaces the old; what fails is logged and the old one stays.
"""

from __future__ import annotations

import hashlib
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from pdtransfer.sidecar.identity import peer_of

log = logging.getLogger(__name__)

FILES = ("ca.crt", "tls.crt", "tls.key")


class BadCertificates(Exception):
    """The folder's files can not serve; the message says why, and never holds key material."""


@dataclass(frozen=True)
class _Loaded:
    context: ssl.SSLContext
    digest: str
    expires: float


def _digest(folder: Path) -> str:
    h = hashlib.sha256()
    for name in FILES:
        try:
            data = (folder / name).read_bytes()
        except OSError as e:
            raise BadCertificates(f"{name} can not be read: {e.strerror}") from e
        h.update(len(data).to_bytes(8, "big") + data)
    return h.hexdigest()


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> float:
    """Run both sides over memory; when the server's certificate ends (Unix time). ssl.SSLError when
    they don't agree."""
    a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [server.wrap_bio(a, b, server_side=True), client.wrap_bio(b, a)]
    done = [False, False]
    for _ in range(8):
        for i in (1, 0):
            if not done[i]:
                try:
                    sides[i].do_handshake()
                    done[i] = True
                except ssl.SSLWantReadError:
                    pass
        if all(done):
            shown = peer_of(sides[1].getpeercert())
            return shown.expires if shown is not None else 0.0
    raise BadCertificates("the handshake with itself did not end")


def load(folder: Path) -> _Loaded:
    """A server context that demands a client certificate of ca.crt. BadCertificates when it can't be."""
    before = _digest(folder)
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3  # both ends are ours; no renegotiation
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        context.load_verify_locations(folder / "ca.crt")
        # A resumed session would carry over a client that the present CA may no longer vouch for.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        client.load_verify_locations(folder / "ca.crt")
        expires = _handshake(context, client)
        context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLCertVerificationError as e:
        raise BadCertificates(f"tls.crt does not verify against ca.crt: {e.verify_message}") from e
    except ssl.SSLError as e:
        raise BadCertificates(f"certificate, key or CA can not be used: {e.reason or type(e).__name__}") from e
    except OSError as e:
        raise BadCertificates(f"a file can not be read: {e.strerror}") from e
    if _digest(folder) != before:
        raise BadCertificates("the files changed while they were read")
    return _Loaded(context, before, expires)


class ReloadingTLS:
    """`context` is handed to the listener once; each new handshake uses the newest good certificates."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded = load(folder)
        self.problem = ""
        """Why the newest files are not used, empty when they are."""
        self.context = load(folder).context
        self.context.sni_callback = self._choose

    @property
    def expires(self) -> float:
        """When the served certificate ends (Unix time)."""
        return self._loaded.expires

    def warning(self, now: float) -> str:
        """What is odd while the old certificates serve, empty when nothing is."""
        expired = "the served certificate has expired" if now > self.expires else ""
        newer = f"newer files are not used: {self.problem}" if self.problem else ""
        return "; ".join(w for w in (expired, newer) if w)

    def _choose(self, sslobj: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        # OpenSSL calls this for every handshake, with or without SNI, before it sends a certificate;
        # certificate, CA store and options then come from the newest context.
        sslobj.context = self._loaded.context

    def poll(self) -> bool:
        """Look at the files; True when new certificates are in use from now on."""
        try:
            digest = _digest(self._folder)
            if digest == self._loaded.digest:
                self.problem = ""
                return False
            self._loaded = load(self._folder)
        except BadCertificates as e:
            if str(e) != self.problem:
                log.error("new certificates are not used, the old ones stay: %s", e)
            self.problem = str(e)
            return False
        self.problem = ""
        log.info("certificates reloaded folder=%s", self._folder)
        return True
