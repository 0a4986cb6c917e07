"""The real agent: NIXL over UCX (or another NIXL backend), without NIXL's own progress thread.

The Python API starts that thread with delay 0, which spins a whole core while idle (measured
98.5 %), and it halves the rate while active; so progress is explicit: the endpoint's thread calls
`poll` and `progress` while something is in flight and ticks slowly when idle.
"""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from pdtransfer.agent.lists import checked
from pdtransfer.agent.port import (
    AgentFailure,
    Descriptors,
    Handle,
    HandleState,
    Indices,
    Operation,
    Prepared,
    Registration,
)
from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.nixl_plugins import DEFAULT, engine_settings, named_devices, plugin_problem
from pdtransfer.reach import this_process

logger = logging.getLogger(__name__)
T = TypeVar("T")

ERROR_CLASSES = (
    "nixlBackendError",
    "nixlCancelledError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNoTelemetryError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlNotPostedError",
    "nixlNotSupportedError",
    "nixlRemoteDisconnectError",
    "nixlRepostActiveError",
    "nixlUnknownError",
)
"""All of NIXL 1.5's exceptions; they share no base class."""

_NOTHING_POSTED = frozenset(
    {
        "nixlInvalidParamError",
        "nixlMismatchError",
        "nixlNotAllowedError",
        "nixlNotFoundError",
        "nixlNotSupportedError",
    }
)
"""Raised by checks that come before the first descriptor is handed to the backend."""


def set_net_devices(devices: str | None) -> str:
    """Set UCX_NET_DEVICES for the backend about to be created; a value the user set is kept and
    warned about. It is read at create_backend and is global to the process. Returns what holds."""
    held = os.environ.get("UCX_NET_DEVICES")
    if devices is None or held == devices:
        return held or ""
    if held is not None:
        logger.warning("UCX_NET_DEVICES=%s is set by the user and kept; wanted %s", held, devices)
        return held
    os.environ["UCX_NET_DEVICES"] = devices
    return devices


def _devices(plugin: str, parameters: Mapping[str, str], net_devices: str | None) -> str:
    """Network devices of UCX as they will hold; '' where it, or another library, chooses."""
    if plugin != DEFAULT:
        if net_devices:
            logger.warning("NIXL's %s chooses its devices itself; %s is not used", plugin, net_devices)
        return ""
    where = named_devices(parameters)
    if where and net_devices:
        told = f"network devices are named twice: {net_devices}, and in NIXL's parameter {where}; name them once"
        raise AgentFailure("nixlInvalidParamError", told, posted=False)
    if where == "device_list":  # it is the agent's own, and goes before the variable
        return parameters["device_list"]
    return set_net_devices(net_devices) or engine_settings(parameters).get("NET_DEVICES", "")


