"""What the pods proved about moving KV: bytes, time, bandwidth, transport, and how that is known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdoperator.domain.links import Link, LinkState
from pdoperator.domain.words import rate
from pdtransfer.contract.verdict import Verdict


@dataclass(frozen=True)
class Verification:
    """Over the pairs of pods that are ready. `bandwidth` is the slowest pair's, bytes per second."""

    pairs: int
    proven: int
    bytes: int = 0
    seconds: float = 0.0
    bandwidth: float = 0.0
    transport: str = ""
    evidence: str = ""
    emulated: bool = False
    at: float = 0.0
    slowest: str = ""
    failed: str = ""

    @property
    def text(self) -> str:
        """For the printer column: `1.23 GB/s tcp`, marked where device memory is emulated."""
        if not self.proven:
            return ""
        mark = " (emulated)" if self.emulated else ""
        return f"{rate(self.bandwidth)} {self.transport or 'unknown transport'}{mark}"


def verify(links: Iterable[Link]) -> Verification:
    """Add up the probes of these links. A pair counts as proven when every rank pair moved bytes and
    their checksums matched."""
    total = proven = moved = 0
    seconds = 0.0
    slowest: float | None = None
    where = failed = ""
    transports: set[str] = set()
    evidence: set[str] = set()
    emulated = False
    newest = 0.0
    for link in links:
        total += 1
        probes = [v for v in link.verdicts if v.bytes_moved > 0]
        bad = [v for v in link.verdicts if v.reason == "ChecksumMismatch" or (v.bytes_moved and not v.checksum_ok)]
        if bad:
            failed = failed or (
                f"{link.prefill.name} and {link.decode.name}: {bad[0].message or 'the checksum did not match'}"
            )
            continue
        if link.state is not LinkState.GOOD or not probes:
            continue
        proven += 1
        spent = max(v.seconds for v in probes)
        size = sum(v.bytes_moved for v in probes)
        moved += size
        seconds += spent
        pair = min(_rate(v) for v in probes)
        if slowest is None or pair < slowest:
            slowest, where = pair, f"{link.prefill.name} to {link.decode.name}"
        transports |= {v.transport for v in probes if v.transport}
        evidence |= {v.evidence for v in probes if v.evidence}
        emulated |= any(v.emulated_vram for v in probes)
        newest = max(newest, *(v.at for v in probes))
    return Verification(
        pairs=total,
        proven=proven,
        bytes=moved,
        seconds=round(seconds, 6),
        bandwidth=slowest or 0.0,
        transport="+".join(sorted(transports)),
        evidence="; ".join(sorted(evidence)),
        emulated=emulated,
        at=newest,
        slowest=where,
        failed=failed,
    )


def _rate(verdict: Verdict) -> float:
    """Bytes per second: of the probe's one large WRITE where it is told (an older sidecar tells none)."""
    if verdict.bandwidth > 0:
        return verdict.bandwidth
    return verdict.bytes_moved / verdict.seconds if verdict.seconds > 0 else 0.0
