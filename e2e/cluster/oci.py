"""Writes container images as OCI archives, without a container engine.

The result depends only on what is put in: times are zero, owners are what the
caller says, entries are sorted. The same input gives the same digest, which
is how an image that a node already holds is recognised.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

_EPOCH = "1970-01-01T00:00:00Z"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Entry:
    """One file, folder or symbolic link of an image."""

    content: bytes | Path | None = None  # None for a folder
    link: str = ""
    mode: int = 0o755
    user: int = 0
    group: int = 0


@dataclass(frozen=True)
class ImageConfig:
    """How a container of the image starts, unless its pod says otherwise."""

    environment: tuple[str, ...] = (f"PATH={DEFAULT_PATH}",)
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    user: str = ""
    working_dir: str = "/"


@dataclass
class Tree:
    """The files of an image by path, such as etc/passwd; parents come by themselves."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def folder(self, path: str, mode: int = 0o755, user: int = 0, group: int = 0) -> None:
        self.entries[_clean(path)] = Entry(mode=mode, user=user, group=group)

    def file(self, path: str, content: bytes | str | Path, mode: int = 0o644) -> None:
        data = content.encode() if isinstance(content, str) else content
        self.entries[_clean(path)] = Entry(data, mode=mode)

    def symlink(self, path: str, target: str) -> None:
        self.entries[_clean(path)] = Entry(link=target, mode=0o777)

    def add_host_folder(self, source: Path, below: str = "") -> None:
        """Copies a folder of the host; everything belongs to root."""
        for path in sorted(source.rglob("*")):
            name = f"{below}/{path.relative_to(source)}"
            if path.is_symlink():
                self.symlink(name, str(path.readlink()))
            elif path.is_dir():
                self.folder(name, path.stat().st_mode & 0o7777)
            elif path.is_file():
                self.file(name, path, path.stat().st_mode & 0o7777)

    def layer(self) -> bytes:
        """The tree as a tar archive."""
        complete = dict(self.entries)
        for path in self.entries:
            for parent in Path(path).parents:
                if str(parent) != ".":
                    complete.setdefault(str(parent), Entry())
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path in sorted(complete):
                _add(archive, path, complete[path])
        return buffer.getvalue()


def _clean(path: str) -> str:
    cleaned = path.strip("/")
    if not cleaned or ".." in Path(cleaned).parts:
        raise ValueError(f"not a path inside an image: {path!r}")
    return cleaned


def _add(archive: tarfile.TarFile, path: str, entry: Entry) -> None:
    info = tarfile.TarInfo(path)
    info.mode, info.uid, info.gid, info.mtime = entry.mode, entry.user, entry.group, 0
    if entry.link:
        info.type, info.linkname = tarfile.SYMTYPE, entry.link
        archive.addfile(info)
    elif entry.content is None:
        info.type = tarfile.DIRTYPE
        archive.addfile(info)
    elif isinstance(entry.content, Path):
        with entry.content.open("rb") as stream:
            info.size = entry.content.stat().st_size
            archive.addfile(info, stream)
    else:
        info.size = len(entry.content)
        archive.addfile(info, io.BytesIO(entry.content))


@dataclass(frozen=True)
class Image:
    """An image that is ready to be written."""

    name: str
    layers: tuple[bytes, ...]
    config: ImageConfig = ImageConfig()

    def _config_blob(self) -> bytes:
        settings = {
            "Env": list(self.config.environment),
            "Entrypoint": list(self.config.entrypoint) or None,
            "Cmd": list(self.config.command) or None,
            "User": self.config.user,
            "WorkingDir": self.config.working_dir,
        }
        return _json(
            {
                "architecture": architecture(),
                "os": "linux",
                "created": _EPOCH,
                "config": {key: value for key, value in settings.items() if value},
                "rootfs": {"type": "layers", "diff_ids": [_digest(each) for each in self.layers]},
                "history": [{"created": _EPOCH}] * len(self.layers),
            }
        )

    def _manifest_blob(self) -> bytes:
        return _json(
            {
                "schemaVersion": 2,
                "mediaType": _MANIFEST,
                "config": _descriptor(_CONFIG, self._config_blob()),
                "layers": [_descriptor(_LAYER, each) for each in self.layers],
            }
        )

    def digest(self) -> str:
        """The manifest's digest, which a node lists the image with."""
        return _digest(self._manifest_blob())

    def write(self, stream: IO[bytes]) -> None:
        """Writes an OCI image layout as one tar archive."""
        manifest = self._manifest_blob()
        described = _descriptor(_MANIFEST, manifest)
        described["platform"] = {"architecture": architecture(), "os": "linux"}
        described["annotations"] = {
            "io.containerd.image.name": self.name,
            "org.opencontainers.image.ref.name": self.name.rpartition(":")[2],
        }
        files = {
            "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
            "index.json": _json({"schemaVersion": 2, "manifests": [described]}),
        }
        for blob in (self._config_blob(), manifest, *self.layers):
            files[f"blobs/sha256/{_digest(blob).partition(':')[2]}"] = blob
        with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path, content in files.items():
                _add(archive, path, Entry(content, mode=0o644))

    def save(self, path: Path) -> None:
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("wb") as stream:
            self.write(stream)
        temporary.replace(path)


def architecture() -> str:
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _descriptor(media_type: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}
