"""SGLang's KV manager of one scheduler process: opens the rank's endpoint over SGLang's pool and keeps its health.

What only one side does is in `prefill` and `decode`. Nothing here raises inside SGLang's scheduler loop: a wrong
setting fails the start, whatever comes later fails its room with a reason.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, get_parallel, get_serving, get_spec

from pdtransfer.contract.base import Role
from pdtransfer.contract.identity import pod_server_name
from pdtransfer.contract.layout import RankCoordinates
from pdtransfer.engines.listening import listen_host
from pdtransfer.engines.sglang import identity
from pdtransfer.engines.sglang.decode import DecodePart
from pdtransfer.engines.sglang.devices import net_devices
from pdtransfer.engines.sglang.layout import component_pools, pool_regions
from pdtransfer.engines.sglang.memory import pointer_kinds
from pdtransfer.engines.sglang.plugin import LAUNCH
from pdtransfer.engines.sglang.prefill import PrefillPart
from pdtransfer.engines.sglang.rank import Rank
from pdtransfer.engines.sglang.rows import Buffers
from pdtransfer.engines.sglang.settings import read_settings
from pdtransfer.engines.sglang.threads import watched
from pdtransfer.session.api import EndpointConfig, PoolRegion, Timeouts
from pdtransfer.session.endpoint import nixl_agent

log = logging.getLogger(__name__)
MIB = 1 << 20
WATCH_S = 5.0
"""Between two looks at the endpoint's thread."""


