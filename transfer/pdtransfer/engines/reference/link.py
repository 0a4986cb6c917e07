"""Connects a rank's pool to the transfer module: layout and facts into an endpoint, the endpoint to peers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

from pdtransfer.contract.base import Backend, EngineType, MemoryKind, Role
from pdtransfer.contract.card import EngineFacts, RankCard
from pdtransfer.contract.fingerprint import ModelIdentity
from pdtransfer.contract.identity import pod_server_name
from pdtransfer.contract.layout import RankLayout
from pdtransfer.engines.listening import listen_host
from pdtransfer.engines.reference.checkpoint import content_digest
from pdtransfer.engines.reference.endpoints import IntroducedEndpoint, RosteredEndpoint
from pdtransfer.engines.reference.facts import engine_version
from pdtransfer.engines.reference.kv_pool import PagedKVPool
from pdtransfer.engines.reference.model_config import LlamaConfig
from pdtransfer.engines.reference.options import Options
from pdtransfer.engines.reference.static_peers import StaticPeers
from pdtransfer.session.api import EndpointConfig, PoolRegion, Timeouts
from pdtransfer.sidecar.rank_link import RankLink

log = logging.getLogger(__name__)
MIB = 1 << 20
BACKENDS = {"pdcluster": Backend.PDCLUSTER, "nixl": Backend.NIXL, "mooncake": Backend.MOONCAKE}


class PeerSource(Protocol):
    """Feeds peers to the endpoint: the sidecar, or a folder of cards."""

    def start(self) -> object:
        """Begin; returns at once."""

    def stop(self) -> None:
        """End, and take the rank's card away."""

    @property
    def failed(self) -> BaseException | None:
        """Why its thread ended by itself."""


class Link:
    """An endpoint and where its peers come from."""

    def __init__(self, endpoint: RosteredEndpoint, source: PeerSource | None) -> None:
        self.endpoint = endpoint
        self._source = source

    @property
    def failed(self) -> str:
        """What has ended by itself and why, empty while all goes on."""
        if self.endpoint.failed is not None:
            return f"the transfer endpoint failed: {self.endpoint.failed}"
        if self._source is not None and self._source.failed is not None:
            return f"the link to this rank's peers failed: {self._source.failed!r}"
        return ""

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
    """The link of rank `number`, started: pool registered, card shown, peers followed."""
    endpoint = (IntroducedEndpoint if options.introduces else RosteredEndpoint)(
        card_template(options, config, pool.layout(number, options.tp_size), dtype),
        [
            PoolRegion(
                layer=r.layer,
                kind=r.kind.value,
                address=r.address,
                item_bytes=r.item_bytes,
                items=r.items,
                memory=r.memory.value if r.memory else MemoryKind.DRAM.value,
            )
            for r in pool.regions()
        ],
        endpoint_config(options, sum(r.item_bytes * r.items for r in pool.regions())),
    )
    endpoint.on_change(on_change)
    source: PeerSource | None = None
    if options.sidecar_socket is not None:
        source = RankLink(options.sidecar_socket, endpoint, options.tp_size)
    elif options.peers_dir is not None:
        source = StaticPeers(options.peers_dir, endpoint)
    elif not options.introduces:
        log.warning("neither --sidecar-socket nor --peers-file: this rank will never have a peer")
    if source is not None:
        source.start()
    return Link(endpoint, source)


def endpoint_config(options: Options, pool_bytes: int) -> EndpointConfig:
    """The endpoint's settings, from the flags. Staging memory is never more than the pool unless a flag says
    so: what travels at one time lies in the pool's pages."""
    staging = (
        min(EndpointConfig.staging_bytes, -(-pool_bytes // MIB) * MIB)
        if options.kv_staging_mib is None
        else options.kv_staging_mib * MIB
    )
    cap = options.kv_quarantine_mib
    return EndpointConfig(
        listen_host=listen_host(options.advertise_host),
        advertise_host=options.advertise_host,
        tls_dir=str(options.tls_dir) if options.tls_dir else None,
        server_name=pod_server_name(options.cluster_uid) if options.cluster_uid else EndpointConfig.server_name,
        net_devices=options.net_devices,
        nixl_plugin=options.nixl_plugin,
        nixl_params=dict(options.nixl_params),
        timeouts=Timeouts(waiting=options.waiting_timeout, transfer=options.kv_timeout),
        staging_bytes=staging,
        # Four slots at least, so that packing, writing and scattering overlap in a small arena too.
        staging_slot_bytes=max(1, min(EndpointConfig.staging_slot_bytes, staging // 4)),
        strategy=options.kv_strategy,
        digest=options.kv_digest,
        quarantine_cap=None if cap is None else cap * MIB,
    )


def card_template(options: Options, config: LlamaConfig, layout: RankLayout, dtype: str) -> RankCard:
    """The rank's card without what only the endpoint knows (agent, metadata, control address)."""
    backend = BACKENDS[options.backend]
    prefill = options.mode == "prefill"
    host = f"[{options.advertise_host}]" if ":" in options.advertise_host else options.advertise_host
    return RankCard(
        cluster_uid=options.cluster_uid,
        pod_uid=options.pod_uid,
        pod_name=options.pod_name,
        role=Role.PREFILL if prefill else Role.DECODE,
        revision=options.pod_revision,
        incarnation=options.incarnation,
        model=ModelIdentity(
            name=options.served_model_name,
            revision=options.model_revision or content_digest(options.model_path),
            dtype=dtype,
            layers=config.layers,
            total_kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            v_head_dim=config.head_dim,
        ),
        layout=layout,
        engine=EngineFacts(
            type=EngineType.REFERENCE,
            version=engine_version(),
            backend=backend,
            backend_emulated=backend is not Backend.PDCLUSTER,
            nixl_version=nixl_version(),
            max_total_tokens=layout.regions[0].items * layout.page_tokens,
        ),
        agent_name="",
        bootstrap=f"{host}:{options.bootstrap_port}" if prefill else "",
    )


def nixl_version() -> str:
    """Version of the installed NIXL, empty without one."""
    try:
        return version("nixl")
    except PackageNotFoundError:
        return ""
