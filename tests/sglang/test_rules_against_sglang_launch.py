"""What stops an SGLang server at its start: SGLang's own resolution of a command line, beside our rules' word START.

Each case is one server of a pair, on a machine described to SGLang; the other side has no flag of its own. The command
line goes through our own reader (contract.sglang_cli), so that flags, facts and rules are held to SGLang together.
"""

from __future__ import annotations

from typing import Any

import pytest
from kit_abcd_servers import SERVERS, D, P, Server
from kit_settings import as_facts, ask

from pdtransfer.contract.compat import Status, check
from pdtransfer.contract.facts import RoleFacts


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """What SGLang makes of each server: `error`, or `values` of the settings asked for."""
    told = ask([s.case for s in SERVERS], ["disaggregation_mode"], check=True)
    return [told[s.case.id] for s in SERVERS]


@pytest.fixture
def refusals(answers: list[dict[str, Any]]) -> list[str]:
    """For each server why SGLang refuses it, '' where it does not."""
    return [answer.get("error", "") for answer in answers]


def facts(server: Server) -> RoleFacts:
    """The server as facts, by our own reader of command lines."""
    return as_facts(server.case).model_copy(update={"model_name": "m", "backend": server.backend})


def starts(server: Server) -> list[str]:
    """Rules that say SGLang refuses to start this server."""
    # Dense kernels, since the other side is of the same model and must not be what is refused.
    plain = Server("none", server.role.other, "--attention-backend fa3", backend=server.backend)
    sides = {server.role: facts(server), server.role.other: facts(plain)}
    geometry = sides[server.role].geometry
    sides = {role: f.model_copy(update={"geometry": geometry}) for role, f in sides.items()}
    report = check(sides[P], sides[D], server.backend)
    return [f.rule for f in report.of(Status.FAIL) if f.severity == "START"]


def test_what_sglang_refuses_to_start_the_rules_refuse(refusals: list[str]) -> None:
    wrong = []
    for server, theirs in zip(SERVERS, refusals, strict=True):
        ours = starts(server)
        if bool(ours) != bool(theirs):
            wrong.append((server, ours, theirs))
    assert wrong == []


def test_each_refusal_is_the_rule_it_was_made_for(refusals: list[str]) -> None:
    missed = [
        (server, starts(server))
        for server, theirs in zip(SERVERS, refusals, strict=True)
        if theirs and server.rule not in starts(server)
    ]
    assert missed == []
    assert {s.rule for s, why in zip(SERVERS, refusals, strict=True) if why} >= {
        "A2", "A11", "A14", "A16", "A18", "A19", "A20", "B12", "C7", "C8", "D6", "D7",
    }  # fmt: skip


def test_a_plain_server_of_every_model_starts(refusals: list[str]) -> None:
    assert [why for s, why in zip(SERVERS, refusals, strict=True) if s.rule == "none" and why] == []


def test_a_diffusion_model_is_served_without_disaggregation(answers: list[dict[str, Any]]) -> None:
    """D7's other half: SGLang says nothing and switches the mode off."""
    modes = [
        a["values"]["disaggregation_mode"] for s, a in zip(SERVERS, answers, strict=True) if s.model == "diffusion"
    ]
    assert modes == ["null", "null"]
    sides = [facts(s) for s in SERVERS if s.model == "diffusion"]
    finding = check(*sides).finding("D7")
    assert finding is not None and (finding.status, finding.severity) == (Status.WARN, "NORM")
