"""The operator process: kopf watches and feeds wake-ups to runtime.Operator; nothing else is kopf's.

Only on.event handlers are used: no finalizers, no annotations, no daemons, so that `helm uninstall`
leaves nothing that hangs. Losing the Lease ends the process with exit code 1.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import kopf
from prometheus_client import start_http_server

from pdoperator import settings as process_settings
from pdoperator.api import names
from pdoperator.domain.decide import decide
from pdoperator.kube import client
from pdoperator.runtime.lease import LeaseLost
from pdoperator.runtime.operator import Operator

log = logging.getLogger("pdoperator")

_END_WITHIN = 20.0
"""Seconds from the wish to end until the process is gone, whatever hangs."""


class Process:
    """What one process holds; `stop_flag` tells kopf to end, `exit_code` how it went."""

    def __init__(self, settings: process_settings.OperatorSettings) -> None:
        self.settings = settings
        # Of asyncio, not threading: kopf would wait for that one in a thread that never ends.
        self.stop_flag = asyncio.Event()
        self.exit_code = 0
        self.operator: Operator | None = None
        self._kube: client.KubeClient | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect, and run the operator beside kopf's watches."""
        self._kube = await client.connect(kubeconfig=self.settings.kubeconfig or None)
        self.operator = Operator(self._kube, self.settings, decide)
        if self.settings.metrics_port:
            start_http_server(self.settings.metrics_port, registry=self.operator.metrics.registry)
        self._task = asyncio.create_task(self.operator.run(), name="operator")
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Bounded: a hanging call must not keep the Lease from being taken over."""
        self._bound()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=5.0)
        if self.operator is not None:
            await self.operator.stop()
        if self._kube is not None:
            await self._kube.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, LeaseLost):
            log.error("event=lease-lost message=%r", str(error))
        else:
            log.error("event=operator-ended error=%r", error, exc_info=error)
        self.exit_code = 1
        self._bound()
        self.stop_flag.set()

    def _bound(self) -> None:
        watchdog = threading.Timer(_END_WITHIN, lambda: os._exit(self.exit_code or 1))
        watchdog.daemon = True
        watchdog.start()


def build(process: Process) -> kopf.OperatorRegistry:
    """The kopf registry: login, start, stop, probe and two watches, none of which patches anything."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> Any:
        # Not kopf's default: it would import the synchronous kubernetes client (60 MiB more).
        if process.settings.kubeconfig:
            return kopf.login_with_kubeconfig(**kwargs)
        return kopf.login_with_service_account(**kwargs)

    @kopf.on.startup(registry=registry)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings)
        await process.start()

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        await process.stop()

    @kopf.on.probe(registry=registry, id="operator")
    async def probe(**_: Any) -> str:  # async: a plain function would run in a thread, outside of the loop
        return process.operator.health() if process.operator is not None else "starting"

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)
    async def cluster_event(event: Any, **_: Any) -> None:
        if process.operator is not None:
            process.operator.cluster_event(event["type"], dict(event["object"]))

    @kopf.on.event("", "v1", "pods", registry=registry, labels={names.LABEL_CLUSTER_UID: kopf.PRESENT})
    async def pod_event(event: Any, **_: Any) -> None:
        if process.operator is not None:
            process.operator.pod_event(event["type"], dict(event["object"]))

    return registry


def configure(settings: kopf.OperatorSettings) -> None:
    """kopf's settings: bounded watches, pods filtered by the server, no posting, no CRD scanning."""
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 30
    settings.watching.inactivity_timeout = 70
    settings.networking.request_timeout = 30
    settings.watching.label_selectors["", "v1", "pods"] = names.LABEL_CLUSTER_UID
    settings.posting.enabled = False
    settings.scanning.disabled = True


def main(argv: Sequence[str] | None = None) -> None:
    """Console script `pdcluster-operator`. Exit code 1 when the Lease was lost or the operator broke."""
    settings = process_settings.parse(argv)
    if settings.kubeconfig:
        os.environ["KUBECONFIG"] = settings.kubeconfig
    kopf.configure(verbose=settings.log_level == "DEBUG", log_format=_log_format(settings))
    logging.getLogger().setLevel(settings.log_level)
    logging.getLogger("asyncio").propagate = True  # kopf mutes it: an exception nobody awaited must show
    # A line per request, probe or watch event each.
    for chatty in ("httpx", "aiohttp.access", "kopf.activities.probe", "kopf.objects"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))
    process = Process(settings)
    kopf.run(
        registry=build(process),
        standalone=True,
        clusterwide=not settings.watch_namespaces,
        namespaces=settings.watch_namespaces,
        liveness_endpoint=f"http://{settings.health_address}/healthz",
        stop_flag=process.stop_flag,
    )
    sys.exit(process.exit_code)


def _log_format(settings: process_settings.OperatorSettings) -> Any:
    if settings.log_format == "json":
        return kopf.LogFormat.JSON
    return "time=%(asctime)s level=%(levelname)s logger=%(name)s %(message)s"


if __name__ == "__main__":
    main()