class PdclusterKVManager(PrefillPart, DecodePart, CommonKVManager):  # type: ignore[misc]
    """One for each scheduler process, of either role."""

    supports_deferred_decode_kv_release = True
    reports_transfer_latency = True
    kv_status_msg_tag = b"KV_STATUS"
    kv_status_msg_carries_reason = True
    agent_factory = staticmethod(nixl_agent)
    """Makes the rank's NIXL agent."""
    _opened = 0
    """Endpoints so far."""
    _broken = ""
    """What ended in this process that should not have: a later endpoint (see below) is of no use either."""

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        self.settings = read_settings()
        self.role = Role.PREFILL if disaggregation_mode == DisaggregationMode.PREFILL else Role.DECODE
        self.pools = component_pools(args)
        self.buffers = Buffers(
            tuple(map(int, args.aux_data_ptrs)),
            tuple(map(int, args.aux_item_lens)),
            min(n // size for n, size in zip(args.aux_data_lens, args.aux_item_lens, strict=True)),
        )
        self._begin_prefill()
        self._begin_decode()
        super().__init__(args, disaggregation_mode, server_args, bool(is_mla_backend))
        if self.system_dp_size > 1 and self.attn_dp_size == 1:
            # Replicas in one server (--dp-size without DP attention): SGLang's sender compares a room's replica with
            # this rank, which is 0 in all of them, and refuses what is not for the first one.
            self.attn_dp_rank = self.system_dp_rank
        try:
            if self.role is Role.DECODE:
                self._open()
            self._start()
        except BaseException:
            self.teardown()
            raise

    # --- start ------------------------------------------------------------------------------

    def _start(self) -> None:
        self._threads.append(watched("pdcluster-watch", self._watch, self.broken))
        if self.role is Role.PREFILL:
            self._start_prefill()
        else:
            self._start_decode()

    def _open(self) -> None:
        """Register the pool and show the card. Raises what is wrong with the settings or the layout."""
        self._refuse_unsupported()
        latent = bool(self.is_mla_backend or self.is_hybrid_mla_backend)
        model = identity.read_model(self.server_args, latent)
        dp = (self.attn_dp_rank, self.attn_dp_size)
        if self.system_dp_size > 1 and self.attn_dp_size == 1:
            dp = (self.system_dp_rank, self.system_dp_size)
        at = RankCoordinates(
            tp=self.attn_tp_rank,
            tp_size=self.attn_tp_size,
            pp=self.pp_rank,
            pp_size=self.pp_size,
            dp=dp[0],
            dp_size=dp[1],
            cp=self.attn_cp_rank,
            cp_size=self.attn_cp_size,
        )
        first = int(self.kv_args.prefill_start_layer) if self.role is Role.PREFILL else None
        stage = identity.stage_of(model, at, first)
        kinds = pointer_kinds(str(get_device().device), self.settings.emulated_vram)
        gpu = 0 if self.settings.emulated_vram else int(self.kv_args.gpu_id or 0)
        regions = pool_regions(self.kv_args, stage, kinds, gpu)
        place = identity.Place(
            role=self.role,
            host=self._host,
            port=int(get_serving().port),
            bootstrap=self._bootstrap_address(),
            incarnation=self._incarnation(),
        )
        speculation = str(get_spec().speculative_algorithm or "")
        template = identity.card_template(
            self.settings, place, model, at, stage.heads, regions, self.kv_args, speculation
        )
        self.rank = Rank(
            template,
            regions,
            self._config(regions),
            self.settings,
            self._ranks_here(),
            self._peers_changed,
            self.agent_factory,
        )
        self.rank.endpoint.on_change(self._look)
        if self._broken:
            self.broken(self._broken)

    def _refuse_unsupported(self) -> None:
        if self.dcp_size > 1:
            raise RuntimeError("pdcluster: decode context parallelism (--dcp-size) is not supported; use mooncake")
        if self.attn_cp_size > 1 and self.enable_all_cp_ranks_for_transfer:
            raise RuntimeError(
                "pdcluster: prefill context parallelism is supported with one sending rank; unset "
                "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER and layer split, or use mooncake"
            )
        if envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.get() == "INTRA_NODE_NVLINK":
            raise RuntimeError(
                "pdcluster: SGLANG_MOONCAKE_CUSTOM_MEM_POOL=INTRA_NODE_NVLINK puts metadata rows into device "
                "memory, where they can not be read; unset it"
            )

    def _bootstrap_address(self) -> str:
        if self.role is Role.DECODE:
            return ""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self.bootstrap_port}"

    @property
    def _host(self) -> str:
        """Where peers reach this rank: what routers call the pod, else the address that SGLang found."""
        return self.settings.host or str(self.local_ip)

    def _incarnation(self) -> str:
        """New at each engine start and whenever SGLang gives its pools back, the same in all of its ranks."""
        self._opened += 1
        if self.system_dp_size > 1 and os.environ.get(LAUNCH):  # replicas have no group in common
            shared = f"incarnation {self._opened} of {os.environ[LAUNCH]}"  # public, and LAUNCH is not
            return hashlib.sha256(shared.encode()).hexdigest()[:16]
        parallel = get_parallel()
        mine = identity.new_incarnation()
        if parallel.tp_size * parallel.pp_size == 1:
            return mine
        return str(parallel.world_group.broadcast_object(mine, src=0))

    def _ranks_here(self) -> int:
        parallel = get_parallel()
        replicas = self.system_dp_size if self.attn_dp_size == 1 else 1
        return max(1, int(parallel.tp_size * parallel.pp_size * replicas) // max(1, int(parallel.nnodes)))

    def _config(self, regions: list[PoolRegion]) -> EndpointConfig:
        """The endpoint's settings: SGLang's own timeouts, and staging memory that is never more than the pool."""
        held, waiting = self.settings, self._waiting_seconds()
        staging = EndpointConfig.staging_bytes if held.staging_mib is None else held.staging_mib * MIB
        if held.staging_mib is None:
            staging = min(staging, -(-sum(r.item_bytes * r.items for r in regions) // MIB) * MIB)
        return EndpointConfig(
            listen_host=listen_host(self._host),
            advertise_host=self._host,
            tls_dir=str(held.tls_dir) if held.tls_dir else None,
            server_name=pod_server_name(held.cluster_uid) if held.cluster_uid else EndpointConfig.server_name,
            net_devices=held.net_devices
            or net_devices(getattr(self.kv_args, "ib_device", None), int(self.kv_args.gpu_id or 0)),
            nixl_plugin=held.nixl_plugin,
            nixl_params=held.nixl_params,
            timeouts=Timeouts(waiting=waiting, transfer=held.transfer_seconds or max(Timeouts.transfer, waiting)),
            quarantine_cap=None if held.quarantine_mib is None else held.quarantine_mib * MIB,
            staging_bytes=staging,
            # Four slots at least, so that packing, writing and scattering overlap in a small arena too.
            staging_slot_bytes=max(1, min(EndpointConfig.staging_slot_bytes, staging // 4)),
            strategy=held.strategy if self.role is Role.DECODE else "auto",
            digest=held.digest and self.role is Role.DECODE,
        )

    def _waiting_seconds(self) -> float:
        """How long one side waits for the other: SGLang's own two limits, the longer one."""
        return float(
            max(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get(), envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get())
        )

    # --- health -----------------------------------------------------------------------------

    @property
    def problem(self) -> str:
        """Why no transfer of this rank can succeed from now on; empty while it is well."""
        if self.rank is None:
            return "the rank's endpoint is not open"
        return self.rank.problem or self.unregistered

    def broken(self, what: str) -> None:
        """A thread of this manager ended: every room fails from now on, and says so."""
        self._broken = what
        if self.rank is not None:
            self.rank.broken(what)
        log.critical("PDCLUSTER IS UNHEALTHY: %s", what)
        self._look()

    def _watch(self) -> None:
        """Deadlines of rooms tick in the endpoint's thread: when that one hangs, nothing else would end them."""
        while not self._stop.wait(WATCH_S):
            rank = self.rank
            hung = "" if rank is None else rank.hung()
            if hung:
                self.broken(hung)

    def _look(self) -> None:
        """Anything changed. An engine that can never move KV again, and has no operator to see that, ends: its
        health would stay green (SGLang asks it with fake transfers), and requests would wait for nothing."""
        rank = self.rank
        if rank is None or self._ending or not rank.problem:
            return
        if rank.rostered and not rank.must_end:
            return
        self._ending = True
        log.critical("pdcluster ends this engine: %s", rank.problem)
        os.kill(os.getppid(), signal.SIGQUIT)  # as SGLang's scheduler does when it fails

    def fail_room(self, room: int, reason: str) -> None:
        """Fail one request of this rank. A room that SGLang forgot stays forgotten: another may come by its name."""
        if room in self.request_status:
            self.record_failure(room, reason)
            self.update_status(room, KVPoll.Failed)

    # --- memory that SGLang takes away and gives back ---------------------------------------

    def deregister_buffer_to_engine(self) -> None:
        """SGLang is about to unmap its pools (release_memory_occupation): nothing may be registered or written then.
        Rooms fail until the pools are back."""
        rank, self.rank = self.rank, None
        if rank is not None:
            rank.close()

    def register_buffer_to_engine(self) -> None:
        """The pools are back, in the same place: a new endpoint over them, which is another incarnation."""
        if self.rank is not None:
            return
        if self.role is Role.PREFILL:
            self.register_to_bootstrap()
            return
        self._open()
        for address in list(self.prefill_info_table):
            self.forget_prefill(address)

    def teardown(self) -> None:
        """Give everything back."""
        self._stop_prefill()
        self._stop_decode()
        if self.rank is not None:
            self.rank.close()
        # A context with open sockets would block whoever collects it.
        self.server_socket.close(linger=0)
        self._zmq_ctx.destroy(linger=0)
