"""Certificates, checked with the cryptography library's own verifier and real handshakes in memory."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ssl
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from pdoperator.api.names import OPERATOR_IDENTITY, pod_server_name
from pdoperator.kube.fake import FakeKube
from pdoperator.runtime import credentials
from pdoperator.runtime.credentials import BadAuthority, Credentials, parse
from pdoperator.runtime.pki import Authority, Leaf, client_context, new_authority, operator_leaf, pod_leaf

UID = "0b7c8f5e-0d5c-4c61-9d0e-3c1f1b0b9a11"
NAME = pod_server_name(UID)
TODAY = time.time()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return new_authority(TODAY)


def load(leaf: Leaf) -> x509.Certificate:
    return x509.load_pem_x509_certificate(leaf.certificate)


def server_name_verifies(authority: Authority, leaf: Leaf, name: str, at: float = TODAY) -> bool:
    store = Store(x509.load_pem_x509_certificates(authority.bundle))
    verifier = PolicyBuilder().store(store).time(datetime.fromtimestamp(at, UTC))
    try:
        verifier.build_server_verifier(x509.DNSName(name)).verify(load(leaf), [])
    except VerificationError:
        return False
    return True


def test_a_pod_certificate_proves_its_own_cluster_only(authority: Authority) -> None:
    leaf = pod_leaf(authority, NAME, TODAY)
    assert server_name_verifies(authority, leaf, NAME)
    assert not server_name_verifies(authority, leaf, pod_server_name("another-uid"))
    assert not server_name_verifies(authority, leaf, OPERATOR_IDENTITY)
    usage = load(leaf).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usage) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}


def test_the_operator_certificate_is_no_server_and_pods_can_not_get_its_name(authority: Authority) -> None:
    leaf = operator_leaf(authority, TODAY)
    assert not server_name_verifies(authority, leaf, OPERATOR_IDENTITY)
    assert load(leaf).extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
        x509.DNSName
    ) == [OPERATOR_IDENTITY]
    with pytest.raises(ValueError, match="not a pod server name"):
        pod_leaf(authority, OPERATOR_IDENTITY, TODAY)


def test_leaves_can_not_sign_and_end_when_told(authority: Authority) -> None:
    leaf = pod_leaf(authority, NAME, TODAY)
    assert load(leaf).extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert abs(leaf.not_after - (TODAY + 30 * 86400)) < 2
    assert server_name_verifies(authority, leaf, NAME, TODAY - 3600)  # a clock one hour behind
    assert not server_name_verifies(authority, leaf, NAME, TODAY + 31 * 86400)


def test_a_leaf_never_outlives_its_ca() -> None:
    short = new_authority(TODAY, lifetime=timedelta(days=3))
    assert abs(pod_leaf(short, NAME, TODAY).not_after - (TODAY + 3 * 86400)) < 2


def test_another_authority_is_not_trusted(authority: Authority) -> None:
    foreign = pod_leaf(new_authority(TODAY), NAME, TODAY)
    assert not server_name_verifies(authority, foreign, NAME)


def test_a_new_ca_keeps_the_old_one_trusted_and_the_router_keys(authority: Authority) -> None:
    after = new_authority(TODAY + 10, previous=authority)
    assert server_name_verifies(after, pod_leaf(authority, NAME, TODAY), NAME)
    assert after.fingerprint != authority.fingerprint
    assert after.router_key(UID) == authority.router_key(UID)


def test_the_router_key_is_an_hmac_of_the_uid_and_differs_by_cluster(authority: Authority) -> None:
    wanted = hmac.new(authority.root_key, f"router-key/{UID}".encode(), hashlib.sha256).hexdigest()
    assert authority.router_key(UID) == wanted
    assert authority.router_key("other") != wanted
    assert new_authority(TODAY).router_key(UID) != wanted


def test_nothing_secret_is_in_a_repr(authority: Authority) -> None:
    leaf = pod_leaf(authority, NAME, TODAY)
    text = repr(authority) + repr(leaf)
    assert "PRIVATE" not in text and repr(authority.root_key)[2:-1] not in text


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> dict[str, object] | None:
    """Both sides over memory; the server's view of the client."""
    a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [server.wrap_bio(a, b, server_side=True), client.wrap_bio(b, a, server_hostname=name)]
    for _ in range(6):
        for end in reversed(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ends[0].getpeercert()


def test_the_client_context_shows_the_operator_to_a_pod_and_refuses_a_wrong_name(
    authority: Authority, tmp_path: Path
) -> None:
    leaf = pod_leaf(authority, NAME, TODAY)
    (tmp_path / "pem").write_bytes(leaf.certificate + leaf.key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "pem")
    server.load_verify_locations(cadata=authority.bundle.decode())
    server.verify_mode = ssl.CERT_REQUIRED
    client = client_context(authority, operator_leaf(authority, TODAY))
    peer = handshake(server, client, NAME)
    assert peer is not None and peer["subjectAltName"] == (("DNS", OPERATOR_IDENTITY),)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, client, pod_server_name("another-uid"))


def test_the_client_certificate_is_renewed_at_a_third_of_its_life(authority: Authority) -> None:
    clock = [TODAY]
    keys = Credentials(authority, lambda: clock[0])
    first = keys.client_context()
    clock[0] += 15 * 3600
    assert keys.client_context() is first
    clock[0] += 2 * 3600
    second = keys.client_context()
    assert second is not first and keys.client_context() is second


def test_near_the_end_of_the_ca_nothing_is_issued_over_and_over() -> None:
    authority = new_authority(TODAY, lifetime=timedelta(hours=6))  # shorter than a leaf's life
    clock = [TODAY]
    keys = Credentials(authority, lambda: clock[0])
    first = keys.client_context()
    clock[0] += 5 * 3600
    assert keys.client_context() is first and not keys.ended
    assert keys.issue(NAME).not_after == keys.longest == authority.not_after
    clock[0] += 3600
    assert keys.ended


async def test_the_ca_is_made_once_and_read_by_the_next_process(kube: FakeKube) -> None:
    first = await credentials.load(kube, "ops")
    second = await credentials.load(kube, "ops")
    assert first.ca_fingerprint == second.ca_fingerprint
    assert first.router_key(UID) == second.router_key(UID)
    assert [w.verb for w in kube.writes] == ["create"]
    assert kube.of("Secret")[0]["metadata"]["namespace"] == "ops"


async def test_an_ended_ca_is_replaced_and_a_damaged_one_is_not(kube: FakeKube) -> None:
    old = await credentials.load(kube, "ops", lambda: TODAY - 3651 * 86400)
    new = await credentials.load(kube, "ops", lambda: TODAY)
    assert new.ca_fingerprint != old.ca_fingerprint
    assert new.router_key(UID) == old.router_key(UID)
    secret = kube.of("Secret")[0]
    secret["data"]["tls.key"] = base64.b64encode(new_authority(TODAY).key).decode()
    with pytest.raises(BadAuthority, match="does not belong"):
        parse(secret)
    kube.put(secret)
    with pytest.raises(BadAuthority):
        await credentials.load(kube, "ops", lambda: TODAY)
