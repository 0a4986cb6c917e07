"""Reads one TP rank's part of a safetensors checkpoint (single file or sharded with an index)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pdtransfer.engines.reference.problems import SetupError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SAMPLES = 16
SAMPLE_BYTES = 1 << 18


class Checkpoint:
    """Tensors by name; slices are read from the file, so that a rank never holds the whole model."""

    def __init__(self, folder: Path, files: dict[str, Any]) -> None:
        self._folder = folder
        self._file_of = files

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Tensor `name`, whose whole shape must be `shape`; `rows`/`columns` = (start, count) cut it."""
        handle = self._file_of.get(name)
        if handle is None:
            raise SetupError(
                f"{self._folder}: the checkpoint has no tensor {name!r}; "
                "it is incomplete or not the one config.json describes"
            )
        part = handle.get_slice(name)
        if tuple(part.get_shape()) != shape:
            raise SetupError(
                f"{self._folder}: tensor {name!r} has shape {tuple(part.get_shape())}, config.json asks for {shape}"
            )
        if columns is not None:
            tensor = part[:, columns[0] : columns[0] + columns[1]]
        elif rows is not None:
            tensor = part[rows[0] : rows[0] + rows[1]]
        else:
            tensor = part[:]
        found: torch.Tensor = tensor.to(dtype).contiguous()
        return found


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """Open the folder's safetensors files for as long as tensors are read."""
    with ExitStack() as stack:
        names = _files(folder)
        files: dict[str, Any] = {}
        for path in names:
            try:
                handle = stack.enter_context(safe_open(str(path), framework="pt"))
            except (OSError, SafetensorError) as error:
                raise SetupError(f"{path} can not be read as safetensors: {error}") from error
            files.update(dict.fromkeys(handle.keys(), handle))
        yield Checkpoint(folder, files)


def content_digest(folder: Path) -> str:
    """`sampled-sha256:` over config.json and, of every weights file, size, header and samples: tells two
    checkpoints apart without reading all of a large one. Stands in where no revision is given."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in _files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return f"sampled-sha256:{digest.hexdigest()[:32]}"


def _files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        raise SetupError(f"{folder} holds neither {SINGLE} nor {INDEX}; download or copy the weights there")
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise SetupError(f"{index} can not be read as a safetensors index: {error}") from error
    missing = [s for s in shards if not (folder / s).is_file()]
    if missing:
        raise SetupError(f"{index} names files that are not there: {', '.join(missing)}")
    return [folder / s for s in shards]
