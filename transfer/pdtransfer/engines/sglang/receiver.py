"""Decode's side of one request: what SGLang's scheduler drives, on the endpoint's receiver.

SGLang's own messages to prefill are not used but for notes to ranks that have nothing to send. Pages of a request
that failed stay held until the ledger says that nothing can land in them any more.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import zmq
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.utils.network import NetworkAddress

from pdtransfer.contract.base import MemoryKind
from pdtransfer.engines.sglang.messages import GiveUp, Note, encode
from pdtransfer.engines.sglang.reasons import reason_of
from pdtransfer.engines.sglang.rows import BadRows, Trailer, unpack
from pdtransfer.errors import LayoutMismatch, PeerReplaced, PeerUnreachable, TransferError
from pdtransfer.session.api import TransferState

if TYPE_CHECKING:
    from pdtransfer.session.transfers import ReceiveTransfer

log = logging.getLogger(__name__)
OVER = (TransferState.SUCCESS, TransferState.FAILED)


def tell(ip: str, port: int, message: list[bytes]) -> bool:
    """Send to a prefill rank's ZMQ port; False when it could not be queued."""
    at = NetworkAddress(ip, port)
    try:
        socket, lock = CommonKVReceiver._connect(at.to_tcp(), is_ipv6=at.is_ipv6)
        with lock:
            socket.send_multipart(message)
    except zmq.ZMQError as error:
        log.warning("prefill rank %s:%d can not be told: %s", ip, port, error)
        return False
    return True


