"""H4, H12 and A21 in the operator. H4: a plugin that the image does not have is refused before a pod is launched with
it, as far as ranks that run that image told."""

from __future__ import annotations

from typing import Any

import pytest

from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.images import plugins_seen
from pdoperator.domain.observed import ClusterObject, Observed, PodAnswer, PodSeen, StoredSpec
from pdoperator.domain.preflight import Finding, preflight
from pdoperator.domain.revision import role_revision
from pdtransfer.contract.base import EngineType, Role
from pdtransfer.contract.card import EngineFacts, PodCards, RankCard
from pdtransfer.contract.fingerprint import ModelIdentity
from pdtransfer.contract.layout import RankLayout

IMAGE = "lmsysorg/sglang:v0.5.23"
NIXL_1_5 = ("LIBFABRIC", "POSIX", "UCX")


def raw(plugin: str, image: str = IMAGE, backend: str = "NIXL") -> dict[str, Any]:
    return {
        "model": {"source": "m"},
        "engine": {"image": image},
        "transfer": {"backend": backend, "plugin": {"name": plugin}},
    }


def pod(uid: str, revision: str) -> PodSeen:
    return PodSeen(
        uid, uid, "decode", 0, revision, 0, "Running", False, "n", "10.0.0.1", True, True, True, "", "True", 0.0, 0.0
    )


def answer(uid: str, plugins: tuple[str, ...]) -> PodAnswer:
    card = RankCard(
        cluster_uid="c",
        pod_uid=uid,
        role=Role.DECODE,
        incarnation="i",
        model=ModelIdentity(name="m", revision="", dtype="bfloat16", layers=1),
        layout=RankLayout(page_tokens=16, kv_dtype="bfloat16"),
        engine=EngineFacts(type=EngineType.SGLANG, version="0.5.23", nixl_plugins=plugins),
        agent_name="a",
    )
    return PodAnswer(cards=PodCards(cluster_uid="c", pod_uid=uid, role=Role.DECODE, expected_ranks=1, cards=(card,)))


def look(wanted: dict[str, Any], ran: dict[str, Any], plugins: tuple[str, ...]) -> Observed:
    """The spec was changed from `ran` to `wanted`; the pods of `ran` still run and tell `plugins`."""
    spec = PDClusterSpec.model_validate(wanted)
    old = pod("old", role_revision(PDClusterSpec.model_validate(ran), Role.DECODE))
    return Observed(
        now=1.0,
        cluster=ClusterObject("a", "ns", "c", 2, wanted, spec),
        pods=(old,),
        answers={"old": answer("old", plugins)},
        stored=(StoredSpec("broken", 2, {"model": 5}), StoredSpec("one", 1, ran)),
    )


def h4(observed: Observed) -> Finding:
    assert observed.cluster.spec is not None
    found = preflight(observed.cluster.spec, plugins=plugins_seen(observed))
    return next(f for f in found.findings if f.rule == "H4")


@pytest.mark.parametrize(("plugin", "status"), [("LIBFABRIC", "Pass"), ("UCX", "Pass"), ("MOON", "Fail")])
def test_ranks_that_run_the_image_tell_what_it_has(plugin: str, status: str) -> None:
    finding = h4(look(raw(plugin), raw("UCX", backend="PDCluster"), NIXL_1_5))
    assert finding.status == status
    assert status == "Pass" or "its image has LIBFABRIC, POSIX, UCX" in finding.message


def test_what_nobody_told_of_this_image_is_unknown() -> None:
    other = look(raw("LIBFABRIC", image="registry.example/sglang:1"), raw("UCX", backend="PDCluster"), NIXL_1_5)
    silent = look(raw("LIBFABRIC"), raw("UCX", backend="PDCluster"), ())
    for observed in (other, silent):
        finding = h4(observed)
        assert finding.status == "Unknown" and "get_plugin_list()" in finding.action


@pytest.mark.parametrize(
    ("router", "status"),
    [({}, "Warn"), ({"maxTopLogprobs": 20}, "Pass"), ({"maxTopLogprobs": 129}, "Warn"), ({"type": "None"}, "Unknown")],
)
def test_top_logprobs_are_limited_by_what_the_spec_says_and_not_by_the_router(
    router: dict[str, Any], status: str
) -> None:
    """H12. SMG 0.3.2 passes any number on in /v1/completions and /generate."""
    found = preflight(PDClusterSpec.model_validate(raw("UCX") | {"router": router}))
    assert next(f for f in found.findings if f.rule == "H12").status == status


@pytest.mark.parametrize(("router", "status"), [({}, "Pass"), ({"type": "None"}, "Unknown")])
def test_which_decodes_a_prefill_serves_is_known_where_the_operator_routes(router: dict[str, Any], status: str) -> None:
    """A21. With SGLang's own backends the operator's router pairs pods of one revision only."""
    shape = {"attention": "GQA", "layers": 4, "kvHeads": 8, "headDim": 64}
    spec = raw("UCX") | {"router": router, "prefill": {"tensorParallelSize": 2}}
    spec["model"]["geometry"] = shape
    found = preflight(PDClusterSpec.model_validate(spec))
    assert next(f for f in found.findings if f.rule == "A21").status == status
