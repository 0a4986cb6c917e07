"""Decode's sockets to prefill ranks. SGLang keeps them by address for ever; a prefill that starts again has other
ports, so that each start would leave as many sockets as it had ranks."""

from __future__ import annotations

from collections.abc import Iterable

from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.utils.network import NetworkAddress

from pdtransfer.engines.sglang.registry import Registry


def close_unknown(known: Iterable[Registry], strangers: frozenset[str]) -> frozenset[str]:
    """Close the sockets to ranks of no known engine that were `strangers` at the last look already (what was said to
    them since has gone out or never will); the strangers of this look."""
    places = {NetworkAddress(r.ip, r.port).to_tcp() for registry in known for r in registry.ranks}
    with CommonKVReceiver._global_lock:
        found = frozenset(CommonKVReceiver._socket_cache) - places
    for place in found & strangers:
        CommonKVReceiver.disconnect_endpoint(place)
    return found - strangers
