"""Cards, certificates, a fake endpoint and a running sidecar for the sidecar's tests."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdtransfer.contract.base import EngineType, MemoryKind, Role
from pdtransfer.contract.card import EngineFacts, RankCard
from pdtransfer.contract.fingerprint import ModelIdentity
from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout, Region, RegionKind
from pdtransfer.contract.roster import Roster, RosterKey, RosterRefusal
from pdtransfer.contract.verdict import Verdict, VerdictState
from pdtransfer.sidecar import rosters
from pdtransfer.sidecar.config import OPERATOR_IDENTITY, Settings
from pdtransfer.sidecar.main import Sidecar

CLUSTER = "cluster-1"
POD = "pod-1"


def card(
    rank: int = 0,
    *,
    incarnation: str = "i1",
    pod_uid: str = POD,
    role: Role = Role.PREFILL,
    cluster_uid: str = CLUSTER,
    tp_size: int = 2,
    layers: int = 1,
) -> RankCard:
    """A sealed card of TP rank `rank` of `tp_size` with one KV head each."""
    layout = RankLayout(
        page_tokens=16,
        kv_dtype="bfloat16",
        heads=HeadSlice(first=rank, count=1, total=tp_size),
        coordinates=RankCoordinates(tp=rank, tp_size=tp_size),
        regions=tuple(
            Region(layer=i, kind=kind, item_bytes=4096, items=8, memory=MemoryKind.DRAM, address=4096 * (i + 1))
            for i in range(layers)
            for kind in (RegionKind.KEY, RegionKind.VALUE)
        ),
    )
    return RankCard(
        cluster_uid=cluster_uid,
        pod_uid=pod_uid,
        pod_name=f"name-of-{pod_uid}",
        role=role,
        incarnation=incarnation,
        model=ModelIdentity(name="m", dtype="bfloat16", layers=1),
        layout=layout,
        engine=EngineFacts(type=EngineType.REFERENCE, version="1"),
        agent_name=f"{pod_uid}-{incarnation}-{rank}",
    ).sealed()


def peer(rank: int = 0, pod_uid: str = "peer-1", incarnation: str = "p1", **kw: int) -> RankCard:
    """A decode card for the roster of a prefill pod."""
    return card(rank, incarnation=incarnation, pod_uid=pod_uid, role=Role.DECODE, **kw)


def roster(
    key: tuple[int, int] = (1, 1),
    peers: Mapping[int, Sequence[RankCard]] | None = None,
    *,
    incarnation: str = "i1",
    pod_uid: str = POD,
    cluster_uid: str = CLUSTER,
) -> Roster:
    if peers is None:
        peers = {0: (peer(0),), 1: (peer(1),)}
    return Roster(
        cluster_uid=cluster_uid,
        pod_uid=pod_uid,
        incarnation=incarnation,
        key=RosterKey(term=key[0], counter=key[1]),
        peers={r: tuple(c) for r, c in peers.items()},
    )


def verdict(rank: int, to: RankCard, state: VerdictState = VerdictState.WIRED, incarnation: str = "i1") -> Verdict:
    return Verdict(
        rank=rank,
        incarnation=incarnation,
        peer_pod_uid=to.pod_uid,
        peer_incarnation=to.incarnation,
        peer_rank=to.rank,
        state=state,
        reason="" if state is VerdictState.WIRED else "ConnectFailed",
        message="" if state is VerdictState.WIRED else "no route to host",
        checksum_ok=state is VerdictState.WIRED,
    )


@dataclass
class FakeEndpoint:
    """Stands in for pdtransfer.session.api.Endpoint: records what the sidecar asked for."""

    card: RankCard
    inflight: int = 0
    metrics: object = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    applied: list[tuple[RankCard, ...]] = field(default_factory=list)
    probes: list[tuple[str, ...]] = field(default_factory=list)
    drained: int = 0
    fail: Exception | None = None
    failed: Exception | None = None
    draining: bool = False
    callbacks: list[Callable[[], None]] = field(default_factory=list)

    def apply_peers(self, peers: Sequence[RankCard]) -> None:
        if self.fail is not None:
            raise self.fail
        self.applied.append(tuple(peers))

    def probe(self, pod_uids: Sequence[str] = ()) -> None:
        self.probes.append(tuple(pod_uids))

    def drain(self) -> None:
        self.drained += 1

    def on_change(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def changed(self, **values: object) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        for callback in self.callbacks:
            callback()


async def until(what: Callable[[], object] | Callable[[], Awaitable[object]], timeout: float = 20.0) -> object:
    """Wait until `what()` is true; the assertion names it when it never is."""
    end = time.monotonic() + timeout
    while True:
        value = what()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < end, "never became true"
        await asyncio.sleep(0.02)


class Authority:
    """A CA that issues certificates into folders of ca.crt, tls.crt, tls.key."""

    def __init__(self, name: str = "ca") -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = dt.datetime.now(dt.UTC)
        self.cert = (
            x509.CertificateBuilder()
            .subject_name(self.name)
            .issuer_name(self.name)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=2))
            .not_valid_after(now + dt.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self.key, hashes.SHA256())
        )

    def pem(self) -> bytes:
        return self.cert.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        folder: Path,
        name: str,
        *,
        dns: Sequence[str] | None = None,
        days: float = 1.0,
        trust: bytes | None = None,
        usages: Sequence[x509.ObjectIdentifier] = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH),
    ) -> Path:
        """Certificate for `name`, ending in `days` (negative: expired). `trust` replaces ca.crt."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1, hours=1))
            .not_valid_after(now + dt.timedelta(days=days))
            .add_extension(x509.ExtendedKeyUsage(list(usages)), critical=False)
        )
        names = [name] if dns is None else dns
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(n) for n in names]), False)
        cert = builder.sign(self.key, hashes.SHA256())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ca.crt").write_bytes(trust or self.pem())
        (folder / "tls.crt").write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        (folder / "tls.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return folder


@contextlib.asynccontextmanager
async def running(folder: Path, **changes: object) -> AsyncIterator[Sidecar]:
    """A sidecar on free loopback ports, its socket in `folder`."""
    values: dict[str, object] = {
        "cluster_uid": CLUSTER,
        "pod_uid": POD,
        "role": Role.PREFILL,
        "socket": folder / "s.sock",
        "state_file": folder / "s.state.json",
        "host": "127.0.0.1",
        "health_host": "127.0.0.1",
        "control_port": 0,
        "health_port": 0,
        "client_identity": OPERATOR_IDENTITY,
        "tls_interval": 0.05,
        "linger": 0.0,
    } | changes
    sidecar = Sidecar(Settings(**values))  # type: ignore[arg-type]
    await sidecar.start()
    try:
        yield sidecar
    finally:
        await sidecar.stop()


def give(sidecar: Sidecar, r: Roster) -> RosterRefusal | None:
    """PUT a roster, without HTTP: why it was refused."""
    body = r.model_dump_json().encode()
    return sidecar.hub.put_roster(rosters.parse(body), body)


async def ranks(sidecar: Sidecar, *wanted: tuple[int, str]) -> None:
    """Waits until just these ranks (number, incarnation) have shown their cards."""
    await until(lambda: [(r.rank, r.card.incarnation) for r in sidecar.hub.state.ranks] == list(wanted))
