"""The certificates, tokens and kubeconfigs of the control plane and its clients.

Made anew for every cluster, and readable by its owner alone. Each component
is its own user, so that RBAC and the node authorizer decide what it may do,
as they would in any cluster. Clients check the server's certificate.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .addressing import API_SERVICE, CLUSTER_DOMAIN, FABRIC, NodeAddresses, api_server_url
from .errors import ClusterError
from .paths import Layout

VALID_DAYS = 365
ADMIN = "kubernetes-admin"

# Component, user name and groups. RBAC's bootstrap policy knows the system users.
_USERS = (
    ("admin", ADMIN, ("system:masters",)),
    ("kube-controller-manager", "system:kube-controller-manager", ()),
    ("kube-scheduler", "system:kube-scheduler", ()),
    ("kube-proxy", "system:kube-proxy", ()),
)


def ensure(layout: Layout, nodes: Sequence[NodeAddresses], relay_port: int) -> None:
    """Writes all credentials, unless a previous call has finished doing so."""
    done = layout.pki / "done"
    if done.exists():
        return
    layout.pki.mkdir(parents=True, exist_ok=True)
    layout.control_plane.mkdir(parents=True, exist_ok=True)
    _authority(layout.pki)
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    names += [f"kubernetes.default.svc.{CLUSTER_DOMAIN}", "localhost"]
    addresses = [str(FABRIC), str(API_SERVICE), "127.0.0.1"]
    _certificate(layout.pki, "apiserver", "/CN=kube-apiserver", "serverAuth", names, addresses)
    # As this user the API server fetches logs from kubelets and runs commands through them.
    _certificate(
        layout.pki,
        "apiserver-kubelet-client",
        "/O=system:masters/CN=kube-apiserver-kubelet-client",
        "clientAuth",
    )
    for node in nodes:
        _certificate(
            layout.pki,
            f"kubelet-{node.name}",
            f"/O=system:nodes/CN=system:node:{node.name}",
            "serverAuth",
            [node.name],
            [str(node.node)],
        )
    _service_account_key(layout.pki)
    _tokens(layout, nodes, relay_port)
    done.touch()


def _openssl(*arguments: str) -> None:
    try:
        subprocess.run(
            ["openssl", *arguments],
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
            umask=0o077,
        )
    except subprocess.CalledProcessError as error:
        raise ClusterError(f"openssl {arguments[0]} failed: {error.stderr.strip()}") from error


def _key_options(key: Path) -> list[str]:
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    return [*curve, "-noenc", "-keyout", str(key)]


def _authority(folder: Path) -> None:
    _openssl(
        *("req", "-x509", "-days", str(VALID_DAYS), "-subj", "/CN=pdcluster-e2e-ca"),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"),
        *_key_options(folder / "ca.key"),
        *("-out", str(folder / "ca.crt")),
    )


def _certificate(
    folder: Path,
    name: str,
    subject: str,
    usage: str,
    dns_names: Sequence[str] = (),
    addresses: Sequence[str] = (),
) -> None:
    alternatives = [f"DNS:{each}" for each in dns_names] + [f"IP:{each}" for each in addresses]
    extensions = [f"extendedKeyUsage={usage}", "keyUsage=critical,digitalSignature"]
    extensions.append("basicConstraints=critical,CA:FALSE")
    if alternatives:
        extensions.append("subjectAltName=" + ",".join(alternatives))
    _openssl(
        *("req", "-x509", "-days", str(VALID_DAYS), "-subj", subject),
        *("-CA", str(folder / "ca.crt"), "-CAkey", str(folder / "ca.key")),
        *(word for extension in extensions for word in ("-addext", extension)),
        *_key_options(folder / f"{name}.key"),
        *("-out", str(folder / f"{name}.crt")),
    )


def _service_account_key(folder: Path) -> None:
    key, public = str(folder / "service-accounts.key"), str(folder / "service-accounts.pub")
    _openssl("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", key)
    _openssl("pkey", "-in", key, "-pubout", "-out", public)


def _tokens(layout: Layout, nodes: Sequence[NodeAddresses], relay_port: int) -> None:
    users = [*_USERS]
    users += [(node.name, f"system:node:{node.name}", ("system:nodes",)) for node in nodes]
    rows = []
    for component, user, groups in users:
        token = secrets.token_urlsafe(32)
        rows.append(f'{token},{user},{component},"{",".join(groups)}"')
        _kubeconfig(layout, layout.component_kubeconfig(component), api_server_url(), user, token)
        if component == "admin":
            url = f"https://127.0.0.1:{relay_port}"
            _kubeconfig(layout, layout.kubeconfig, url, user, token)
    write_private(layout.control_plane / "tokens.csv", "\n".join(rows) + "\n")


def _kubeconfig(layout: Layout, path: Path, url: str, user: str, token: str) -> None:
    authority = base64.b64encode((layout.pki / "ca.crt").read_bytes()).decode()
    name = "pdcluster-e2e"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": url, "certificate-authority-data": authority}}],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": user}}],
        "current-context": name,
    }
    write_private(path, json.dumps(config, indent=2) + "\n")  # JSON is YAML too


def write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
