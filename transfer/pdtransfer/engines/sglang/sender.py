"""Prefill's side of one request: what SGLang's scheduler drives, on the endpoint's sender.

A rank whose rows another rank of its group sends (more ranks than KV heads, MLA) has no transfer: a note of decode
says so, and it goes along with the others. Whether a rank of the request's group has a transfer is known before
SGLang computes: `WaitingForInput` comes after every decode rank has asked.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVSender

from pdtransfer.engines.sglang.events import ready_event
from pdtransfer.engines.sglang.reasons import reason_of
from pdtransfer.engines.sglang.rows import BadRows, Trailer, pack
from pdtransfer.errors import TransferError
from pdtransfer.session.api import TransferState

if TYPE_CHECKING:
    from pdtransfer.session.api import Asked
    from pdtransfer.session.transfers import SendTransfer

log = logging.getLogger(__name__)
GRACE_S = 2.0
"""A request that decode gave up before it came here may be an earlier attempt of this room: the next one is asked
for within this time."""


class PdclusterKVSender(CommonKVSender):  # type: ignore[misc]
    """One request, one prefill rank. The scheduler's thread uses it; on later pipeline stages another one looks
    whether decode has asked, until SGLang calls init()."""

    def __init__(
        self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ) -> None:
        self._transfer: SendTransfer | None = None
        self._asked: Asked | None = None
        self._first_page = 0
        self._surplus = bool(mgr.is_dummy_cp_rank)
        """It sends nothing: another rank has the same rows."""
        self._made = time.monotonic()
        self.asker: tuple[str, int] | None = None
        """Decode's incarnation and its attempt of the room, once they are known."""
        self._gave_up = False
        """Decode did, and knows it."""
        self._begun = self._over = False
        self._lock = threading.RLock()
        """Held while the status is brought up to date; nothing under it waits."""
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        if not self._owns_bootstrap_room:
            return
        mgr.enlist(bootstrap_room, self)
        try:
            mgr.rank.endpoint.expect(bootstrap_room)
        except Exception as error:
            self._fail(reason_of(error))

    # --- what SGLang calls ------------------------------------------------------------------

    def pop_decode_prefix_len(self) -> int:
        """Tokens that decode has already."""
        with self._lock:
            if self.asker is None:
                self._refresh()
        return self._first_page * int(self.kv_mgr.kv_args.page_size)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Every decode rank has asked; `num_kv_indices` pages will come."""
        super().init(num_kv_indices, aux_index)
        with self._lock:
            self._begun = True
            if self._surplus or self._transfer is not None or self.conclude_state is not None:
                return
            try:
                self._begin(num_kv_indices)
            except Exception as error:
                self._fail(reason_of(error))

    def take(
        self,
        pages: Any,
        index_slice: slice,
        last: bool,
        aux_index: int | None,
        state_indices: list[Any] | None,
        wait_event: Any,
        indices_event: Any,
    ) -> None:
        """Pages `index_slice` of what is to be sent, in this rank's pool."""
        if self._surplus:
            if last:
                self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)
            return
        if self._transfer is None:
            return
        try:
            if indices_event is not None:
                indices_event.synchronize()
            self._hand_over(pages, index_slice, last, aux_index, state_indices, wait_event)
        except Exception as error:
            if not isinstance(error, TransferError | BadRows):
                log.exception("room %d can not be sent", self.bootstrap_room)
            self._transfer.abort(reason_of(error))
            self._fail(reason_of(error))

    def poll(self) -> Any:
        """SGLang's phase of the request."""
        self._refresh()
        return super().poll()

    def poll_pp_consensus(self) -> Any:
        """The same over all pipeline stages."""
        self._refresh()
        return super().poll_pp_consensus()

    def abort(self) -> None:
        """The request is over here. Decode hears of it at once. SGLang clears not every request that it aborted."""
        with self._lock:
            self._abandon("Aborted by AbortReq.")
            super().abort()
            self.kv_mgr.forget_room(self.bootstrap_room, self)

    def clear(self) -> None:
        """SGLang forgets it. Decode hears of it at once where it would wait for nothing."""
        with self._lock:
            self._over = True
            if self._transfer is None or self._transfer.state not in (TransferState.SUCCESS, TransferState.FAILED):
                self._abandon(self.kv_mgr.failure_records.get(self.bootstrap_room, "prefill cleared the request"))
            super().clear()
            self.kv_mgr.forget_room(self.bootstrap_room, self)

    # --- a later pipeline stage ---------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """SGLang has not begun it, nor ended it."""
        return not self._begun and not self._over and self.conclude_state is None

    def advance(self) -> None:
        """Look whether decode has asked, from another thread than the scheduler's. Never raises."""
        with self._lock:
            if self.waits:
                self._refresh()

    # --- inside -----------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Bring SGLang's status up to date. Never raises."""
        with self._lock:
            if self.conclude_state is not None or self._over:
                return
            try:
                self._look()
            except Exception as error:
                log.exception("room %d can not be looked at", self.bootstrap_room)
                self._fail(reason_of(error))

    def _look(self) -> None:
        manager, room = self.kv_mgr, self.bootstrap_room
        transfer = self._transfer
        if transfer is not None:
            state = transfer.state
            if state is TransferState.FAILED:
                self._fail(reason_of(transfer.error))
            elif state is TransferState.SUCCESS:
                manager.update_status(room, KVPoll.Success)
            elif manager.rank is not None and manager.rank.endpoint.failed is not None:
                self._fail(manager.rank.problem)  # its thread hangs and could not end the transfer
            elif state is TransferState.TRANSFERRING:
                manager.update_status(room, KVPoll.Transferring)
            return
        if manager.problem:
            self._fail(manager.problem)
            return
        if self.asker is None and not self._surplus:
            self._hear()
        told = manager.told.given_up(room, self._made)
        if told is None:
            return
        late = time.monotonic() - self._made > GRACE_S
        asker = (told.destination, told.attempt)
        if late if self.asker is None else asker[0] == self.asker[0] and asker[1] >= self.asker[1]:
            # What it asked for already ends over the control channel as well.
            self.asker, self._gave_up = asker, True
            self._fail(f"decode gave up: {told.reason}")

    def _hear(self) -> None:
        """Has everyone asked?"""
        manager, room = self.kv_mgr, self.bootstrap_room
        note = manager.told.take_note(room)
        if note is not None:
            self._surplus, self._first_page = True, note.first_page
            self.asker = (note.destination, note.attempt)
        else:
            asked = manager.rank.endpoint.asked(room)
            if asked is None or not asked.complete:
                return
            self._asked, self._first_page = asked, asked.first_page
            self.asker = (asked.destination, asked.attempt)
            if manager.is_mla_backend:
                manager._kv_replica_factor = asked.required  # for SGLang's metric of bytes
        manager.update_status(room, KVPoll.WaitingForInput)

    def _begin(self, pages: int) -> None:
        size = int(self.kv_mgr.kv_args.page_size)
        self._transfer = self.kv_mgr.rank.endpoint.send(
            room=self.bootstrap_room, tokens=(self._first_page + pages) * size
        )
        asked = self.kv_mgr.rank.endpoint.asked(self.bootstrap_room)
        if asked is None or not asked.complete:
            # It went while the request was queued: nobody would take what is computed now.
            self._transfer.abort("a decode rank that had asked is gone")

    def _hand_over(
        self, pages: Any, index_slice: slice, last: bool, aux_index: int | None, state: list[Any] | None, event: Any
    ) -> None:
        transfer, manager = self._transfer, self.kv_mgr
        assert transfer is not None
        pools = None
        if last and state is not None:
            pools = {n: s for n, s in zip(manager.pools, state, strict=True) if s is not None}
        if len(pages) or pools:
            transfer.chunk(pages, self._first_page + index_slice.start, ready_event(event), pools=pools)
        if last:
            if aux_index is None:
                raise BadRows("the last chunk came without a metadata row")
            transfer.finish(pack(self._trailer(), manager.buffers.read(aux_index)))

    def _trailer(self) -> Trailer:
        assert self._asked is not None
        source = self.kv_mgr.rank.card.incarnation
        return Trailer(self.bootstrap_room, self._asked.attempt, source, self._asked.destination)

    def _abandon(self, reason: str) -> None:
        """Tell decode, whether it has asked or will. A sender whose room is another's says nothing."""
        manager = self.kv_mgr
        if self._surplus or self._gave_up or manager.senders.get(self.bootstrap_room) is not self:
            return
        try:
            if self._transfer is None and manager.rank is not None:
                tokens = 1 if (asked := manager.rank.endpoint.asked(self.bootstrap_room)) is None else asked.tokens
                self._transfer = manager.rank.endpoint.send(room=self.bootstrap_room, tokens=tokens)
            if self._transfer is not None:
                self._transfer.abort(reason)
        except Exception as error:
            log.warning("room %d: decode can not be told of the abort: %s", self.bootstrap_room, error)

    def _fail(self, reason: str) -> None:
        self.kv_mgr.fail_room(self.bootstrap_room, reason)
