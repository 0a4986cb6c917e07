"""What the operator needs of a Kubernetes API server: plain dicts in and out.

Implemented by kube.client (kubernetes.aio) and by kube.fake (in-memory, for tests).
"""

from __future__ import annotations

from typing import Any, Protocol

Manifest = dict[str, Any]


class KubeError(Exception):
    """An API call failed. `status` is the HTTP code (0 for no answer), `reason` the API's reason word."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


class KubePort(Protocol):
    """Typed by (api_version, kind) so that one small implementation serves every kind."""

    async def list(
        self, api_version: str, kind: str, namespace: str | None, label_selector: str = "", field_selector: str = ""
    ) -> list[Manifest]: ...
    async def get(self, api_version: str, kind: str, namespace: str | None, name: str) -> Manifest | None: ...
    async def create(self, manifest: Manifest, *, dry_run: bool = False, strict: bool = False) -> Manifest: ...
    async def apply(self, manifest: Manifest, *, subresource: str = "", force: bool = True) -> Manifest: ...
    async def replace(self, manifest: Manifest) -> Manifest:
        """PUT with metadata.resourceVersion (optimistic lock), used for the Lease."""

    async def delete(
        self,
        api_version: str,
        kind: str,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        grace_seconds: int | None = None,
    ) -> None: ...
