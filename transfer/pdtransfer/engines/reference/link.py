"""Connects a rank's pool to the transfer module: layout and facts into an endpoint, the endpoint to peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pdtransfer.engines.reference.kv_pool import PagedKVPool
from pdtransfer.engines.reference.model_config import LlamaConfig
from pdtransfer.engines.reference.options import Options
from pdtransfer.engines.reference.problems import SetupError
from pdtransfer.session.api import Endpoint


class PeerSource(Protocol):
    """Feeds peers to the endpoint: the sidecar, or a folder of cards."""

    def start(self) -> object:
        """Begin; returns at once."""

    def stop(self) -> None:
        """End, and take the rank's card away."""


class Link:
    """An endpoint and where its peers come from."""

    def __init__(self, endpoint: Endpoint, source: PeerSource | None) -> None:
        self.endpoint = endpoint
        self._source = source

    def stop(self) -> None:
        """Take the card away; no new peers."""
        if self._source is not None:
            self._source.stop()


def connect(
    options: Options,
    config: LlamaConfig,
    pool: PagedKVPool,
    number: int,
    dtype: str,
    on_change: Callable[[], None],
) -> Link:
    """The link of rank `number`, started."""
    raise SetupError("this build has no transfer module: run with --disaggregation-mode null")
