"""SGLang's `--disaggregation-ib-device` as what UCX calls its network devices."""

from __future__ import annotations

from pathlib import Path

from pdtransfer.contract.ib_devices import FILE_SUFFIX, is_map, parse_map

_FLAG = "--disaggregation-ib-device"


def net_devices(named: object, gpu: int) -> str | None:
    """ "mlx5_0,mlx5_1", a JSON map of GPU index to such a list, or a .json file with such a map ->
    "mlx5_0:1,mlx5_1:1"; None where nothing is said.

    A name without a port means port 1, the only one most adapters have. ValueError names what is wrong."""
    if not isinstance(named, str) or not named.strip():
        return None
    text = named.strip()
    if is_map(text) or text.endswith(FILE_SUFFIX):
        by_gpu, problem = parse_map(text if is_map(text) else _file(text))
        if problem:
            raise ValueError(f"{_FLAG}: {problem}")
        if gpu not in by_gpu:
            raise ValueError(f"{_FLAG}: the map has no adapter for GPU {gpu}")
        text = by_gpu[gpu]
    names = [n.strip() for n in text.split(",") if n.strip()]
    return ",".join(n if ":" in n else f"{n}:1" for n in names) or None


def _file(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{_FLAG}: {name} can not be read: {error}") from None
