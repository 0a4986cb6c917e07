"""`pdcluster preflight` reads what containers are started with: manifests, lists of words, Dockerfiles."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from preflight_kit import DECODE, KNOWN, PREFILL, Run, failing, unknown, warned

from pdoperator.cli_containers import commands_in
from pdoperator.cli_output import Unreadable

WORDS = PREFILL.split()
FOLDED = PREFILL.replace(" --", "\n      --")
MANIFESTS = {
    "command and args": f"""\
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      initContainers: [{{name: wait, command: [sleep, "5"]}}]
      containers:
      - name: sidecar
        image: x
        args: [--port, "1"]
      - name: prefill
        command: {json.dumps(WORDS[:3])}
        args: {json.dumps([*WORDS[3:], "--tp", "$(TP)"])}
        env:
        - {{name: TP, value: "2"}}
""",
    "a shell": f"""\
# of a LeaderWorkerSet
kind: LeaderWorkerSet
spec:
  leaderWorkerTemplate:
    workerTemplate:
      spec:
        containers:
        - name: prefill
          command:
          - bash
          - -c
          - |
            set -e
            {PREFILL} \\
              --tp $TP   # as the Service says
          env:
          - name: TP
            value: "2"
        - name: other
          image: x
""",
    "folded": f"spec:\n  containers:\n  - command: [sh, -c]\n    args:\n    - >-\n      {FOLDED}\n      --tp 2\n",
    "a list": "".join(f"- {json.dumps(w)}\n" for w in [*WORDS, "--tp", "2"]),
    "flags only": "".join(f"- {w}\n" for w in [*WORDS[3:], "--tp=2"]),
    "a number": "".join(f"- {w}\n" for w in [*WORDS[3:], "--tp", "2"]),
    "exec form": json.dumps([*WORDS, "--tp", "2"]),
    "a Dockerfile": f"FROM lmsysorg/sglang:v0.5.23\nENV A=1\nCMD {json.dumps([*WORDS, '--tp', '2'])}\n",
    "an entrypoint": f"FROM x\nENTRYPOINT {json.dumps(WORDS[:3])}\nCMD {json.dumps([*WORDS[3:], '--tp', '2'])}\n",
}  # fmt: skip


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_container_is_read_as_it_is_started(run: Run, config: str, tmp_path: Path, what: str) -> None:
    file = tmp_path / "prefill.yaml"
    file.write_text(MANIFESTS[what])
    lines = ("--prefill-args", f"@{file}", "--decode-args", f"{DECODE} --tp 2", "--model-config", config, *KNOWN)
    code, out = run(*lines)
    assert code == 0 and failing(out) == unknown(out) == warned(out) == set(), out["findings"]
    assert out["prefill"]["facts"]["tensor_parallel"] == 2


def test_both_roles_of_one_manifest_are_told_apart(run: Run, config: str, tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    documents = [
        {"kind": "Pod", "spec": {"containers": [{"name": "e", "command": line.split()}]}}
        for line in (PREFILL, DECODE + " --tp 2")
    ]
    file.write_text("\n---\n".join(json.dumps(d) for d in documents))
    code, out = run("--prefill-args", f"@{file}", "--decode-args", f"@{file}", "--model-config", config, *KNOWN)
    assert code == 0
    assert [out[r]["facts"]["tensor_parallel"] for r in ("prefill", "decode")] == [1, 2]


def test_what_only_the_cluster_knows_is_unknown(run: Run, config: str) -> None:
    host = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    words = PREFILL.replace("0.0.0.0", "$(POD_IP)").split()
    manifest = json.dumps({"spec": {"containers": [{"command": words, "env": [host]}]}})
    code, out = run("--prefill-args", manifest, "--decode-args", DECODE, "--model-config", config, *KNOWN)
    assert code == 0 and {"ShellVariable", "H5"} <= unknown(out)


def test_an_environment_of_the_container_is_the_engines(run: Run, config: str) -> None:
    env = [{"name": "SGLANG_DISAGGREGATION_NIXL_BACKEND", "value": "LIBFABRIC"}]
    for command in (WORDS, ["bash", "-c", PREFILL]):
        manifest = json.dumps({"containers": [{"command": command, "env": env}]})
        code, out = run("--prefill-args", manifest, "--decode-args", DECODE, "--model-config", config, *KNOWN)
        assert code == 1 and "H2" in failing(out)


@pytest.mark.parametrize(
    "text, why",
    [
        ("kind: Pod\nspec: {containers: [{command: [sleep]}]}", "no manifest with a container that starts SGLang"),
        ("kind: Pod", "no manifest"),
        ("- a\n- {b: c}\n", "no list of words"),
        ("spec: {containers: [{name: e, command: [python, [x]]}]}", "command of container e is no list of words"),
        ("kind: {{ .Values.kind }}\n", "it is not YAML"),
        ("[1, 2", "it is not YAML"),
        ("\n \n" * 20_000 + "- x: 1", "no manifest"),
    ],
)
def test_yaml_without_an_engine_is_refused_by_name(text: str, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        commands_in(text)


def nodes(*hosts: str, more: str = "") -> str:
    return "\n".join(
        f"{PREFILL.replace('0.0.0.0', host)} --tp 16 --nnodes 2 --node-rank {rank} --dist-init-addr a:1 {more * rank}"
        for rank, host in enumerate(hosts)
    )


def test_one_engine_on_several_nodes_is_one_command(run: Run, config: str) -> None:
    lines = ("--decode-args", f"{DECODE} --tp 16", "--model-config", config, *KNOWN)
    code, out = run("--prefill-args", nodes("10.0.0.1", "10.0.0.2"), *lines)
    assert code == 0 and out["prefill"]["facts"]["host"] == "10.0.0.1"
    # Nodes that differ in what matters are no one engine.
    code, said = run("--prefill-args", nodes("10.0.0.1", "10.0.0.2", more="--page-size 64"), *lines)
    assert code == 2 and "2 of them with --disaggregation-mode prefill" in said


def test_blank_lines_before_a_script_take_no_time() -> None:
    began = time.process_time()
    assert len(commands_in(" \n#\n" * 20_000 + PREFILL)) == 1
    assert time.process_time() - began < 10
