"""Kinds of accelerator as far as SGLang's own choices depend on them."""

from __future__ import annotations

from enum import StrEnum


class Accelerator(StrEnum):
    """What an engine rank computes on. NVIDIA GPUs go by compute capability: SM90 is Hopper, SM100
    stands for 10.0 and 10.3 (B200, GB200, B300), SM120 for 12.0 and 12.1."""

    SM80 = "SM80"
    SM89 = "SM89"
    SM90 = "SM90"
    SM100 = "SM100"
    SM120 = "SM120"
    ROCM = "ROCm"
    CPU = "CPU"
    NVIDIA = "NVIDIA"
    """An NVIDIA GPU of a generation that is not told."""

    @property
    def nvidia(self) -> bool:
        """True for an NVIDIA GPU."""
        return self not in (Accelerator.ROCM, Accelerator.CPU)

    @property
    def major(self) -> int:
        """Major compute capability, 0 where there is none or it is not told."""
        return int(self.value[2:]) // 10 if self.value.startswith("SM") else 0


def from_capability(major: int, minor: int) -> Accelerator | None:
    """The kind with this CUDA compute capability; None for one that the model does not know."""
    if major == 8:
        return Accelerator.SM89 if minor >= 9 else Accelerator.SM80
    known = {9: Accelerator.SM90, 10: Accelerator.SM100, 12: Accelerator.SM120}
    return known.get(major)
