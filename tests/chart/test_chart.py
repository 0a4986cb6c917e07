"""The Helm chart: what it grants, how the operator's pod is confined, and which values it refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdoperator import settings as operator_settings
from pdoperator.api import crd
from pdoperator.kube import verbs

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "pdcluster"


def _helm() -> str | None:
    cache = Path(os.environ.get("PDCLUSTER_CACHE") or Path.home() / ".cache" / "pdcluster")
    found = sorted(cache.glob("tools/*/bin/helm"), key=lambda path: path.stat().st_mtime)
    return str(found[-1]) if found else shutil.which("helm")


HELM = _helm()
needs_helm = pytest.mark.skipif(HELM is None, reason="helm not built: run `make tools` once")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(HELM), *arguments], capture_output=True, text=True, timeout=60, check=False)


def render(*settings: str, namespace: str = "pd") -> list[dict[str, Any]]:
    options = [part for setting in settings for part in ("--set", setting)]
    done = helm("template", "pdcluster", str(CHART), "--namespace", namespace, *options)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def of(kind: str, documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] == kind]


def granted(role: dict[str, Any]) -> set[tuple[str, str, str]]:
    """(group, resource, verb) of a role."""
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(rules: tuple[verbs.Rule, ...]) -> set[tuple[str, str, str]]:
    return {(rule.group, rule.resource, verb) for rule in rules for verb in rule.verbs}


NODES = {("", "nodes", "list")}


def test_the_charts_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (project, project)


def test_no_image_names_a_registry() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for image in (values["image"]["repository"], values["defaults"]["routerImage"]):
        assert "." not in image.split("/")[0]


def test_the_values_schema_is_closed_at_every_level_and_knows_every_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def objects(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(node, dict):
            if "properties" in node:
                yield path, node
            for key, inner in node.items():
                yield from objects(inner, f"{path}.{key}")

    for path, node in objects(schema, ""):
        assert node.get("additionalProperties") is False, path

    def keys(values: dict[str, Any], node: dict[str, Any]) -> None:
        for key, value in values.items():
            if "properties" not in node:
                return
            assert key in node["properties"]
            if isinstance(value, dict):
                keys(value, node["properties"][key])

    keys(yaml.safe_load((CHART / "values.yaml").read_text()), schema)


@needs_helm
def test_lint_is_clean() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_helm
@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("imge.tag=x", "imge"),
        ("image.tagg=x", "tagg"),
        ("rbac.node=true", "node"),
        ("logLevel=LOUD", "logLevel"),
        ("watchNamespaces={A_B}", "watchNamespaces"),
    ],
)
def test_unknown_keys_and_values_are_refused(setting: str, says: str) -> None:
    done = helm("template", "r", str(CHART), "--set", setting)
    assert done.returncode != 0 and says in done.stderr


@needs_helm
def test_verbs_granted_are_verbs_used() -> None:
    documents = render()
    roles = {role["metadata"]["name"]: role for role in of("ClusterRole", documents)}
    assert granted(roles["pd-pdcluster"]) == used(verbs.CLUSTER_RULES)
    (own,) = of("Role", documents)
    assert own["metadata"]["namespace"] == "pd"
    assert granted(own) == used(verbs.OWN_NAMESPACE_RULES)


@needs_helm
def test_optional_rights_can_be_left_out() -> None:
    documents = render("rbac.nodes=false", "rbac.podEvents=false", "rbac.aggregate=false")
    (role,) = of("ClusterRole", documents)
    required = tuple(rule for rule in verbs.CLUSTER_RULES if not rule.optional)
    assert granted(role) == used(required)


@needs_helm
def test_watching_some_namespaces_takes_no_rights_in_others() -> None:
    documents = render("watchNamespaces={team-a,team-b}", "rbac.aggregate=false")
    (cluster,) = of("ClusterRole", documents)
    assert granted(cluster) == NODES
    roles = {role["metadata"]["namespace"]: role for role in of("Role", documents)}
    assert set(roles) == {"team-a", "team-b", "pd"}
    for name in ("team-a", "team-b"):
        assert granted(roles[name]) == used(verbs.CLUSTER_RULES) - NODES
    assert of("ClusterRole", render("watchNamespaces={a}", "rbac.aggregate=false", "rbac.nodes=false")) == []
    env = _environment(documents)
    assert env["WATCH_NAMESPACES"] == "team-a,team-b"


@needs_helm
def test_watching_the_operators_own_namespace_makes_two_roles_with_two_names() -> None:
    roles = of("Role", render("watchNamespaces={pd}"))
    assert len({role["metadata"]["name"] for role in roles}) == len(roles) == 2


@needs_helm
@pytest.mark.parametrize("settings", [(), ("watchNamespaces={a}",)])
def test_no_right_is_a_wildcard_and_secrets_of_users_are_never_read(settings: tuple[str, ...]) -> None:
    documents = render(*settings)
    for role in of("ClusterRole", documents) + of("Role", documents):
        rights = granted(role)
        assert not any("*" in part for right in rights for part in right)
        assert not any(verb in {"escalate", "bind", "impersonate"} for _, _, verb in rights)
        assert not any(resource in {"pods/exec", "pods/attach"} for _, resource, _ in rights)
        if not role["metadata"]["name"].endswith("-own"):
            assert {verb for _, resource, verb in rights if resource == "secrets"} <= {"create", "patch"}


def _operator(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (deployment,) = of("Deployment", documents)
    result: dict[str, Any] = deployment
    return result


def _environment(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (container,) = _operator(documents)["spec"]["template"]["spec"]["containers"]
    return {entry["name"]: entry.get("value") for entry in container["env"]}


@needs_helm
def test_the_operators_pod_passes_the_restricted_pod_security_standard() -> None:
    deployment = _operator(render())
    assert deployment["metadata"]["name"] == "pdcluster-operator"
    assert deployment["spec"]["replicas"] == 1 and deployment["spec"]["strategy"] == {"type": "Recreate"}
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/tmp"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": "health"}
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {
        "health": 8080,
        "metrics": 8081,
    }


@needs_helm
def test_engine_pods_get_the_operators_image_unless_told_otherwise() -> None:
    env = _environment(render("image.repository=r/p", "image.tag=1"))
    assert env["DEFAULT_TRANSFER_IMAGE"] == "r/p:1"
    env = _environment(render("defaults.transferImage=t:2", "defaults.routerImage=s:3"))
    assert (env["DEFAULT_TRANSFER_IMAGE"], env["DEFAULT_ROUTER_IMAGE"]) == ("t:2", "s:3")


@needs_helm
def test_the_operator_understands_the_environment_that_the_chart_sets() -> None:
    documents = render("watchNamespaces={a,b}", "networkPolicies=false", "logFormat=json", "image.tag=1")
    env = {name: value for name, value in _environment(documents).items() if value is not None}
    settings = operator_settings.parse([], env)
    assert settings.watch_namespaces == ("a", "b")
    assert settings.network_policy is False and settings.disruption_budgets is True
    assert settings.transfer_image == "pdcluster/pdcluster:1"
    assert (settings.image_pull_policy, settings.log_format) == ("IfNotPresent", "json")
    container = _operator(documents)["spec"]["template"]["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert settings.health_address.endswith(f":{ports['health']}")
    assert settings.metrics_port == ports["metrics"]


@needs_helm
def test_the_crd_is_the_generated_one_and_survives_uninstall() -> None:
    (rendered,) = of("CustomResourceDefinition", render())
    assert rendered["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert rendered["spec"] == crd.build()["spec"]
    assert of("CustomResourceDefinition", render("crd.install=false")) == []


@needs_helm
def test_two_releases_share_no_cluster_scoped_name() -> None:
    names = [
        {(d["kind"], d["metadata"]["name"]) for d in render(namespace=namespace) if d["kind"].startswith("ClusterRole")}
        for namespace in ("one", "two")
    ]
    assert names[0] and not names[0] & names[1]


@needs_helm
def test_a_kubernetes_without_native_sidecars_is_refused() -> None:
    assert helm("template", "r", str(CHART), "--kube-version", "v1.29.9").returncode != 0
    assert helm("template", "r", str(CHART), "--kube-version", "v1.30.0-gke.1").returncode == 0
