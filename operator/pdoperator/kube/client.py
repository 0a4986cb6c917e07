"""KubePort over kubernetes.aio: raw dictionaries, server-side apply, one pooled connection set.

Typed models are not used: they drop fields they do not know, and cost memory and time."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from typing import Any

import aiohttp
from kubernetes.aio import client as kclient
from kubernetes.aio import config as kconfig

from pdoperator.api.names import FIELD_MANAGER
from pdoperator.kube.kinds import Kind, kind_of
from pdoperator.kube.port import KubeError, Manifest

log = logging.getLogger(__name__)

Query = list[tuple[str, str]]
"""Named because `list` means the method inside the class."""
_Manifests = list[Manifest]
_APPLY = "application/apply-patch+yaml"
_PAGE = 500
_RELISTS = 3


class KubeClient:
    """Implements kube.port.KubePort. Every request ends within `timeout` seconds."""

    def __init__(self, api: kclient.ApiClient, *, timeout: float = 15.0, max_in_flight: int = 32) -> None:
        self._api = api
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=min(5.0, timeout))
        self._slots = asyncio.Semaphore(max_in_flight)

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def list(
        self, api_version: str, kind: str, namespace: str | None, label_selector: str = "", field_selector: str = ""
    ) -> _Manifests:
        """All objects, a consistent read (no resourceVersion: never an older snapshot), in pages."""
        entry = kind_of(api_version, kind)
        for attempt in range(_RELISTS):
            try:
                return await self._list_pages(entry, namespace, label_selector, field_selector)
            except KubeError as error:
                # 410: the continue token outlived its snapshot; half a list must never pass for all.
                if error.status != 410 or attempt == _RELISTS - 1:
                    raise
        raise AssertionError("unreachable")

    async def _list_pages(self, entry: Kind, namespace: str | None, selector: str, fields: str) -> _Manifests:
        items: _Manifests = []
        token = ""
        while True:
            query: Query = [("limit", str(_PAGE))]
            if selector:
                query.append(("labelSelector", selector))
            if fields:
                query.append(("fieldSelector", fields))
            if token:
                query.append(("continue", token))
            page = await self._call("GET", entry.path(namespace), query=query)
            for item in page.get("items") or []:
                # Items of a list carry no apiVersion and kind of their own.
                items.append({"apiVersion": entry.api_version, "kind": entry.kind, **item})
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                return items

    async def get(self, api_version: str, kind: str, namespace: str | None, name: str) -> Manifest | None:
        """The object, or None when there is none."""
        try:
            return await self._call("GET", kind_of(api_version, kind).path(namespace, name))
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    async def create(self, manifest: Manifest, *, dry_run: bool = False, strict: bool = False) -> Manifest:
        """POST. `strict` refuses unknown fields, `dry_run` stores nothing."""
        query = [("fieldManager", FIELD_MANAGER)]
        if dry_run:
            query.append(("dryRun", "All"))
        if strict:
            query.append(("fieldValidation", "Strict"))
        entry, namespace, _ = _where(manifest)
        return await self._call("POST", entry.path(namespace), body=manifest, query=query)

    async def apply(self, manifest: Manifest, *, subresource: str = "", force: bool = True) -> Manifest:
        """Server-side apply as FIELD_MANAGER. metadata.resourceVersion, when given, is a precondition (409).

        metadata.uid guards the status of Pods (422 when it differs) but not that of custom resources,
        whose status strategy takes all other metadata from the stored object."""
        query = [("fieldManager", FIELD_MANAGER), ("force", "true" if force else "false")]
        entry, namespace, name = _where(manifest)
        path = entry.path(namespace, name, subresource)
        return await self._call("PATCH", path, body=manifest, query=query, content_type=_APPLY)

    async def replace(self, manifest: Manifest) -> Manifest:
        """PUT with metadata.resourceVersion (optimistic lock)."""
        entry, namespace, name = _where(manifest)
        query = [("fieldManager", FIELD_MANAGER)]
        return await self._call("PUT", entry.path(namespace, name), body=manifest, query=query)

    async def delete(
        self,
        api_version: str,
        kind: str,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        grace_seconds: int | None = None,
    ) -> None:
        """DELETE, background propagation; `uid` is a precondition (409). Gone already is success."""
        body: Manifest = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        try:
            await self._call("DELETE", kind_of(api_version, kind).path(namespace, name), body=body)
        except KubeError as error:
            if error.status != 404:
                raise

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Manifest | None = None,
        query: Query | None = None,
        content_type: str = "application/json",
    ) -> Manifest:
        headers = {"Accept": "application/json", "Content-Type": content_type}
        try:
            async with self._slots:
                request = await self._api.param_serialize(
                    method, path, query_params=query or [], header_params=headers, body=body,
                    auth_settings=["BearerToken"],
                )  # fmt: skip
                response = await self._api.call_api(*request, _request_timeout=self._timeout)
                data = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise KubeError(0, "Unreachable", f"{method} {path}: {type(error).__name__} {error}") from error
        if response.status >= 300:
            raise _error(response.status, data, f"{method} {path}")
        try:
            parsed = json.loads(data)
        except ValueError as error:
            raise KubeError(0, "InvalidAnswer", f"{method} {path}: not JSON ({error})") from error
        if not isinstance(parsed, dict):
            raise KubeError(0, "InvalidAnswer", f"{method} {path}: not a JSON object")
        return parsed


def _where(manifest: Manifest) -> tuple[Kind, str | None, str]:
    meta = manifest.get("metadata") or {}
    entry = kind_of(manifest["apiVersion"], manifest["kind"])
    return entry, meta.get("namespace"), meta.get("name", "")


_REASONS = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict", 410: "Expired",
    422: "Invalid", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable",
}  # fmt: skip


def _error(status: int, data: bytes, what: str) -> KubeError:
    """The API's Status object as an error; a proxy's answer that is no Status keeps its code."""
    reason, message = _REASONS.get(status, f"HTTP{status}"), ""
    try:
        parsed: Any = json.loads(data)
        if isinstance(parsed, dict) and parsed.get("kind") == "Status":
            reason = str(parsed.get("reason") or reason)
            message = str(parsed.get("message") or "")
    except ValueError:
        pass
    return KubeError(status, reason, message or f"{what} answered {status}")


async def connect(*, kubeconfig: str | None = None, timeout: float = 15.0) -> KubeClient:
    """Client from `kubeconfig` (or $KUBECONFIG), else from the pod's service account."""
    configuration = kclient.Configuration()
    path = kubeconfig or os.environ.get("KUBECONFIG", "")
    if path:
        await kconfig.load_kube_config(config_file=path, client_configuration=configuration)
    else:
        kconfig.load_incluster_config(client_configuration=configuration)
    configuration.retries = None
    configuration.connection_pool_maxsize = 32
    api = kclient.ApiClient(configuration)
    api.user_agent = FIELD_MANAGER
    return KubeClient(api, timeout=timeout)
