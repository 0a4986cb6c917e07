"""Which engine flags the operator owns.

The operator writes the owned flags itself (from spec fields); in extraArgs they would win or clash, so they
are refused in every spelling the engine's argparse accepts: `--flag value`, `--flag=value`, underscores for
dashes, and abbreviations (argparse takes any unambiguous prefix). A prefix of an owned flag is refused even
where it is ambiguous: argparse would refuse it as well, only later and with the pods already running.

Flags that only tell facts (chunked prefill, speculation, HiCache ...) are allowed and read for the fit check. Names
are those of SGLang 0.5.23 and of Reference, which takes some of them and a few of its own; tests/sglang holds them to
SGLang's parser. A name that one of them does not have is refused as well: the other engine would end with a usage
error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pdtransfer.contract.sglang_cli import meant


@dataclass(frozen=True)
class OwnedFlag:
    """One flag in all its official names. `instead` is the spec field to use, or '' where there is none."""

    names: tuple[str, ...]
    instead: str
    why: str = ""

    @property
    def name(self) -> str:
        """The name that messages use."""
        return self.names[0]

    @property
    def advice(self) -> str:
        """What to do, as a sentence."""
        if self.instead:
            return f"use {self.instead}"
        return f"leave it out: {self.why or 'the operator sets it'}"


OWNED: tuple[OwnedFlag, ...] = (
    OwnedFlag(("--tp-size", "--tensor-parallel-size"), "tensorParallelSize"),
    OwnedFlag(("--pp-size", "--pipeline-parallel-size"), "pipelineParallelSize"),
    OwnedFlag(
        ("--dp-size", "--data-parallel-size"),
        "replicas, or attentionDataParallelSize for data-parallel attention",
    ),
    OwnedFlag(
        ("--attn-dp-size", "--attention-data-parallel-size", "--enable-dp-attention"), "attentionDataParallelSize"
    ),
    OwnedFlag(("--page-size",), "spec.kvCache.pageSize"),
    OwnedFlag(("--kv-cache-dtype",), "spec.kvCache.dtype"),
    OwnedFlag(("--model-path", "--model"), "spec.model.source or spec.model.volume"),
    OwnedFlag(("--revision",), "spec.model.revision"),
    OwnedFlag(("--served-model-name",), "spec.model.servedName"),
    OwnedFlag(("--disaggregation-mode",), "", "it follows from the role"),
    OwnedFlag(("--disaggregation-transfer-backend",), "spec.transfer.backend"),
    OwnedFlag(("--disaggregation-ib-device", "--net-devices"), "spec.transfer.fabric.devices"),
    OwnedFlag(("--disaggregation-bootstrap-port",), "", "the operator sets it and the router relies on it"),
    OwnedFlag(("--host",), "", "engines listen on the pod's address"),
    OwnedFlag(("--port",), "", "the operator sets it and the router relies on it"),
    OwnedFlag(("--nnodes", "--node-rank"), "nodesPerReplica"),
    OwnedFlag(("--dist-init-addr", "--nccl-init-addr"), "", "the operator sets it for each replica"),
    OwnedFlag(("--enable-pd-role-switch",), "", "a pod's role is fixed, the router and peers rely on it"),
    OwnedFlag(
        ("--kv-memory-kind", "--enable-hisparse", "--disaggregation-decode-host-receive-threshold"),
        "spec.decode.hostKV",
    ),
    OwnedFlag(("--kv-strategy", "--kv-digest"), "spec.transfer.strategy and spec.transfer.digest"),
    OwnedFlag(
        ("--kv-staging-mib", "--kv-quarantine-mib"), "spec.transfer.stagingSize and spec.transfer.quarantineSize"
    ),
    OwnedFlag(("--kv-waiting-timeout", "--kv-transfer-timeout", "--drain-timeout"), "spec.transfer.timeouts"),
    OwnedFlag(("--model-revision",), "spec.model.revision"),
    OwnedFlag(("--advertise-host",), "", "engines are reached at the pod's address"),
    OwnedFlag(("--sidecar-socket", "--peers-file", "--peers-dir", "--tls-dir"), "", "the operator wires the pods"),
    OwnedFlag(
        ("--cluster-uid", "--pod-uid", "--pod-name", "--pod-revision", "--incarnation"),
        "",
        "the operator and the engine set the pod's identity",
    ),
    OwnedFlag(("--config",), "", "flags inside a file can't be checked; write them into extraArgs"),
)

_FLAG = re.compile(r"--[A-Za-z][^=\s]*")
_OWNED_BY_NAME = {name: flag for flag in OWNED for name in flag.names}


def flag_name(arg: str) -> str | None:
    """Name part of an argument with dashes for underscores; None when it is a value."""
    found = _FLAG.match(arg.strip())
    return "--" + found[0][2:].replace("_", "-") if found else None


def another_flag(name: str) -> bool:
    """Whether SGLang has a flag of just this name that is not owned: no abbreviation of an owned one then."""
    return meant(name) == (name,) and name not in _OWNED_BY_NAME


def owned_flag(arg: str) -> OwnedFlag | None:
    """The owned flag that `arg` (one element of extraArgs) sets, in whatever spelling; None when it sets none."""
    name = flag_name(arg)
    if name is None or another_flag(name):
        return None
    if name in _OWNED_BY_NAME:
        return _OWNED_BY_NAME[name]
    return next((flag for full, flag in _OWNED_BY_NAME.items() if full.startswith(name)), None)


@dataclass(frozen=True)
class OwnedUse:
    """An owned flag found in extraArgs."""

    index: int
    argument: str
    flag: OwnedFlag

    @property
    def message(self) -> str:
        """For people: which argument, and what to do."""
        return f"{self.argument!r} sets {self.flag.name}, which the operator owns: {self.flag.advice}"


def owned_flags(args: Sequence[str]) -> list[OwnedUse]:
    """Every use of an owned flag in extraArgs, in order."""
    found = ((index, arg, owned_flag(arg)) for index, arg in enumerate(args))
    return [OwnedUse(index, arg, flag) for index, arg, flag in found if flag is not None]
