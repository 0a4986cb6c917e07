"""SGLang's transfer plugin in an engine pod. The engine's image stays as it is, its own NIXL and torch are used.

An init container of the transfer image copies the plugin into a volume; the engine is started through the launcher
that lies there (pdtransfer.install), with the environment that the plugin reads.
"""

from __future__ import annotations

from typing import Any

from pdoperator.api import names
from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.settings import DecideSettings
from pdtransfer.contract.base import Backend, EngineType
from pdtransfer.contract.nixl_plugins import DEFAULT

PLUGIN_DIR = f"{names.PLUGIN_VOLUME_DIR}/plugin"
"""A folder in the volume, not the volume itself: it appears whole or not at all."""
LAUNCHER = f"{PLUGIN_DIR}/pdtransfer_launch.py"


def wants_plugin(spec: PDClusterSpec) -> bool:
    """True for SGLang with this project's backend: the Reference engine has it built in."""
    return spec.engine.type is EngineType.SGLANG and spec.transfer.backend is Backend.PDCLUSTER


def plugin_volume() -> dict[str, Any]:
    """The volume that the plugin is copied into, about 1 MB."""
    return {"name": names.VOLUME_PLUGIN, "emptyDir": {"sizeLimit": "64Mi"}}


def plugin_mount(*, read_only: bool) -> dict[str, Any]:
    """Where the volume is, in the installer and, read-only, in the engine."""
    mount: dict[str, Any] = {"name": names.VOLUME_PLUGIN, "mountPath": names.PLUGIN_VOLUME_DIR}
    return mount | {"readOnly": True} if read_only else mount


def installer_container(spec: PDClusterSpec, settings: DecideSettings) -> dict[str, Any]:
    """Init container that copies the plugin. Run again, it leaves what is right as it is."""
    return {
        "name": names.CONTAINER_INSTALLER,
        "image": spec.transfer.image or settings.transfer_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["python3", "-m", "pdtransfer.install", PLUGIN_DIR],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}},
        "volumeMounts": [plugin_mount(read_only=False)],
    }


def launched(command: list[str]) -> list[str]:
    """`python3 -m MODULE`, started through the launcher."""
    python, *rest = command
    return [python, LAUNCHER, *rest]


def plugin_env(spec: PDClusterSpec) -> list[dict[str, str]]:
    """What the plugin reads beside OWN_ENV's identity, socket and certificates; the Reference engine has flags for it.
    How long one side waits for the other is SGLang's own setting (container_env.sglang_env)."""
    # Another plugin than UCX chooses its devices itself (the fit check says so).
    devices = ",".join(spec.transfer.fabric.devices) if spec.transfer.plugin.name == DEFAULT else ""
    values = {
        "PDTRANSFER_TRANSFER_TIMEOUT": str(spec.transfer.timeouts.transfer_seconds),
        "PDTRANSFER_NET_DEVICES": devices,
    }
    return [{"name": name, "value": value} for name, value in values.items() if value]
