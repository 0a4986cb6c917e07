"""Entry point of the sidecar container: puts hub, sockets and HTTP apps together and ends in order."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Sequence

from pdtransfer.sidecar import config
from pdtransfer.sidecar.api import ControlAPI, health_app
from pdtransfer.sidecar.hub import Hub
from pdtransfer.sidecar.model import Identity
from pdtransfer.sidecar.serve import HTTPServer
from pdtransfer.sidecar.sockets import RankServer
from pdtransfer.sidecar.store import StateFile
from pdtransfer.sidecar.tls import BadCertificates, ReloadingTLS

log = logging.getLogger(__name__)


class Sidecar:
    """One running sidecar. `start`, then `stop`; ports are real once started."""

    def __init__(self, settings: config.Settings) -> None:
        self.settings = settings
        store = StateFile(settings.state_file)
        identity = Identity(
            cluster_uid=settings.cluster_uid,
            pod_uid=settings.pod_uid,
            role=settings.role,
            pod_name=settings.pod_name,
            revision=settings.revision,
        )
        self.hub = Hub(store.load(identity), store)
        self.ranks = RankServer(self.hub, settings.socket, settings.socket_mode, settings.max_line_bytes)
        self.health = HTTPServer(
            health_app(self.hub, settings.wiring),
            settings.health_host,
            settings.health_port,
            max_connections=512,  # anonymous: silent clients must not crowd the kubelet out
        )
        self.control: HTTPServer | None = None
        self._tls: ReloadingTLS | None = None
        self._certificates: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. A missing or broken certificate does not keep the ranks out: it is retried, and
        /readyz says so. OSError or ValueError when a port or the socket can not be bound."""
        await self.ranks.start()
        await self.health.start()
        if self.settings.tls_dir is None:
            log.warning("INSECURE control API: plain HTTP, anyone on this machine may write rosters")
            await self._serve_control()
        else:
            if not self._first_certificates():
                log.error("control API waits for certificates: %s", self.hub.tls_problem)
            else:
                await self._serve_control()
            self._certificates = asyncio.create_task(self._watch_certificates(), name="certificates")

    def _first_certificates(self) -> bool:
        assert self.settings.tls_dir is not None
        try:
            self._tls = ReloadingTLS(self.settings.tls_dir)
        except BadCertificates as e:
            self.hub.tls_problem = str(e)
            return False
        self.hub.tls_problem = ""
        self.hub.tls_expires = self._tls.expires
        return True

    async def _serve_control(self) -> None:
        identity = self.settings.client_identity if self._tls is not None else None
        self.control = HTTPServer(
            ControlAPI(self.hub, self.settings.max_roster_bytes).app(identity),
            self.settings.host,
            self.settings.control_port,
            tls=self._tls.context if self._tls is not None else None,
        )
        await self.control.start()
        log.info("control API port=%d tls=%s", self.control.port, self._tls is not None)

    async def _watch_certificates(self) -> None:
        while True:
            await asyncio.sleep(self.settings.tls_interval)
            try:
                if self.control is None:
                    if self._tls is not None or self._first_certificates():
                        await self._serve_control()
                elif self._tls is not None and self._tls.poll():
                    self.hub.counts["tls_reloads", "Changed"] += 1
                    self.control.drop_idle()
                if self._tls is not None:
                    self.hub.tls_warning = self._tls.warning(time.time())
                    self.hub.tls_expires = self._tls.expires
            except Exception:
                # This watch is what keeps the API reachable for years: it must outlive any one error.
                log.exception("certificate watch failed, it goes on")

    async def stop(self) -> None:
        """End everything, each part within its bound."""
        if self._certificates is not None:
            self._certificates.cancel()
        for part in (self.control, self.health):
            if part is not None:
                await part.stop()
        await self.ranks.stop()

    async def linger(self) -> None:
        """Wait for the ranks to leave (native sidecars are told to stop last), at most `linger` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.linger
        while self.hub.state.ranks and loop.time() < deadline:  # noqa: ASYNC110 (bounded, at the end)
            await asyncio.sleep(0.05)


async def run(settings: config.Settings) -> None:
    """Serve until SIGTERM or SIGINT."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    sidecar = Sidecar(settings)
    try:
        await sidecar.start()
        log.info(
            "sidecar started cluster=%s pod=%s name=%s role=%s revision=%s wiring=%s health_port=%d",
            settings.cluster_uid,
            settings.pod_uid,
            settings.pod_name,
            settings.role.value,
            settings.revision,
            settings.wiring,
            sidecar.health.port,
        )
        await stopped.wait()
        log.info("stopping ranks=%d", len(sidecar.hub.state.ranks))
        await sidecar.linger()
    finally:
        await sidecar.stop()
    log.info("stopped")


def main(argv: Sequence[str] | None = None) -> int:
    """Console script `pdtransfer-sidecar`. Status 0 after a signal, 1 when it can not listen, 2 for usage."""
    settings = config.parse(argv)
    logging.basicConfig(
        level=settings.log_level,
        format="%(asctime)s level=%(levelname)s logger=%(name)s %(message)s",
        stream=sys.stderr,
    )
    try:
        asyncio.run(run(settings))
    except (OSError, ValueError) as e:
        log.error("sidecar can not start: %s", e)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
