"""The GPU of a rank's pool, current in the thread that calls its agent: UCX takes the context it finds there."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def use_device(device: int) -> None:
    """Make a GPU's context the calling thread's own; other threads keep theirs. Where torch can not do it
    the agent is left to find the context by itself, and a warning says so."""
    try:
        import torch  # only a rank with device memory needs it here

        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # set_device alone makes no context for the device a thread begins with
    except (AssertionError, AttributeError, ImportError, RuntimeError) as error:  # the first two: torch without CUDA
        logger.warning("device %d can not be made current for the agent's thread: %s", device, error)