class PdclusterKVReceiver(CommonKVReceiver):  # type: ignore[misc]
    """One request, one decode rank, over all prefill ranks it takes KV from."""

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self._transfer: ReceiveTransfer | None = None
        self._aux_index = -1
        self._told = False
        self.attempt = mgr.next_attempt(bootstrap_room)
        self._incarnation = mgr.rank.card.incarnation if mgr.rank is not None else ""
        self.bootstrap_infos: list[dict[str, Any]] | None = None
        super().__init__(mgr, bootstrap_addr, bootstrap_room)

    # --- what SGLang calls ------------------------------------------------------------------

    @property
    def supports_host_destination(self) -> bool:
        """KV may go to host memory."""
        return bool(self.kv_mgr.supports_host_destination)

    @property
    def releasable(self) -> bool:
        """Nothing can land in the request's pages (any more)."""
        return self._transfer is None or self._transfer.pages_releasable

    @property
    def running(self) -> bool:
        """KV was asked for and is not all here."""
        return self._transfer is not None and self._transfer.state not in OVER

    def is_abort_release_safe(self) -> bool:
        """Whether an aborted host destination may be used again."""
        return self.releasable

    def init(self, prefill_dp_rank: int) -> None:
        """The prefill engine is known; find the ranks of the request's group."""
        try:
            if self.kv_mgr.problem:
                raise PeerUnreachable(self.kv_mgr.problem)
            super().init(prefill_dp_rank)
        except Exception as error:
            if not isinstance(error, TransferError):
                log.exception("room %s can not begin", self.bootstrap_room)
            self._fail(reason_of(error))

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:
        """Pages are allocated: ask for the KV."""
        if self.conclude_state is not None:
            return
        try:
            if device_kv_indices is not None:
                raise LayoutMismatch("HiSparse with device pages of their own (V4, draft models) needs mooncake")
            memory = None
            if self.supports_host_destination:
                memory = MemoryKind.DRAM if destination == KVTransferDestination.HOST else MemoryKind.VRAM
            self._ask(kv_indices, aux_index, state_indices, decode_prefix_len or 0, memory)
        except Exception as error:
            if not isinstance(error, TransferError):
                log.exception("room %s can not be asked for", self.bootstrap_room)
            if isinstance(error, PeerUnreachable | PeerReplaced):
                self.kv_mgr.forget_prefill(self.bootstrap_addr)
            self._fail(reason_of(error))

    def poll(self) -> Any:
        """SGLang's phase of the request. Never raises."""
        if self.conclude_state is not None:
            return self.conclude_state
        try:
            return self._look()
        except Exception as error:
            if not isinstance(error, BadRows):
                log.exception("room %s can not be looked at", self.bootstrap_room)
            self._fail(reason_of(error))
            return KVPoll.Failed

    def abort(self) -> None:
        """The request is over here; prefill stops, and acknowledges when nothing is under way any more."""
        if self.conclude_state != KVPoll.Failed:
            # SGLang aborts a request too whose prefill engine it could not reach in 15 tries.
            self._fail(self.kv_mgr.meetings.trouble(self.bootstrap_addr) or "Aborted by AbortReq.")
        self.ensure_abort_notified()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Stop the transfer and tell prefill ranks that wait. `abort_notified` makes SGLang keep the pages until
        `is_abort_release_safe` says that they are free: always where KV was asked for."""
        transfer = self._transfer
        if transfer is not None:
            if transfer.state not in OVER:
                transfer.abort(self.kv_mgr.failure_records.get(self.bootstrap_room, "aborted"))
            self.abort_notified = True
        self._tell_all("aborted")

    def clear(self) -> None:
        """SGLang forgets the request. Its pages do not become free by that."""
        super().clear()
        self.kv_mgr.let_go(self.bootstrap_room, self)

    # --- inside -----------------------------------------------------------------------------

    def _ask(
        self, pages: Any, aux_index: int | None, state: list[Any] | None, prefix: int, memory: MemoryKind | None
    ) -> None:
        manager, room = self.kv_mgr, self.bootstrap_room
        size = int(manager.kv_args.page_size)
        if not self.bootstrap_infos:
            raise PeerUnreachable(f"no prefill rank is known at {self.bootstrap_addr}")
        if not room:
            raise LayoutMismatch("bootstrap_room 0 can not be told from an empty metadata row; use another one")
        if aux_index is None:
            raise BadRows("there is no metadata row for the request")
        if prefix % size:
            raise LayoutMismatch(f"a prefix of {prefix} tokens does not end where a page of {size} ends")
        first = prefix // size
        pools = {n: s for n, s in zip(manager.pools, state or (), strict=False) if s is not None and len(s)}
        self._aux_index = aux_index
        self._remind()
        self._note(first)
        self._transfer = manager.rank.endpoint.receive(
            room=room,
            attempt=self.attempt,
            bootstrap=self.bootstrap_addr,
            pages=pages,
            first_page=first,
            tokens=(first + len(pages)) * size,
            memory=memory,
            pools=pools,
            group=self.prefill_dp_rank,
        )
        manager.hold(room, self)
        self.init_time = time.time()

    def _remind(self) -> None:
        """An introduction has no answer: say again who this is where prefill does not know it yet."""
        rank = self.kv_mgr.rank
        registry = self.kv_mgr.meetings.met(self.bootstrap_addr)
        if registry is not None and not all(rank.wired(c) for c in rank.peers if c.bootstrap == self.bootstrap_addr):
            self.kv_mgr.introduce_to(registry)

    def _note(self, first_page: int) -> None:
        """Tell the ranks of the group that have nothing to send."""
        for info in self.bootstrap_infos or ():
            if info["is_dummy"]:
                note = Note(
                    room=self.bootstrap_room,
                    attempt=self.attempt,
                    first_page=first_page,
                    source=info["incarnation"],
                    destination=self._incarnation,
                )
                if not tell(info["rank_ip"], info["rank_port"], encode(note)):
                    raise PeerUnreachable(f"prefill rank {info['rank_ip']}:{info['rank_port']} takes no messages")

    def _tell_all(self, reason: str) -> None:
        """Prefill ranks that wait for this request wait no longer. Never raises: it is called where failures end."""
        if self._told or not self.bootstrap_infos:
            return
        self._told = True
        for info in self.bootstrap_infos:
            try:
                told = GiveUp(
                    room=self.bootstrap_room,
                    attempt=self.attempt,
                    reason=reason,
                    source=info["incarnation"],
                    destination=self._incarnation,
                )
                tell(info["rank_ip"], info["rank_port"], encode(told))
            except Exception:
                log.exception("room %s: a prefill rank can not be told that it is over", self.bootstrap_room)

    def _look(self) -> Any:
        manager, room, transfer = self.kv_mgr, self.bootstrap_room, self._transfer
        if transfer is None:
            if manager.problem:
                self._fail(manager.problem)
            status = manager.request_status.get(room, KVPoll.Failed)
            if status == KVPoll.Failed:
                self.conclude_state = status
                self._tell_all(manager.failure_records.get(room, "decode failed"))
            return status
        state = transfer.state
        if state is TransferState.SUCCESS:
            self._write_rows()
            manager.update_status(room, KVPoll.Success)
            self.conclude_state = KVPoll.Success
            return KVPoll.Success
        if state is TransferState.FAILED:
            if isinstance(transfer.error, PeerUnreachable | PeerReplaced):
                manager.forget_prefill(self.bootstrap_addr)
            self._fail(reason_of(transfer.error))
            return KVPoll.Failed
        if manager.rank is not None and manager.rank.endpoint.failed is not None:
            self._fail(manager.rank.problem)  # its thread hangs and could not end the transfer; its pages stay held
            return KVPoll.Failed
        status = KVPoll.Transferring if state is TransferState.TRANSFERRING else KVPoll.WaitingForInput
        manager.update_status(room, status)
        return status

    def _write_rows(self) -> None:
        """The metadata rows, before SGLang hears of success."""
        assert self._transfer is not None and self._transfer.metadata is not None
        trailer, rows = unpack(self._transfer.metadata)
        mine = self.kv_mgr.rank.card.incarnation
        sources = {info["incarnation"] for info in self.bootstrap_infos or ()}
        expected = Trailer(self.bootstrap_room, self.attempt, trailer.source, mine)
        if trailer != expected or trailer.source not in sources:
            raise BadRows(f"the metadata is of {trailer}, expected was {expected} from one of {sorted(sources)}")
        self.kv_mgr.buffers.write(self._aux_index, rows)

    def _get_bootstrap_info_from_server(
        self, prefill_dp_rank: int, prefill_cp_rank: int, target_tp_rank: int, target_pp_rank: int
    ) -> dict[str, Any] | None:
        """Where a prefill rank is, and whether it sends: known since the first contact, no HTTP in the scheduler."""
        registry = self.kv_mgr.meetings.met(self.bootstrap_addr)
        found = registry.at(prefill_dp_rank, prefill_cp_rank, target_tp_rank, target_pp_rank) if registry else None
        if found is None:
            self.kv_mgr.forget_prefill(self.bootstrap_addr)  # the registry is of no use: the next request asks anew
            return None
        rank = self.kv_mgr.rank
        place = (found.card.pod_uid, found.card.rank, found.card.incarnation)
        return {
            "rank_ip": found.ip,
            "rank_port": found.port,
            "pp_rank": int(target_pp_rank),
            "incarnation": found.card.incarnation,
            "sends": any((c.pod_uid, c.rank, c.incarnation) == place for c in rank.peers),
        }

    def _setup_bootstrap_infos(self) -> None:
        super()._setup_bootstrap_infos()
        for info in self.bootstrap_infos or ():
            info["is_dummy"] = not info["sends"]

    def _register_kv_args(self) -> bool:
        """Nothing to register: the card was shown at the first contact."""
        return self.bootstrap_infos is not None

    def _fail(self, reason: str) -> None:
        self.kv_mgr.fail_room(self.bootstrap_room, reason)
        self.conclude_state = KVPoll.Failed
        self._tell_all(reason)