class NixlAgent:
    """`AgentPort` over one nixl_agent with one backend of it, `plugin`, made with `parameters`. Make and use it in one
    thread. A plugin that NIXL does not have here, or a parameter that nothing reads, is an AgentFailure."""

    def __init__(
        self,
        name: str,
        *,
        net_devices: str | None = None,
        plugin: str = DEFAULT,
        parameters: Mapping[str, str] | None = None,
    ) -> None:
        from nixl import _api, _bindings  # slow to import, and only a rank that moves KV needs it

        self._errors: tuple[type[BaseException], ...] = tuple(
            getattr(_bindings, c) for c in ERROR_CLASSES if hasattr(_bindings, c)
        )
        self.name = name
        self.process = this_process()
        given = dict(parameters or {})
        ucx = plugin == DEFAULT
        # Of another library's transports nothing is known: () is taken for "any", also by who asks for fences.
        tls = os.environ.get("UCX_TLS") or engine_settings(given).get("TLS", "") if ucx else ""
        self.transports = tuple(t for t in tls.split(",") if t)
        self.devices = _devices(plugin, given, net_devices)
        self._plugin = plugin

        def make() -> Any:
            agent = _api.nixl_agent(name, _api.nixl_agent_config(enable_prog_thread=False, backends=[]))
            problem = plugin_problem(plugin, given, self._parameters_told(agent, plugin))
            if problem:
                raise AgentFailure("nixlInvalidParamError", problem, posted=False)
            agent.create_backend(plugin, given)
            return agent

        try:
            self._agent: Any = self._call(make, posted=False)
        except AgentFailure as error:
            if isinstance(error.__cause__, self._errors):  # NIXL's own word: no more than its error class
                raise AgentFailure(error.kind, self._told(error, tls, given), posted=False) from error
            raise
        self.plugins = tuple(sorted(self._agent.get_plugin_list()))
        self._inner = weakref.ref(self._agent.agent)

    def _told(self, error: AgentFailure, tls: str, given: Mapping[str, str]) -> str:
        """The failure to make the backend, with what is wrong nearly always."""
        where = f"parameters {given}" if given else ""
        if self._plugin == DEFAULT:
            ucx = f"UCX_NET_DEVICES={self.devices or '(unset)'} UCX_TLS={tls or '(unset)'}"
            where = f"{ucx} and {where}" if where else ucx
        made = f"the {self._plugin} backend can not be made with {where or 'its defaults'}"
        return f"{made}: {error.message}; see {'UCX' if self._plugin == DEFAULT else 'NIXL'}'s own lines in the log"

    def _parameters_told(self, agent: Any, plugin: str) -> frozenset[str]:
        """The parameters that the installed plugin lists. Raises AgentFailure where it is not here or does not load."""
        listed = sorted(agent.get_plugin_list())
        if plugin not in listed:
            had = ", ".join(listed) or "none"
            raise AgentFailure("nixlNotFoundError", f"NIXL here has no plugin {plugin}; it has {had}", posted=False)
        try:
            return frozenset(agent.agent.getPluginParams(plugin)[0])
        except self._errors as error:
            needs = " (libfabric, hwloc, CUDA's runtime and driver)" if plugin == "LIBFABRIC" else ""
            told = f"NIXL here has the plugin {plugin} and can not load it: often a library{needs} is missing"
            raise AgentFailure(type(error).__name__, f"{told}; see NIXL's own lines in the log", posted=False) from None

    def _call(self, action: Callable[[], T], *, posted: bool) -> T:
        try:
            return action()
        except self._errors as error:
            kind = type(error).__name__
            cause = error.with_traceback(None)  # its frames refer to the agent, which would outlive `close`
            raise AgentFailure(kind, str(error), posted=posted and kind not in _NOTHING_POSTED) from cause

    def register(self, regions: Descriptors, kind: MemoryKind) -> Registration:
        """Register `regions` (N, 3) of one memory kind."""
        return self._call(lambda: self._agent.register_memory(regions, kind.value), posted=False)

    def deregister(self, registration: Registration) -> None:
        """Take regions back."""
        self._call(lambda: self._agent.deregister_memory(registration), posted=False)

    def metadata(self) -> bytes:
        """NIXL's opaque metadata of everything registered."""
        return bytes(self._call(self._agent.get_agent_metadata, posted=False))

    def add_peer(self, metadata: bytes) -> str:
        """Load a peer; 30-46 ms measured."""
        name = self._call(lambda: self._agent.add_remote_agent(metadata), posted=False)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Forget a peer."""
        self._call(lambda: self._agent.remove_remote_agent(name), posted=False)

    def connect(self, name: str) -> None:
        """Connect eagerly (a lazy connect costs the first transfer 45-56 ms)."""
        self._call(lambda: self._agent.make_connection(name), posted=False)

    def prepare(self, peer: str | None, descriptors: Descriptors, kind: MemoryKind) -> Prepared:
        """Prepare a descriptor list on either side; a strided one is never expanded (5 us for
        262,144 blocks)."""
        array = checked(descriptors)
        return self._call(
            lambda: self._agent.prep_xfer_dlist(peer or "NIXL_INIT_AGENT", array, kind.value),
            posted=False,
        )

    def release_prepared(self, prepared: Prepared) -> None:
        """Free a descriptor list."""
        self._call(prepared.release, posted=False)

    def post(
        self,
        operation: Operation,
        local: Prepared,
        local_indices: Indices,
        remote: Prepared,
        remote_indices: Indices,
        notification: bytes = b"",
    ) -> Handle:
        """Make and post a transfer."""
        handle = self._call(
            lambda: self._agent.make_prepped_xfer(
                operation, local, local_indices, remote, remote_indices, notification
            ),
            posted=False,
        )
        state = self._call(lambda: self._agent.transfer(handle), posted=True)
        if state == "ERR":
            raise AgentFailure("nixlBackendError", "the post failed", posted=True)
        return handle

    def poll(self, handle: Handle) -> HandleState:
        """Progress the backend and look at the handle."""
        try:  # not through _call: this is the hot path
            state = self._agent.check_xfer_state(handle)
        except self._errors as error:
            raise AgentFailure(type(error).__name__, str(error), posted=True) from error.with_traceback(None)
        if state == "ERR":
            raise AgentFailure("nixlBackendError", "the transfer failed", posted=True)
        return HandleState.DONE if state == "DONE" else HandleState.ACTIVE

    def release(self, handle: Handle) -> None:
        """Free a finished handle."""
        self._call(handle.release, posted=False)

    def progress(self) -> Sequence[tuple[str, bytes]]:
        """Progress the backend; without a progress thread, reading notifications does that."""
        notes = self._call(self._agent.get_new_notifs, posted=False)
        return [(str(peer), bytes(m)) for peer, messages in notes.items() for m in messages]

    def notify(self, peer: str) -> None:
        """One byte to the peer; within milliseconds of a process' end UCX knows that the socket closed."""
        self._call(lambda: self._agent.send_notif(peer, b"."), posted=False)

    def close(self) -> None:
        """Destroy the agent. NIXL has no call for it: it ends with its last reference, and every handle
        and list that is left (of a probe that hangs, say) has one, so it is taken from them."""
        inner = self._inner
        self._agent = None
        for held in gc.get_referrers(inner()) if inner() is not None else ():
            if hasattr(held, "_released"):
                with suppress(*self._errors):
                    held.release()  # of a handle in flight this raises, and stops nothing
                held._released, held._agent = True, None
        if inner() is not None:
            gc.collect()
        if inner() is not None:
            kept = [type(o).__name__ for o in gc.get_referrers(inner())]
            raise AgentFailure("nixlNotAllowedError", f"the agent is still referred to by {kept}", posted=False)


def indices(count: int) -> Indices:
    """0 .. count-1 as NIXL wants them."""
    return np.arange(count, dtype=np.int32)
