"""What SGLang calls in each of its processes, before it reads its arguments: makes `pdcluster` a transfer backend.

SGLang only logs what a plugin raises and goes on without it, so a plugin that can not work says so itself, at once
and loudly; the argument `--disaggregation-transfer-backend pdcluster` is then refused by SGLang.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import secrets
import sys
from collections.abc import Callable
from typing import Any

from pdtransfer.engines.sglang.interfaces import PLUGIN, TESTED, TRANSFER, missing, sglang_version

log = logging.getLogger(__name__)
NAME = "pdcluster"
RELEASE = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
LAUNCH = "PDTRANSFER_LAUNCH"
"""Set in the engine's first process: what all its data-parallel replicas have in common."""


class UnfitSGLang(RuntimeError):
    """This SGLang lacks what the backend needs."""


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`. Raises UnfitSGLang, after saying why on stderr."""
    lacks = missing(PLUGIN)
    if lacks:
        raise _unfit(lacks)
    found = sglang_version()
    if found not in TESTED:
        _say(f"SGLang {found or '(unknown version)'} was not tested with pdcluster; tested are {', '.join(TESTED)}")
    if multiprocessing.parent_process() is None:
        os.environ[LAUNCH] = secrets.token_hex(8)
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES, add_disagg_transfer_backend_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME not in DISAGG_TRANSFER_BACKEND_CHOICES:
        add_disagg_transfer_backend_choices([NAME])
    backend()
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", kv_class, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.arg_groups.pd_disaggregation_hook.handle_pd_disaggregation", on_arguments, HookType.AFTER
    )


def backend() -> Any:
    """The member of SGLang's enum, made where it is missing: the enum is closed, and SGLang looks names up in it."""
    from sglang.srt.disaggregation.utils import TransferBackend

    held = TransferBackend._value2member_map_.get(NAME)
    if held is not None:
        return held
    member: Any = object.__new__(TransferBackend)
    member._name_, member._value_ = NAME.upper(), NAME
    member.__objclass__, member._sort_order_ = TransferBackend, len(TransferBackend._member_names_)
    TransferBackend._member_names_.append(member._name_)
    TransferBackend._member_map_[member._name_] = member
    TransferBackend._value2member_map_[NAME] = member
    type.__setattr__(TransferBackend, member._name_, member)
    return member


def kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """The backend's classes; every other backend's, FAKE's too (health, warm-up), and KVARGS are SGLang's."""
    from sglang.srt.disaggregation.utils import KVClassType

    if transfer_backend is not backend() or class_type == KVClassType.KVARGS:
        return original(transfer_backend, class_type)
    _check_transfer()
    if class_type == KVClassType.MANAGER:
        from pdtransfer.engines.sglang.manager import PdclusterKVManager

        return PdclusterKVManager
    if class_type == KVClassType.SENDER:
        from pdtransfer.engines.sglang.sender import PdclusterKVSender

        return PdclusterKVSender
    if class_type == KVClassType.RECEIVER:
        from pdtransfer.engines.sglang.receiver import PdclusterKVReceiver

        return PdclusterKVReceiver
    if class_type == KVClassType.BOOTSTRAP_SERVER:
        from pdtransfer.engines.sglang.bootstrap import PdclusterKVBootstrapServer

        return PdclusterKVBootstrapServer
    return original(transfer_backend, class_type)


@functools.cache
def _check_transfer() -> None:
    """Once a process: classes are asked for with each request."""
    lacks = missing(TRANSFER)
    if lacks:
        raise _unfit(lacks)


def on_arguments(result: Any, server_args: Any) -> None:
    """Once the arguments are known, in the first process (its children inherit the environment): with this backend
    pages of an aborted request are never given away by a timer (30 s in SGLang), only when nothing can land in them."""
    if getattr(server_args, "disaggregation_transfer_backend", None) != NAME:
        return
    if getattr(server_args, "disaggregation_mode", "null") == "null":
        return
    os.environ[RELEASE] = "1"
    os.environ[f"{RELEASE}_TIMEOUT"] = "inf"


def _unfit(lacks: list[str]) -> UnfitSGLang:
    told = f"SGLang {sglang_version()} lacks what pdcluster needs (tested with {', '.join(TESTED)}): " + "; ".join(
        lacks
    )
    _say(told)
    return UnfitSGLang(told)


def _say(what: str) -> None:
    """Before SGLang has set up its logging, and in a form that can not be overlooked."""
    print(f"PDCLUSTER: {what}", file=sys.stderr, flush=True)
    log.error("%s", what)
