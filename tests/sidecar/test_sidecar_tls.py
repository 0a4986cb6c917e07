"""The control API over real mutual TLS on loopback: who gets in, and what survives rotation."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from sidecar_kit import Authority, running, until

from pdtransfer.sidecar.config import OPERATOR_IDENTITY
from pdtransfer.sidecar.identity import Peer, peer_of, why_not
from pdtransfer.sidecar.main import Sidecar

SERVER = "pod.pdcluster.internal"


@pytest.fixture(scope="module")
def ca() -> Iterator[Authority]:
    yield Authority("pdcluster-ca")


@pytest.fixture
def pod_tls(ca: Authority, tmp_path: Path) -> Path:
    return ca.issue(tmp_path / "pod", SERVER)


def client(folder: Path | None, trust: Path) -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=str(trust / "ca.crt"))
    if folder is not None:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return httpx.AsyncClient(verify=context, timeout=20.0)


async def get(sidecar: Sidecar, folder: Path | None, trust: Path, path: str = "/v1/cards") -> httpx.Response:
    assert sidecar.control is not None
    async with client(folder, trust) as c:
        url = f"https://127.0.0.1:{sidecar.control.port}{path}"
        return await c.get(url, extensions={"sni_hostname": SERVER})


async def served_serial(sidecar: Sidecar, folder: Path, trust: Path) -> str:
    """Serial number of the server certificate a new connection sees."""
    assert sidecar.control is not None
    async with client(folder, trust) as c:
        url = f"https://127.0.0.1:{sidecar.control.port}/v1/cards"
        async with c.stream("GET", url, extensions={"sni_hostname": SERVER}) as answer:
            stream = answer.extensions["network_stream"]
            return str(stream.get_extra_info("ssl_object").getpeercert()["serialNumber"])


async def test_the_operator_gets_in_and_nobody_else(ca: Authority, pod_tls: Path, tmp_path: Path) -> None:
    operator = ca.issue(tmp_path / "op", OPERATOR_IDENTITY)
    san_only = ca.issue(tmp_path / "san", "some client", dns=["x.internal", OPERATOR_IDENTITY])
    cn_only = ca.issue(tmp_path / "cn", OPERATOR_IDENTITY, dns=[])
    stranger = Authority("other").issue(tmp_path / "stranger", OPERATOR_IDENTITY)
    expired = ca.issue(tmp_path / "expired", OPERATOR_IDENTITY, days=-0.5)
    lookalike = ca.issue(tmp_path / "like", OPERATOR_IDENTITY + ".evil")
    server_only = ca.issue(tmp_path / "so", OPERATOR_IDENTITY, usages=[ExtendedKeyUsageOID.SERVER_AUTH])
    async with running(tmp_path, tls_dir=pod_tls) as sidecar:
        assert (await get(sidecar, operator, pod_tls)).status_code == 200
        assert (await get(sidecar, san_only, pod_tls)).status_code == 200
        assert (await get(sidecar, cn_only, pod_tls)).status_code == 200
        for folder in (pod_tls, lookalike):
            refused = await get(sidecar, folder, pod_tls)
            assert refused.status_code == 403 and refused.json()["reason"] == "Forbidden"
        for folder in (stranger, expired, server_only, None):
            with pytest.raises(httpx.TransportError):
                await get(sidecar, folder, pod_tls)
        # Not even the existence of a path is told to a pod, and nothing is changed by it.
        async with client(pod_tls, pod_tls) as c:
            assert sidecar.control is not None
            base = f"https://127.0.0.1:{sidecar.control.port}"
            sni = {"sni_hostname": SERVER}
            assert (await c.put(f"{base}/v1/roster", content=b"{}", extensions=sni)).status_code == 403
            assert (await c.post(f"{base}/v1/drain", extensions=sni)).status_code == 403
            assert (await c.get(f"{base}/nothing", extensions=sni)).status_code == 403
        assert not sidecar.hub.state.draining
        assert sidecar.hub.counts["refused_clients", "Forbidden"] == 5


async def test_plain_http_and_probes_are_not_mixed(ca: Authority, pod_tls: Path, tmp_path: Path) -> None:
    operator = ca.issue(tmp_path / "op", OPERATOR_IDENTITY)
    async with running(tmp_path, tls_dir=pod_tls) as sidecar, httpx.AsyncClient(timeout=20.0) as anyone:
        assert sidecar.control is not None
        with pytest.raises(httpx.TransportError):
            await anyone.get(f"http://127.0.0.1:{sidecar.control.port}/v1/cards")
        health = f"http://127.0.0.1:{sidecar.health.port}"
        assert (await anyone.get(f"{health}/healthz")).text == "ok\n"
        assert (await anyone.get(f"{health}/readyz")).status_code == 503
        assert "pdtransfer_ranks_registered 0.0" in (await anyone.get(f"{health}/metrics")).text
        for path in ("/v1/cards", "/v1/verdicts", "/v1/roster"):
            assert (await anyone.get(f"{health}{path}")).status_code == 404
        assert (await get(sidecar, operator, pod_tls, "/healthz")).status_code == 404


async def test_certificates_rotate_while_running_and_a_bad_file_keeps_the_old(
    ca: Authority, pod_tls: Path, tmp_path: Path
) -> None:
    operator = ca.issue(tmp_path / "op", OPERATOR_IDENTITY)
    async with running(tmp_path, tls_dir=pod_tls) as sidecar:
        first = await served_serial(sidecar, operator, pod_tls)
        good = {n: (pod_tls / n).read_bytes() for n in ("ca.crt", "tls.crt", "tls.key")}

        def problem() -> str:
            assert sidecar._tls is not None
            return sidecar._tls.problem

        ca.issue(pod_tls, SERVER, days=-0.1)
        await until(lambda: "expired" in problem())
        assert await served_serial(sidecar, operator, pod_tls) == first
        for n, data in good.items():
            (pod_tls / n).write_bytes(data)
        (pod_tls / "tls.crt").write_text("junk")
        await until(lambda: "expired" not in problem() and problem())
        assert await served_serial(sidecar, operator, pod_tls) == first
        Authority("other").issue(pod_tls, SERVER, trust=ca.pem())  # not of the CA beside it
        await until(lambda: "does not verify against ca.crt" in problem())
        assert await served_serial(sidecar, operator, pod_tls) == first
        assert sidecar.hub.counts["tls_reloads", "Changed"] == 0

        ca.issue(pod_tls, SERVER)
        await until(lambda: sidecar.hub.counts["tls_reloads", "Changed"])
        assert problem() == ""
        assert await served_serial(sidecar, operator, pod_tls) != first


async def test_a_new_ca_locks_out_clients_of_the_old_one_also_on_open_connections(
    ca: Authority, pod_tls: Path, tmp_path: Path
) -> None:
    old_operator = ca.issue(tmp_path / "op", OPERATOR_IDENTITY)
    new_ca = Authority("next")
    new_operator = new_ca.issue(tmp_path / "op2", OPERATOR_IDENTITY)
    async with running(tmp_path, tls_dir=pod_tls) as sidecar, client(old_operator, old_operator) as kept:
        assert sidecar.control is not None
        url = f"https://127.0.0.1:{sidecar.control.port}/v1/cards"
        sni = {"sni_hostname": SERVER}
        assert (await kept.get(url, extensions=sni)).status_code == 200
        new_ca.issue(pod_tls, SERVER)
        await until(lambda: sidecar.hub.counts["tls_reloads", "Changed"])
        with pytest.raises(httpx.TransportError):  # its connection was ended; a new one does not verify
            await kept.get(url, extensions=sni)
        assert (await get(sidecar, new_operator, new_operator)).status_code == 200
        # The other direction too: trusting the new server does not let the old client in.
        with pytest.raises(httpx.TransportError):
            await get(sidecar, old_operator, new_operator)


async def test_missing_certificates_keep_no_rank_out_and_are_taken_when_they_come(
    ca: Authority, tmp_path: Path
) -> None:
    operator = ca.issue(tmp_path / "op", OPERATOR_IDENTITY)
    late = tmp_path / "late"
    async with running(tmp_path, tls_dir=late) as sidecar, httpx.AsyncClient(timeout=20.0) as anyone:
        assert sidecar.control is None
        text = (await anyone.get(f"http://127.0.0.1:{sidecar.health.port}/readyz")).text
        assert "control API has no usable certificate: ca.crt can not be read" in text
        ca.issue(late, SERVER)
        await until(lambda: sidecar.control is not None and sidecar.control.port)
        assert (await get(sidecar, operator, late)).status_code == 200


async def test_a_mounted_secret_rotates_by_its_symlink(ca: Authority, tmp_path: Path) -> None:
    """The kubelet swaps `..data`; the files themselves are links through it."""
    operator = ca.issue(tmp_path / "op", OPERATOR_IDENTITY)
    mount = tmp_path / "mount"
    ca.issue(mount / "..1", SERVER)
    (mount / "..data").symlink_to("..1")
    for name in ("ca.crt", "tls.crt", "tls.key"):
        (mount / name).symlink_to(f"..data/{name}")
    async with running(tmp_path, tls_dir=mount) as sidecar:
        first = await served_serial(sidecar, operator, mount)
        ca.issue(mount / "..2", SERVER)
        (mount / "..tmp").symlink_to("..2")
        (mount / "..tmp").rename(mount / "..data")
        await until(lambda: sidecar.hub.counts["tls_reloads", "Changed"])
        assert await served_serial(sidecar, operator, mount) != first


async def test_readyz_and_metrics_tell_of_certificates_that_could_not_be_used(
    ca: Authority, pod_tls: Path, tmp_path: Path
) -> None:
    async with running(tmp_path, tls_dir=pod_tls) as sidecar, httpx.AsyncClient(timeout=20.0) as anyone:
        health = f"http://127.0.0.1:{sidecar.health.port}"
        (pod_tls / "tls.key").write_text("-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n")
        await until(lambda: sidecar.hub.tls_warning)
        text = (await anyone.get(f"{health}/readyz")).text
        assert "note: certificates: newer files are not used: certificate, key or CA can not be used" in text
        assert "c2VjcmV0" not in text
        metrics = (await anyone.get(f"{health}/metrics")).text
        assert "pdtransfer_tls_problem 1.0" in metrics
        (shown,) = [float(m) for m in re.findall(r"^pdtransfer_tls_expires_timestamp_seconds (\S+)", metrics, re.M)]
        certificate = x509.load_pem_x509_certificate((pod_tls / "tls.crt").read_bytes())
        assert shown == certificate.not_valid_after_utc.timestamp()


def test_a_client_is_judged_by_its_names_and_by_time() -> None:
    shown = {
        "subject": ((("organizationName", "o"),), (("commonName", "cn"),)),
        "subjectAltName": (("DNS", "a.b"), ("IP Address", "10.0.0.1"), ("URI", "spiffe://x/y")),
        "notAfter": "Jan  1 00:00:10 1970 GMT",
    }
    peer = peer_of(shown)
    assert peer == Peer(frozenset({"cn", "a.b", "spiffe://x/y"}), 10.0)
    assert why_not(peer, "a.b", 9.0) == "" == why_not(peer, "cn", 10.0)
    assert "expired since the connection was made" in why_not(peer, "a.b", 11.0)
    for other in ("A.B", "b", "*.b", "10.0.0.1", ""):
        assert "only" in why_not(peer, other, 9.0)
    assert peer_of(None) is None is peer_of({}) and "no client certificate" in why_not(None, "a.b", 9.0)
