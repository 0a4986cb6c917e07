"""What a spec's pod template adds to a pod of ours, the same for engines and routers.

Maps and lists with names (volumes, mounts) are added to ours, and ours win where both name the same key; single
values (scheduler, priority class, service account ...) replace our default.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from typing import Any

from pdoperator.api import names
from pdoperator.api.spec import PodTemplate

NOTHING_BELOW = (names.SOCKET_DIR, names.TLS_DIR, names.PLUGIN_VOLUME_DIR)
"""Whoever replaces a file in these decides whom a rank talks to, or what runs in it."""


def merge_mounts(ours: list[dict[str, Any]], theirs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ours, then theirs that neither take a path of ours nor lie in the socket's, the
    certificates' or the plugin's folder, however the path is spelled."""
    taken = {str(m["mountPath"]) for m in ours}

    def free(mount: Mapping[str, Any]) -> bool:
        path = posixpath.normpath("/" + str(mount.get("mountPath", "")).lstrip("/"))
        return path not in taken and not any(path == d or path.startswith(d + "/") for d in NOTHING_BELOW)

    return ours + [dict(m) for m in theirs if free(m)]


def merge_named(ours: list[dict[str, Any]], theirs: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    """Ours, then theirs whose name we do not use."""
    taken = {item.get("name") for item in ours}
    return ours + [dict(item) for item in theirs if item.get("name") not in taken]


def apply_template(pod_spec: dict[str, Any], template: PodTemplate) -> None:
    """Put what the template asks for into `pod_spec`: what says where and how a pod runs, in place of our defaults."""
    single = {
        "affinity": template.affinity,
        "schedulerName": template.scheduler_name,
        "priorityClassName": template.priority_class_name,
        "serviceAccountName": template.service_account_name,
        "runtimeClassName": template.runtime_class_name,
        "securityContext": template.security_context,
    }
    pod_spec.update({k: v for k, v in single.items() if v})
    if template.node_selector:
        pod_spec["nodeSelector"] = dict(template.node_selector)
    for key, items in (
        ("tolerations", template.tolerations),
        ("topologySpreadConstraints", template.topology_spread_constraints),
        ("imagePullSecrets", template.image_pull_secrets),
    ):
        if items:
            pod_spec[key] = [dict(i) for i in items]
