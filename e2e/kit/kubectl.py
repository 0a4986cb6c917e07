"""A thin kubectl: the same program a user has, JSON in and out."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from e2e.kit.shell import CommandFailed, run, wait_for


@dataclass(frozen=True)
class Kubectl:
    """`binary` with `kubeconfig`, in `namespace`."""

    binary: str
    kubeconfig: str
    namespace: str = "default"

    def into(self, namespace: str) -> Kubectl:
        """The same cluster, another namespace."""
        return Kubectl(self.binary, self.kubeconfig, namespace)

    def command(self, *args: str) -> list[str]:
        return [self.binary, "--kubeconfig", self.kubeconfig, "--namespace", self.namespace, *args]

    def __call__(self, *args: str, stdin: str | None = None, timeout: float = 60, check: bool = True) -> str:
        done = run(self.command(*args), stdin=stdin, timeout=timeout, check=check)
        return done.stdout if check else done.stdout + done.stderr

    def _read(self, *args: str) -> str:
        """Once more where the API server could not be reached: it is starved on busy cores now and then."""
        try:
            return self(*args)
        except CommandFailed as failed:
            if "Unable to connect to the server" not in str(failed):
                raise
            return self(*args)

    def get(self, kind: str, name: str = "", selector: str = "") -> Any:
        """Object (or None when it is not there), or the list of items when no name is given."""
        args = ["get", kind, "-o", "json"]
        if name:
            args += [name, "--ignore-not-found"]
        if selector:
            args += ["-l", selector]
        text = self._read(*args)
        if not text.strip():
            return None
        data = json.loads(text)
        return data if name else data["items"]

    def apply(self, manifest: Any) -> str:
        """Server-side apply of one object or a list of them."""
        items = manifest if isinstance(manifest, list) else [manifest]
        text = "\n---\n".join(json.dumps(item) for item in items)
        return self("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)

    def condition(self, kind: str, name: str, condition: str) -> dict[str, Any]:
        """One condition of an object, {} when it is not there."""
        found = self.get(kind, name) or {}
        for c in found.get("status", {}).get("conditions", []):
            if c["type"] == condition:
                return dict(c)
        return {}

    def wait_condition(
        self,
        kind: str,
        name: str,
        condition: str,
        status: str = "True",
        *,
        reason: str = "",
        timeout: float = 180,
    ) -> dict[str, Any]:
        """Wait until the condition has `status` (and `reason`), for the current generation."""

        def probe() -> dict[str, Any] | None:
            found = self.get(kind, name) or {}
            generation = found.get("metadata", {}).get("generation")
            for c in found.get("status", {}).get("conditions", []):
                if c["type"] == condition and c["status"] == status and (not reason or c["reason"] == reason):
                    return dict(c) if c.get("observedGeneration", generation) == generation else None
            return None

        return wait_for(
            f"{kind}/{name} {condition}={status} {reason}".strip(),
            probe,
            timeout=timeout,
            every=0.5,
            context=lambda: self("describe", kind, name, check=False)[-4000:],
        )

    @contextlib.contextmanager
    def forward(self, target: str, port: int) -> Iterator[int]:
        """`kubectl port-forward TARGET`; gives the local port."""
        process = subprocess.Popen(
            self.command("port-forward", target, f":{port}"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        out = process.stdout
        try:
            first = out.readline()
            found = re.search(r"127\.0\.0\.1:(\d+)", first)
            if not found:
                raise CommandFailed(f"kubectl port-forward {target}: {first}{out.read() if process.poll() else ''}")
            # Its chatter must be read, or it blocks on a full pipe.
            threading.Thread(target=lambda: [None for _ in out], daemon=True).start()
            yield int(found.group(1))
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)
