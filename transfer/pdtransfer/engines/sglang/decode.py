"""Decode's half of the manager: first contact with prefill engines, their heartbeat, attempts of a room, and which
pages may be used again."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from sglang.srt.environ import envs

from pdtransfer.engines.sglang.meetings import Meetings
from pdtransfer.engines.sglang.messages import Introduce, encode
from pdtransfer.engines.sglang.registry import NotOurs, NotReachable, Registry, incarnation_at
from pdtransfer.engines.sglang.sockets import close_unknown
from pdtransfer.engines.sglang.threads import watched

if TYPE_CHECKING:
    from pdtransfer.engines.sglang.rank import Rank
    from pdtransfer.engines.sglang.receiver import PdclusterKVReceiver

log = logging.getLogger(__name__)
FIRST_CONTACT_S = 0.5
"""How long the scheduler waits for the first contact with a prefill engine; SGLang asks again after a second."""
MAX_ATTEMPTS = 1 << 20
"""Rooms whose last attempt is remembered."""
HEALTH_TIMEOUT_S = 3.0
POLL_MS = 500


class DecodePart:
    """Mixed into the manager. SGLang's attributes are those of CommonKVManager."""

    rank: Rank | None
    server_socket: Any
    _stop: threading.Event
    _threads: list[threading.Thread]
    broken: Any
    fail_room: Any

    def _begin_decode(self) -> None:
        self._attempts: OrderedDict[int, int] = OrderedDict()
        self._held: dict[int, list[PdclusterKVReceiver]] = {}
        self._holds = threading.Lock()
        self._strangers: frozenset[str] = frozenset()
        self.meetings = Meetings(self._meet)

    def _start_decode(self) -> None:
        if envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.get() != float("inf"):
            raise RuntimeError(
                "pdcluster: SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT is not infinite: SGLang would "
                "give pages away while prefill may still write into them. The plugin sets it; do not set it yourself"
            )
        if not self.enable_deferred_decode_kv_release:  # type: ignore[attr-defined]
            raise RuntimeError(
                "pdcluster: SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE is off: SGLang would give pages away "
                "while prefill may still write into them. Leave it on"
            )
        self._threads.append(watched("pdcluster-drain", self._empty_socket, self.broken))
        self._start_heartbeat_checker_thread()

    def _stop_decode(self) -> None:
        self.meetings.close()

    def _empty_socket(self) -> None:
        """Nothing of ours comes over SGLang's socket on this side; what comes all the same must not pile up."""
        while not self._stop.is_set():
            if self.server_socket.poll(POLL_MS):
                self.server_socket.recv_multipart()

    @property
    def supports_host_destination(self) -> bool:
        """A request may be received into host memory: SGLang has host pools, and both kinds are registered."""
        return bool(getattr(self.kv_args, "host_kv_data_ptrs", None))  # type: ignore[attr-defined]

    # --- first contact ----------------------------------------------------------------------

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether the prefill engine behind an address is known. Waits FIRST_CONTACT_S at most, once, and never raises:
        an engine that does not fit fails the rooms that want it, by name."""
        if bootstrap_addr in self.prefill_info_table and self.meetings.met(bootstrap_addr):  # type: ignore[attr-defined]
            return True
        outcome = self.meetings.outcome(bootstrap_addr, FIRST_CONTACT_S)
        if outcome is None:
            return False
        if outcome.refusal:
            self._fail_rooms_at(bootstrap_addr, outcome.refusal)
            return False
        if bootstrap_addr not in self.prefill_info_table:  # type: ignore[attr-defined]
            self.meetings.forget(bootstrap_addr)  # it was forgotten while it was being met
            return False
        return True

    def _meet(self, address: str) -> Registry:
        """In a thread of its own. Raises NotReachable (try again) or NotOurs (refused)."""
        rank = self.rank
        if rank is None:
            raise NotReachable("the rank's endpoint is not open yet")
        if rank.rostered:
            rank.cards_behind(address)
        registry = self._find(address)
        try:
            if not super().try_ensure_parallel_info(address):  # type: ignore[misc]
                raise NotReachable(f"the bootstrap server at {address} does not tell its sizes yet")
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            raise NotOurs(f"the prefill engine at {address} does not fit: {error}") from None
        return registry

    def _find(self, address: str) -> Registry:
        from pdtransfer.engines.sglang.introduction import find

        assert self.rank is not None
        return find(self.rank, address, self.introduce_to)

    def introduce_to(self, registry: Registry) -> None:
        """Show this rank's card to the prefill ranks it takes KV from, where no operator does."""
        rank = self.rank
        if rank is None or rank.rostered:
            return
        from pdtransfer.engines.sglang.receiver import tell

        message = encode(Introduce(card=rank.card))
        wanted = {(c.pod_uid, c.rank) for c in rank.peers}
        for other in registry.ranks:
            if (other.card.pod_uid, other.card.rank) in wanted:
                tell(other.ip, other.port, message)

    def _fail_rooms_at(self, address: str, reason: str) -> None:
        for room in list(self.addr_to_rooms_tracker.get(address, ())):  # type: ignore[attr-defined]
            if not self._transfers(room):
                self.fail_room(room, reason)

    # --- heartbeat --------------------------------------------------------------------------

    def _start_heartbeat_checker_thread(self) -> threading.Thread:
        thread = watched("pdcluster-heartbeat", self._beat, self.broken)
        self._threads.append(thread)
        return thread

    def _beat(self) -> None:
        while not self._stop.wait(self.heartbeat_interval):  # type: ignore[attr-defined]
            for address in list(self.prefill_info_table):  # type: ignore[attr-defined]
                try:
                    self.check_heart(address)
                except Exception:
                    log.exception("the heartbeat of the prefill engine at %s can not be looked at", address)
            self._strangers = close_unknown(self.meetings.registries(), self._strangers)

    def check_heart(self, address: str) -> None:
        """Is the same incarnation there? Another one is met anew at the next request, at once."""
        failures = self.heartbeat_failures  # type: ignore[attr-defined]
        try:
            found = incarnation_at(address, HEALTH_TIMEOUT_S)
        except (NotReachable, NotOurs) as error:
            failures[address] = failures.get(address, 0) + 1
            if failures[address] >= self.max_failures:  # type: ignore[attr-defined]
                self._handle_node_failure(address, str(error))
            return
        failures[address] = 0
        known = self.meetings.incarnations(address)
        if found and known and found != known:
            self._handle_node_failure(address, f"prefill at {address} is now another incarnation ({found})")

    def _handle_node_failure(self, failed_bootstrap_addr: str, why: str = "") -> None:
        """Forget what is known of a prefill engine. Rooms that wait for it fail; those whose KV is on its way are
        the endpoint's, which knows better than an HTTP server whether the ranks are alive."""
        address, reason = failed_bootstrap_addr, why or "connection lost"
        self.forget_prefill(address)
        log.error("the prefill engine at %s is forgotten: %s", address, reason)
        self._fail_rooms_at(address, f"prefill at {address}: {reason}")

    def forget_prefill(self, address: str) -> None:
        """The next request for it meets it anew."""
        self.meetings.forget(address)
        with self.connection_lock:  # type: ignore[attr-defined]
            pool = self.connection_pool  # type: ignore[attr-defined]
            for key in [k for k in pool if k.startswith(f"{address}_")]:
                del pool[key]
            self.prefill_info_table.pop(address, None)  # type: ignore[attr-defined]
            self.heartbeat_failures.pop(address, None)  # type: ignore[attr-defined]

    def _peers_changed(self, bootstraps: frozenset[str]) -> None:
        """The roster (or an introduction) names other ranks there now: nothing that was cached about them holds, nor
        that the address was refused."""
        known = set(getattr(self, "prefill_info_table", ()))
        for address in bootstraps:
            if address in known:
                self._handle_node_failure(address, "its ranks were replaced")
            else:
                self.meetings.forget(address)

    # --- attempts, pages --------------------------------------------------------------------

    def next_attempt(self, room: int) -> int:
        """A room that comes again (true retraction, a router's retry) is another attempt. Counted per room, so that
        all ranks of this engine give it the same number."""
        attempt = self._attempts.pop(room, 0) + 1
        self._attempts[room] = attempt
        while len(self._attempts) > MAX_ATTEMPTS:
            self._attempts.popitem(last=False)
        return attempt

    def hold(self, room: int, receiver: PdclusterKVReceiver) -> None:
        """A request's pages may be written to from now on."""
        with self._holds:
            self._held.setdefault(room, []).append(receiver)

    def let_go(self, room: int, receiver: PdclusterKVReceiver) -> None:
        """A request is over; its pages count on as long as something may land in them."""
        if receiver.releasable:
            with self._holds:
                left = [r for r in self._held.get(room, ()) if r is not receiver]
                if left:
                    self._held[room] = left
                else:
                    self._held.pop(room, None)

    def _transfers(self, room: int) -> bool:
        return any(r.running for r in self._held.get(room, ()))

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Only the ledger knows: SGLang's count of acknowledgements (0 where only another rank has to wait) says
        nothing about writes that are still under way."""
        return all(receiver.releasable for receiver in tuple(self._held.get(bootstrap_room, ())))

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """SGLang released the pages."""
        with self._holds:
            self._held.pop(bootstrap_room, None)
        super().clear_deferred_abort_state(bootstrap_room)  # type: ignore[misc]
