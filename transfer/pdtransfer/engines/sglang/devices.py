"""SGLang's `--disaggregation-ib-device` as what UCX calls its network devices."""

from __future__ import annotations

import json


def net_devices(named: object, gpu: int) -> str | None:
    """ "mlx5_0,mlx5_1" or a JSON map of GPU index to such a list -> "mlx5_0:1,mlx5_1:1"; None where nothing is said.

    A name without a port means port 1, the only one most adapters have. ValueError names what is wrong."""
    if not isinstance(named, str) or not named.strip():
        return None
    text = named.strip()
    if text.startswith("{"):
        try:
            by_gpu = json.loads(text)
        except ValueError as error:
            raise ValueError(f"--disaggregation-ib-device: {error}") from None
        found = by_gpu.get(str(gpu))
        if not isinstance(found, str):
            raise ValueError(f"--disaggregation-ib-device: the map has no adapter for GPU {gpu}")
        text = found
    names = [n.strip() for n in text.split(",") if n.strip()]
    return ",".join(n if ":" in n else f"{n}:1" for n in names) or None
