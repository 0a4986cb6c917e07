"""Which RDMA adapters (HCAs) this pod really has, and whether bytes went through them.

NIXL tells no lane, so the evidence is the adapter's own: the byte counters of its ports before and after
a transfer. Everything is a function of a file tree (`root`), so that it can be told about any machine.
Sources: Linux' sysfs-class-infiniband (port_*_data count four-byte words), EFA's hw_counters.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

WORD = 4
"""Bytes that one unit of port_xmit_data and port_rcv_data stands for."""


@dataclass(frozen=True)
class Hca:
    """An adapter with a device node in this pod."""

    name: str
    ports: tuple[int, ...]


@dataclass(frozen=True)
class Lane:
    """What is known of the lane a transfer took: `transport` is RDMA, TCP or Unknown."""

    transport: str
    evidence: str


def usable_hcas(root: Path = Path("/")) -> tuple[Hca, ...]:
    """HCAs that sysfs lists and for which the pod holds a /dev/infiniband/uverbsN node. Sysfs alone proves
    nothing: a container sees all of the host's adapters there."""
    found = []
    for verbs in sorted((root / "sys/class/infiniband_verbs").glob("uverbs*")):
        name = _text(verbs / "ibdev")
        if not name or not (root / "dev/infiniband" / verbs.name).exists():
            continue
        ports = (root / "sys/class/infiniband" / name / "ports").glob("*")
        found.append(Hca(name, tuple(sorted(int(p.name) for p in ports if p.name.isdigit()))))
    return tuple(found)


def counted_bytes(hcas: tuple[Hca, ...], root: Path = Path("/")) -> int | None:
    """Bytes all ports sent and received since they came up; None when no counter can be read."""
    total, readable = 0, False
    for hca in hcas:
        for port in hca.ports:
            base = root / "sys/class/infiniband" / hca.name / "ports" / str(port)
            for counter, unit in (
                ("counters/port_xmit_data", WORD),
                ("counters/port_rcv_data", WORD),
                ("hw_counters/tx_bytes", 1),
                ("hw_counters/rx_bytes", 1),
            ):
                value = _text(base / counter)
                if value.isdigit():
                    total += int(value) * unit
                    readable = True
    return total if readable else None


def lane(hcas: tuple[Hca, ...], before: int | None, after: int | None, nbytes: int, *, same_host: bool) -> Lane:
    """The lane that `nbytes` took, judged by the counters around the transfer.

    Other traffic on the same adapters can only make RDMA look used that was not: probes run off the
    request path, and a pod whose adapters stay silent is never called RDMA."""
    names = ", ".join(h.name for h in hcas)
    if not hcas:
        if same_host:
            return Lane("TCP or shared memory", "no HCA here, and the peer has the same address")
        return Lane("TCP", "no HCA with a /dev/infiniband node in this pod, so TCP is all there is")
    if before is None or after is None:
        return Lane("Unknown", f"the port counters of {names} can not be read")
    moved = after - before
    if moved >= nbytes:
        return Lane("RDMA", f"port counters of {names} moved {moved} bytes for {nbytes}")
    return Lane("TCP", f"port counters of {names} moved {moved} bytes for {nbytes}: the bytes went another way")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
