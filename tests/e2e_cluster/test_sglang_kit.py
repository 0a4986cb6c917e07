"""The manifest of the suite with real SGLang, before any cluster exists."""

from __future__ import annotations

import pytest

from e2e.kit import sglang
from e2e.kit.cluster import Target
from e2e.kit.kubectl import Kubectl
from e2e.kit.shell import CommandFailed
from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.preflight import preflight

EMBEDDED = Target(Kubectl("kubectl", "config"), "helm", "pdcluster.local/pdcluster:dev", embedded=True)
OWN = Target(Kubectl("kubectl", "config"), "helm", "registry/pdcluster:1", embedded=False)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_it_fits_with_sglangs_version_known_from_the_image(prefill: int, decode: int) -> None:
    made = sglang.manifest(EMBEDDED, "a", prefill_tp=prefill, decode_tp=decode)
    found = preflight(PDClusterSpec.model_validate(made["spec"]))
    assert [f.text for f in found.findings if f.status in ("Fail", "Unknown")] == []


def test_the_image_has_nothing_that_ties_sglang_to_loopback() -> None:
    names = {e["name"]: e["value"] for e in sglang.cpu_env()}
    assert names["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "127.0.0.1" not in names.values() and "lo" not in names.values()


def test_on_your_own_cluster_sglangs_image_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDCLUSTER_SGLANG_IMAGE", raising=False)
    with pytest.raises(CommandFailed, match="PDCLUSTER_SGLANG_IMAGE"):
        sglang.image(OWN)
    monkeypatch.setenv("PDCLUSTER_SGLANG_IMAGE", "lmsysorg/sglang:v0.5.23-xeon")
    assert sglang.image(OWN) == "lmsysorg/sglang:v0.5.23-xeon"
