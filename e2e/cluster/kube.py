"""A small client of the cluster's API server, and waits with deadlines."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import ClusterError

Object = dict[str, Any]


class ApiError(Exception):
    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:400]}")
        self.status = status


class KubeClient:
    """Talks to the API server as the kubeconfig's user, over the loopback relay."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        url = urllib.parse.urlsplit(cluster["server"])
        self._host, self._port = url.hostname or "", url.port or 443
        self._headers = {"Authorization": f"Bearer {config['users'][0]['user']['token']}"}
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._context = ssl.create_default_context(cadata=authority)

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        content_type: str = "application/json",
        timeout: float = 30.0,
    ) -> str:
        connection = http.client.HTTPSConnection(self._host, self._port, context=self._context, timeout=timeout)
        try:
            payload = None if body is None else json.dumps(body)
            headers: Mapping[str, str] = {**self._headers, "Content-Type": content_type}
            connection.request(method, path, payload, dict(headers))
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        finally:
            connection.close()
        if response.status >= 300:
            raise ApiError(response.status, text)
        return text

    def get(self, path: str) -> Object:
        answer: Object = json.loads(self.request("GET", path))
        return answer

    def json_patch(self, path: str, operations: list[Object]) -> None:
        self.request("PATCH", path, operations, "application/json-patch+json")

    def merge_patch(self, path: str, patch: Object) -> None:
        self.request("PATCH", path, patch, "application/merge-patch+json")

    def ready(self) -> bool:
        try:
            return self.request("GET", "/readyz", timeout=2.0) == "ok"
        except (OSError, http.client.HTTPException, ApiError):
            return False


def condition(item: Object, kind: str) -> bool:
    """Whether the object's status has this condition, and it's True."""
    conditions = item.get("status", {}).get("conditions", [])
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)


def wait_for(
    what: str,
    check: Callable[[], bool],
    *,
    timeout: float,
    log: Path | None = None,
    hint: str = "",
    alive: Callable[[], bool] = lambda: True,
    interval: float = 0.1,
) -> None:
    """Polls until the check holds; fails at the deadline, or once `alive` no longer does."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            if check():
                return
            reason = ""
        except (OSError, http.client.HTTPException, ApiError) as error:
            reason = f" ({error})"
        if not alive():
            raise ClusterError(f"{what}: its process has ended{reason}", log=log, hint=hint)
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not after {timeout:.0f} s{reason}", log=log, hint=hint)
        time.sleep(interval)
