"""No rule may wait for a fact that nobody tells: each attribute of RoleFacts comes from a command line, a variable, a
server's answer, a rank's card, a spec, what the user of preflight states, or what the engine chooses.

Every source is run, on inputs that give everything it reads; a default alone is no source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.facts import role_facts, spec_facts
from pdoperator.domain.preflight_outside import Side, Stated, check_group
from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Backend, EngineType, MemoryKind, Role
from pdtransfer.contract.card import EngineFacts, RankCard
from pdtransfer.contract.compat import RULES
from pdtransfer.contract.compat.observed import facts_from_cards
from pdtransfer.contract.effective import effective
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.fingerprint import ModelIdentity
from pdtransfer.contract.geometry import AttentionKind, ModelGeometry
from pdtransfer.contract.layout import HeadSlice, RankLayout, Region, RegionKind
from pdtransfer.contract.sglang_cli import BY_DEST, command_facts, is_read, read_flags, server_facts
from pdtransfer.contract.sglang_cli.facts import ENVIRONMENT
from pdtransfer.contract.sglang_cli.flags import PLACEMENT
from pdtransfer.contract.sglang_cli.kinds import Kind
from real_answers import answer

FIELDS = frozenset(RoleFacts.model_fields)
BASE = ["--model-path", "m", "--disaggregation-transfer-backend", "nixl"]
GQA = ModelGeometry(attention=AttentionKind.GQA, layers=4, kv_heads=2, head_dim=16, architecture="LlamaForCausalLM")
ROLES = tuple(Role)


def differing(one: RoleFacts, other: RoleFacts) -> set[str]:
    return {name for name in FIELDS if getattr(one, name) != getattr(other, name)}


def sample(dest: str) -> list[str]:
    """Arguments that give this setting a value that is not its default."""
    flag = BY_DEST[dest]
    if not flag.kind.takes_value:
        return [flag.name]
    told = next((c for c in flag.choices if c != flag.default), None)
    if told is None:
        told = {Kind.FLOAT: "0.5", Kind.TEXT: "text"}.get(flag.kind, "7")
    return [flag.name, told]


def of_lines() -> Iterator[set[str]]:
    for role in ROLES:
        plain = command_facts(role, read_flags(BASE), {}).facts
        for dest in BY_DEST:
            if (is_read(dest) or dest in PLACEMENT) and dest not in ("config", "disaggregation_mode"):
                yield differing(plain, command_facts(role, read_flags([*BASE, *sample(dest)]), {}).facts)
        tcp = read_flags([*BASE, "--disaggregation-transfer-backend", "mooncake_tcp"])
        yield differing(plain, command_facts(role, tcp, {}).facts)
        yield differing(plain, command_facts(role, read_flags(BASE), {}, geometry=GQA, engine_version="0.5.23").facts)
        yield differing(plain, command_facts(role, read_flags(BASE), {}, accelerator=Accelerator.SM90).facts)
        yield {"role", "whole_command"}


def of_variables() -> Iterator[set[str]]:
    plain = command_facts(Role.DECODE, read_flags(BASE), {}).facts
    others = ("SGLANG_HOST_IP", "SGLANG_MAMBA_SSM_DTYPE", "SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS")
    for name in (*ENVIRONMENT, *others):
        kind = ENVIRONMENT.get(name, ("", str))[1]
        value = "1" if kind is bool else "7"
        yield differing(plain, command_facts(Role.DECODE, read_flags(BASE), {name: value}).facts)


def of_servers() -> Iterator[set[str]]:
    for role in ROLES:
        bare = {"disaggregation_mode": role.value, "disaggregation_transfer_backend": "nixl"}
        told = server_facts(answer(f"{role.value}_server_info"), geometry=GQA, route_registered=True).facts
        yield differing(server_facts(bare).facts, told)


def of_cards() -> Iterator[set[str]]:
    def region(layer: int, **more: Any) -> Region:
        return Region(layer=layer, kind=RegionKind.KEY, item_bytes=16 * 2 * 16 * 2, items=8, **more)

    card = RankCard(
        cluster_uid="c",
        pod_uid="p",
        role=Role.DECODE,
        incarnation="i",
        model=ModelIdentity(name="m", revision="r", dtype="bfloat16", layers=2, total_kv_heads=2, head_dim=16),
        layout=RankLayout(
            page_tokens=16,
            kv_dtype="bfloat16",
            heads=HeadSlice(first=0, count=2, total=2),
            regions=(region(0, memory=MemoryKind.DRAM), region(1), region(0, memory=MemoryKind.DRAM, draft=True)),
        ),
        engine=EngineFacts(
            type=EngineType.SGLANG,
            version="0.5.23",
            backend=Backend.NIXL,
            nixl_plugin="LIBFABRIC",
            nixl_plugins=("LIBFABRIC", "UCX"),
            speculative_algorithm="EAGLE",
            max_total_tokens=128,
            settings=(("page_size", 16),),
        ),
        agent_name="a",
    )
    asked = RoleFacts(role=Role.DECODE, page_size=8)
    yield differing(asked, facts_from_cards([card], asked))


def of_specs() -> Iterator[set[str]]:
    raw = {
        "model": {"source": "m"},
        "engine": {"image": "lmsysorg/sglang:v0.5.23"},
        "transfer": {"backend": "NIXL"},
        "prefill": {"resources": {"limits": {"memory": "64Gi"}}},
    }
    spec = PDClusterSpec.model_validate(raw)
    flags = command_facts(Role.PREFILL, read_flags(BASE), {}).facts
    told = {"host_memory", "decode_tp_sizes", "max_top_logprobs"}
    yield differing(flags, spec_facts(spec)[0]) & told
    reference = PDClusterSpec.model_validate(raw | {"engine": {"image": "r", "type": "Reference"}})
    yield differing(flags, role_facts(reference, Role.PREFILL)) & {"engine"}


def of_users() -> Iterator[set[str]]:
    facts = [RoleFacts(role=role) for role in ROLES]
    stated = check_group(Side(facts[0], ""), [Side(facts[1], "")], Stated(20, frozenset({"UCX"})))
    yield differing(facts[0], stated[0].sides[0].facts)


def of_engine() -> Iterator[set[str]]:
    asked = command_facts(Role.DECODE, read_flags(BASE), {}, geometry=GQA, accelerator=Accelerator.SM90).facts
    yield differing(asked, effective(asked).facts) & {"retraction_backup_chosen"}


SOURCES = {
    "command lines": of_lines,
    "variables": of_variables,
    "servers": of_servers,
    "cards": of_cards,
    "specs": of_specs,
    "users": of_users,
    "the engine": of_engine,
}


def test_every_fact_has_a_source() -> None:
    told = {name: set().union(*source()) for name, source in SOURCES.items()}
    assert FIELDS - set().union(*told.values()) == set()


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_every_source_tells_something(name: str) -> None:
    assert set().union(*SOURCES[name]())


def test_an_orphan_would_be_seen() -> None:
    assert "kv_checksum" not in set().union(*of_cards(), *of_users(), *of_variables())


def test_rules_need_only_facts_that_there_are() -> None:
    needs = {name for rule in RULES for name in rule.needs}
    assert needs - FIELDS == set()
