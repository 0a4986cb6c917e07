"""The operator's own secrets at run time: CA loaded from its Secret, client certificate kept fresh.

The Secret `pdcluster-ca` lives in the operator's namespace only. Whoever creates it first wins;
everyone else reads it, so that two operators never hold two authorities.
"""

from __future__ import annotations

import base64
import binascii
import logging
import ssl
import time
from collections.abc import Callable

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from pdoperator.api.names import LABEL_MANAGED_BY, MANAGED_BY
from pdoperator.kube.execute import PodCertificate
from pdoperator.kube.port import KubeError, KubePort, Manifest
from pdoperator.runtime.pki import (
    OPERATOR_LIFETIME,
    Authority,
    Leaf,
    client_context,
    new_authority,
    operator_leaf,
    pod_leaf,
    renewal_due,
)

log = logging.getLogger(__name__)

CA_SECRET = "pdcluster-ca"


class BadAuthority(Exception):
    """The Secret is there and does not hold a usable CA: a person must look, it is never overwritten."""


class Credentials:
    """What the rest of the operator asks for. Built by `load`."""

    def __init__(self, authority: Authority, clock: Callable[[], float] = time.time) -> None:
        self.authority = authority
        self._clock = clock
        self._leaf: Leaf | None = None
        self._context: ssl.SSLContext | None = None

    def client_context(self) -> ssl.SSLContext:
        """Context of the control API's client; a new object once its certificate was renewed."""
        now = self._clock()
        if (
            self._leaf is None
            or self._context is None
            # Near the end of the CA no leaf can be longer: a new one each time would only cost.
            or (
                renewal_due(self._leaf.not_after, OPERATOR_LIFETIME, now)
                and self._leaf.not_after < self.authority.not_after
            )
        ):
            self._leaf = operator_leaf(self.authority, now)
            self._context = client_context(self.authority, self._leaf)
        return self._context

    @property
    def ended(self) -> bool:
        """The CA's time is over: only the next start makes a new one."""
        return self._clock() >= self.authority.not_after

    @property
    def longest(self) -> float:
        """No certificate of this CA ends later than this (Unix seconds)."""
        return self.authority.not_after

    def router_key(self, cluster_uid: str) -> str:
        """Key of the worker API of this PDCluster's routers."""
        return self.authority.router_key(cluster_uid)

    @property
    def ca_fingerprint(self) -> str:
        """Names the CA in status, so that a certificate of another one is replaced."""
        return self.authority.fingerprint

    def issue(self, server_name: str) -> PodCertificate:
        """A new certificate for the pods of one PDCluster."""
        leaf = pod_leaf(self.authority, server_name, self._clock())
        return PodCertificate(
            ca=self.authority.bundle,
            certificate=leaf.certificate,
            key=leaf.key,
            not_after=leaf.not_after,
            ca_fingerprint=self.authority.fingerprint,
        )


async def load(kube: KubePort, namespace: str, clock: Callable[[], float] = time.time) -> Credentials:
    """Read the CA, or make it. An ended CA is replaced; the router root key is kept.

    Raises KubeError when the Secret can neither be read nor made, BadAuthority when it is damaged."""
    found = await kube.get("v1", "Secret", namespace, CA_SECRET)
    if found is None:
        try:
            await kube.create(_secret(new_authority(clock()), namespace))
            log.info("secret=%s/%s event=ca-created", namespace, CA_SECRET)
        except KubeError as error:
            if error.status != 409:
                raise
        # Read back even our own: what is stored is what counts.
        found = await kube.get("v1", "Secret", namespace, CA_SECRET)
        if found is None:
            raise KubeError(404, "NotFound", f"Secret {namespace}/{CA_SECRET} vanished while the operator started")
    authority = parse(found)
    if authority.not_after <= clock():
        log.warning("secret=%s/%s event=ca-ended message='a new one is made'", namespace, CA_SECRET)
        authority = new_authority(clock(), previous=authority)
        await kube.apply(_secret(authority, namespace))
    return Credentials(authority, clock)


def parse(secret: Manifest) -> Authority:
    """Authority of a Secret's data. Raises BadAuthority."""
    data = secret.get("data") or {}
    try:
        fields = {k: base64.b64decode(data[k], validate=True) for k in ("tls.crt", "tls.key", "root.key")}
        bundle = base64.b64decode(data["bundle.crt"]) if "bundle.crt" in data else fields["tls.crt"]
        certificate = x509.load_pem_x509_certificate(fields["tls.crt"])
        key = serialization.load_pem_private_key(fields["tls.key"], password=None)
        spki = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        if certificate.public_key().public_bytes(*spki) != key.public_key().public_bytes(*spki):
            raise ValueError("tls.key does not belong to tls.crt")
        if len(fields["root.key"]) < 32:
            raise ValueError("root.key is shorter than 32 bytes")
    except (KeyError, ValueError, TypeError, binascii.Error) as error:
        raise BadAuthority(
            f"Secret {CA_SECRET} is damaged ({type(error).__name__}: {error}); restore it, or delete it to let "
            "the operator make a new CA (pods then need the new certificates before it reaches them)"
        ) from None
    return Authority(fields["tls.crt"], fields["tls.key"], bundle, fields["root.key"])


def _secret(authority: Authority, namespace: str) -> Manifest:
    raw = {
        "tls.crt": authority.certificate,
        "tls.key": authority.key,
        "bundle.crt": authority.bundle,
        "root.key": authority.root_key,
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": CA_SECRET, "namespace": namespace, "labels": {LABEL_MANAGED_BY: MANAGED_BY}},
        "type": "Opaque",
        "data": {k: base64.b64encode(v).decode() for k, v in raw.items()},
    }
