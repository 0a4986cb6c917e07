"""In-memory API server double that implements KubePort, with faults to inject (kube.fake_faults). For tests.

It keeps what reconciling depends on: UIDs, resource versions, generations, create conflicts, UID
preconditions, server-side apply (kube.ssa), the status subresource, graceful pod deletion and
owner-reference garbage collection. It validates nothing; a real API server's tests do that.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pdoperator.api.status import timestamp
from pdoperator.kube.fake_faults import Faults
from pdoperator.kube.kinds import KINDS, kind_of
from pdoperator.kube.port import KubeError, Manifest
from pdoperator.kube.selectors import fields_match, labels_match
from pdoperator.kube.ssa import merge

Key = tuple[str, str, str, str]
"""api_version, kind, namespace, name."""
Manifests = list[Manifest]
"""Named because `list` means the method inside the class."""


@dataclass(frozen=True)
class Write:
    """One stored write, for checkers: verb, resource and a copy of what was stored."""

    verb: str
    resource: str
    name: str
    manifest: Manifest


class FakeKube:
    """The store. `writes` is the history of changes; `on_change` hears (event type, object)."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.objects: dict[Key, Manifest] = {}
        self.faults = Faults()
        self.writes: list[Write] = []
        self.calls: list[tuple[str, str]] = []
        self.on_change: list[Callable[[str, Manifest], None]] = []
        self._applied: dict[tuple[Key, str], Manifest] = {}
        self._versions: Iterator[int] = itertools.count(1)
        self._uids: Iterator[int] = itertools.count(1)
        self._now = now

    # --- KubePort -----------------------------------------------------------------------------

    async def list(
        self, api_version: str, kind: str, namespace: str | None, label_selector: str = "", field_selector: str = ""
    ) -> Manifests:
        await self._enter("list", api_version, kind)
        found = [
            copy.deepcopy(o)
            for (a, k, ns, _), o in sorted(self.objects.items())
            if (a, k) == (api_version, kind) and (namespace is None or ns == namespace)
        ]
        return [o for o in found if labels_match(o, label_selector) and fields_match(o, field_selector)]

    async def get(self, api_version: str, kind: str, namespace: str | None, name: str) -> Manifest | None:
        await self._enter("get", api_version, kind)
        return copy.deepcopy(self.objects.get((api_version, kind, namespace or "", name)))

    async def create(self, manifest: Manifest, *, dry_run: bool = False, strict: bool = False) -> Manifest:
        await self._enter("create", manifest["apiVersion"], manifest["kind"])
        key = _key(manifest)
        if key in self.objects:
            raise KubeError(409, "AlreadyExists", f"{key[1]} {key[3]} already exists")
        made = self._new(manifest)
        if not dry_run:
            self._store("create", key, made, "ADDED")
        return copy.deepcopy(made)

    async def apply(self, manifest: Manifest, *, subresource: str = "", force: bool = True) -> Manifest:
        resource = "/".join(p for p in (_resource(manifest), subresource) if p)
        await self._enter("patch", manifest["apiVersion"], manifest["kind"], resource)
        key = _key(manifest)
        live = self.objects.get(key)
        if live is None:
            if subresource:
                raise KubeError(404, "NotFound", f"{key[1]} {key[3]} not found")
            live = self._new({"apiVersion": key[0], "kind": key[1], "metadata": manifest["metadata"]})
            event = "ADDED"
        else:
            event = "MODIFIED"
        self._check_applied(manifest, live, subresource)
        part = {k: v for k, v in manifest.items() if (k == "status") == (subresource == "status")}
        if not subresource and "status" in manifest and event == "ADDED":
            part["status"] = manifest["status"]
        part.pop("metadata", None)
        if not subresource:
            keep = ("labels", "annotations", "ownerReferences", "finalizers")
            part["metadata"] = {k: v for k, v in manifest["metadata"].items() if k in keep}
        if not force and event == "MODIFIED" and (key, subresource) not in self._applied:
            raise KubeError(409, "Conflict", f"Apply failed with conflicts with another manager of {key[1]} {key[3]}")
        before = self._applied.get((key, subresource), {})
        new = merge(live, copy.deepcopy(part), before)
        self._applied[(key, subresource)] = copy.deepcopy(part)
        if _bare(new) != _bare(live) or event == "ADDED":
            if new.get("spec") != live.get("spec"):
                new["metadata"]["generation"] = live["metadata"].get("generation", 0) + 1
            self._store("patch", key, new, event, resource)
        return copy.deepcopy(self.objects[key])

    async def replace(self, manifest: Manifest) -> Manifest:
        await self._enter("update", manifest["apiVersion"], manifest["kind"])
        key = _key(manifest)
        live = self.objects.get(key)
        if live is None:
            raise KubeError(404, "NotFound", f"{key[1]} {key[3]} not found")
        version = manifest["metadata"].get("resourceVersion")
        if version is not None and version != live["metadata"]["resourceVersion"]:
            raise KubeError(409, "Conflict", "the object has been modified")
        new = copy.deepcopy(manifest)
        new["metadata"] = {**live["metadata"], **new["metadata"]}
        self._store("update", key, new, "MODIFIED")
        return copy.deepcopy(new)

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
        await self._enter("delete", api_version, kind)
        key = (api_version, kind, namespace or "", name)
        live = self.objects.get(key)
        if live is None:
            return
        self._check_uid(uid, live)
        if kind == "Pod" and grace_seconds != 0 and (live.get("spec") or {}).get("nodeName"):
            # A kubelet holds it: the object stays, terminating, until the test calls `finish`.
            if "deletionTimestamp" not in live["metadata"]:
                new = copy.deepcopy(live)
                new["metadata"]["deletionTimestamp"] = self._stamp()
                self._store("delete", key, new, "MODIFIED")
            return
        self.remove(key, count=True)

    # --- the test's side ----------------------------------------------------------------------

    def put(self, manifest: Manifest) -> Manifest:
        """Store as a user or a kubelet would: not counted as a write of the operator's."""
        key = _key(manifest)
        live = self.objects.get(key)
        new = self._new(manifest) if live is None else copy.deepcopy(manifest)
        if live is not None:
            new["metadata"] = {**live["metadata"], **new["metadata"]}
            if new.get("spec") != live.get("spec"):
                new["metadata"]["generation"] = live["metadata"].get("generation", 1) + 1
        self._set(key, new, "ADDED" if live is None else "MODIFIED")
        return copy.deepcopy(new)

    def finish(self, namespace: str, name: str) -> None:
        """The kubelet is done with a terminating pod: the object goes."""
        self.remove(("v1", "Pod", namespace, name))

    def remove(self, key: Key, *, count: bool = False) -> None:
        """Remove an object and, as the garbage collector would, what only it owns."""
        gone = self.objects.pop(key, None)
        if gone is None:
            return
        for entry in [e for e in self._applied if e[0] == key]:
            del self._applied[entry]
        if count:
            self._record("delete", kind_of(key[0], key[1]).resource, key, gone)
        self._tell("DELETED", gone)
        uid = gone["metadata"]["uid"]
        for other, live in list(self.objects.items()):
            owners = live["metadata"].get("ownerReferences") or []
            if owners and all(o.get("uid") == uid for o in owners):
                self.remove(other)

    def of(self, kind: str, namespace: str | None = None) -> Manifests:
        """Objects of a kind by name, without going through a call (no fault, no delay)."""
        return [
            o for (_, k, ns, _), o in sorted(self.objects.items())
            if k == kind and (namespace is None or ns == namespace)
        ]  # fmt: skip

    # --- inside -------------------------------------------------------------------------------

    async def _enter(self, verb: str, api_version: str, kind: str, resource: str = "") -> None:
        name = resource or kind_of(api_version, kind).resource
        self.faults.alive()
        self.calls.append((verb, name))
        await asyncio.sleep(self.faults.delay)
        self.faults.alive()
        self.faults.answer(verb, name)

    def _new(self, manifest: Manifest) -> Manifest:
        made = copy.deepcopy(manifest)
        meta = made.setdefault("metadata", {})
        meta.setdefault("uid", f"00000000-0000-4000-8000-{next(self._uids):012d}")
        meta.setdefault("creationTimestamp", self._stamp())
        meta.setdefault("generation", 1)
        meta.setdefault("resourceVersion", "0")
        return made

    def _stamp(self) -> str:
        return timestamp(self._now())

    def _check_uid(self, uid: str | None, live: Manifest) -> None:
        if uid is not None and uid != live["metadata"]["uid"]:
            raise KubeError(409, "Conflict", f"precondition failed: UID {uid} is not {live['metadata']['uid']}")

    def _check_applied(self, manifest: Manifest, live: Manifest, subresource: str) -> None:
        version, uid = manifest["metadata"].get("resourceVersion"), manifest["metadata"].get("uid")
        if version is not None and version != live["metadata"]["resourceVersion"]:
            raise KubeError(409, "Conflict", "the object has been modified")
        custom_status = subresource == "status" and live["kind"] == "PDCluster"  # the real one ignores it there
        if uid is not None and uid != live["metadata"]["uid"] and not custom_status:
            raise KubeError(422, "Invalid", f"metadata.uid: Invalid value: {uid!r}: field is immutable")

    def _set(self, key: Key, obj: Manifest, event: str) -> None:
        obj["metadata"]["resourceVersion"] = str(next(self._versions))
        self.objects[key] = obj
        self._tell(event, obj)

    def _store(self, verb: str, key: Key, obj: Manifest, event: str, resource: str = "") -> None:
        self._set(key, obj, event)
        self._record(verb, resource or kind_of(key[0], key[1]).resource, key, obj)

    def _record(self, verb: str, resource: str, key: Key, obj: Manifest) -> None:
        self.writes.append(Write(verb, resource, key[3], copy.deepcopy(obj)))
        self.faults.stored(len(self.writes), f"{verb} {resource} {key[3]}")

    def _tell(self, event: str, obj: Manifest) -> None:
        for listener in self.on_change:
            listener(event, copy.deepcopy(obj))


def _key(manifest: Manifest) -> Key:
    meta = manifest["metadata"]
    return (manifest["apiVersion"], manifest["kind"], meta.get("namespace") or "", meta["name"])


def _resource(manifest: Manifest) -> str:
    return KINDS[(manifest["apiVersion"], manifest["kind"])].resource


def _bare(obj: Manifest) -> dict[str, Any]:
    return {**obj, "metadata": {k: v for k, v in obj["metadata"].items() if k != "resourceVersion"}}
