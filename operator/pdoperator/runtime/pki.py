"""The operator's certificate authority: pure functions over keys and certificates (PEM bytes).

Two kinds of leaf: the operator's (client only, SAN OPERATOR_IDENTITY) and the pods' (server and
client, because ranks dial each other; SAN `pod_server_name(uid)`, one per PDCluster). A pod's leaf
never names the operator, so no pod can write a roster. Keys are EC P-256.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdoperator.api.names import OPERATOR_IDENTITY

CA_LIFETIME = timedelta(days=3650)
POD_LIFETIME = timedelta(days=30)
OPERATOR_LIFETIME = timedelta(days=1)
BACKDATE = timedelta(hours=2)
"""Certificates begin this far in the past: a pod's clock may lag."""


@dataclass(frozen=True)
class Leaf:
    """A certificate with its private key, PEM. `not_after` is Unix seconds."""

    certificate: bytes
    key: bytes
    not_after: float

    def __repr__(self) -> str:
        return f"Leaf(not_after={self.not_after:.0f})"


@dataclass(frozen=True)
class Authority:
    """The CA. `bundle` is what pods trust: this CA and any earlier one that is still valid.
    `root_key` (32 bytes) is what router keys derive from; it outlives a change of the CA."""

    certificate: bytes
    key: bytes
    bundle: bytes
    root_key: bytes

    def __repr__(self) -> str:
        return f"Authority(fingerprint={self.fingerprint})"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the CA certificate, hex, first 32 digits."""
        der = x509.load_pem_x509_certificate(self.certificate).public_bytes(serialization.Encoding.DER)
        return hashlib.sha256(der).hexdigest()[:32]

    @property
    def not_after(self) -> float:
        """End of the CA certificate, Unix seconds."""
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc.timestamp()

    def router_key(self, cluster_uid: str) -> str:
        """Worker-API key of one PDCluster's routers: HMAC-SHA256(root key, UID), hex. Derived, never stored."""
        return hmac.new(self.root_key, b"router-key/" + cluster_uid.encode(), hashlib.sha256).hexdigest()


def new_authority(now: float, *, previous: Authority | None = None, lifetime: timedelta = CA_LIFETIME) -> Authority:
    """A new CA. `previous` stays trusted in the bundle until it ends, and hands on its root key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pdcluster operator CA")])
    begin = datetime.fromtimestamp(now, UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin - BACKDATE)
        .not_valid_after(begin + lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    bundle = pem
    if previous is not None and previous.not_after > now:
        bundle += previous.certificate
    root = previous.root_key if previous is not None else secrets.token_bytes(32)
    return Authority(certificate=pem, key=_key_pem(key), bundle=bundle, root_key=root)


def operator_leaf(authority: Authority, now: float, lifetime: timedelta = OPERATOR_LIFETIME) -> Leaf:
    """The operator's client certificate."""
    return _leaf(authority, OPERATOR_IDENTITY, now, lifetime, (ExtendedKeyUsageOID.CLIENT_AUTH,))


def pod_leaf(authority: Authority, server_name: str, now: float, lifetime: timedelta = POD_LIFETIME) -> Leaf:
    """The certificate that all pods of one PDCluster share. Refuses to make the operator's identity."""
    if not server_name.endswith(".pod.pdcluster.internal"):
        raise ValueError(f"{server_name!r} is not a pod server name")
    usages = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
    return _leaf(authority, server_name, now, lifetime, usages)


def renewal_due(not_after: float, lifetime: timedelta, now: float) -> bool:
    """True when a third or less of the lifetime is left."""
    return not_after - now <= lifetime.total_seconds() / 3


def client_context(authority: Authority, leaf: Leaf) -> ssl.SSLContext:
    """Client side of the control API: verifies the pod's name against the bundle, shows `leaf`.

    The key passes through a memory file: OpenSSL loads from paths, and the root file system is
    read-only and no place for keys."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority.bundle.decode())
    fd = os.memfd_create("operator-leaf")
    try:
        os.write(fd, leaf.certificate + leaf.key)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


def _leaf(
    authority: Authority, name: str, now: float, lifetime: timedelta, usages: tuple[x509.ObjectIdentifier, ...]
) -> Leaf:
    ca = x509.load_pem_x509_certificate(authority.certificate)
    ca_key = serialization.load_pem_private_key(authority.key, password=None)
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        raise ValueError("the CA key is not an elliptic-curve key")
    key = ec.generate_private_key(ec.SECP256R1())
    begin = datetime.fromtimestamp(now, UTC)
    # A leaf that outlives its CA would fail long after the reason was last looked at.
    end = min(begin + lifetime, ca.not_valid_after_utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(max(begin - BACKDATE, ca.not_valid_before_utc))
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    return Leaf(certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key), end.timestamp())


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
