"""`pdcluster preflight`: exit codes, the JSON shape, and cases that people really ran into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from domain_makers import quickstart

from pdoperator.api.spec import PDClusterSpec
from pdoperator.cli import main
from pdoperator.domain.facts import spec_facts
from pdoperator.domain.preflight import preflight


def write(path: Path, *raws: dict[str, Any]) -> str:
    file = path / "m.yaml"
    file.write_text(
        "\n---\n".join(
            yaml.safe_dump(
                {"apiVersion": "pdcluster.io/v1alpha1", "kind": "PDCluster", "metadata": {"name": f"c{i}"}, "spec": raw}
            )
            for i, raw in enumerate(raws)
        )
    )
    return str(file)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    code = main(["preflight", *argv, "-o", "json"])
    return code, json.loads(capsys.readouterr().out)


def test_json_has_exactly_the_promised_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "-f", write(tmp_path, quickstart()))
    assert code == 0
    assert set(out) == {"verdict", "findings"}
    assert out["verdict"] == "Pass"
    assert all(set(f) == {"rule", "status", "message", "action"} for f in out["findings"])


def test_what_does_not_fit_exits_1_and_names_the_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = quickstart(transfer__backend="NIXL", decode__hostKV={"mode": "HostReceive"})
    code, out = run(capsys, "-f", write(tmp_path, raw))
    assert code == 1 and out["verdict"] == "Fail"
    assert "F3" in [f["rule"] for f in out["findings"] if f["status"] == "Fail"]


def test_several_documents_fail_when_one_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = quickstart(prefill__tensorParallelSize=3)
    code, out = run(capsys, "-f", write(tmp_path, quickstart(), bad))
    assert code == 1 and out["verdict"] == "Fail"
    assert any(f["message"].startswith("c1: ") for f in out["findings"] if f["status"] == "Fail")


@pytest.mark.parametrize("text", [": : :\n  - [", "just text", "kind: Pod\n", ""])
def test_what_is_no_manifest_exits_2(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    assert main(["preflight", "-f", str(file)]) == 2
    assert "can not be read" in capsys.readouterr().err


def test_a_missing_file_exits_2() -> None:
    assert main(["preflight", "-f", "/nonexistent/x.yaml"]) == 2


def test_a_typo_is_an_invalid_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "-f", write(tmp_path, quickstart(kvCache={"pageSise": 16})))
    assert code == 1
    assert out["findings"][0]["rule"] == "InvalidSpec"
    assert "pageSise" in out["findings"][0]["message"]


def test_geometry_is_read_from_a_local_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4,
                "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 128, "head_dim": 16,
                "torch_dtype": "bfloat16",
            }
        )
    )  # fmt: skip
    raw = quickstart(
        model={"source": str(model)},
        engine={"type": "SGLang", "image": "sg:1"},
        transfer__backend="NIXL",
        prefill__tensorParallelSize=8,
        decode__tensorParallelSize=16,
    )
    code, out = run(capsys, "-f", write(tmp_path, raw))
    # 4 KV heads, P = 8 > H and D = 16 > P: the group count rounds to zero (rule A6).
    assert code == 1
    assert "A6" in [f["rule"] for f in out["findings"] if f["status"] == "Fail"]


@pytest.mark.parametrize(
    "argument", ["--tp-size=4", "--tp_size", "--tensor-par", "--page-size", "--host", "--kv_cache_dtype=auto"]
)
def test_owned_flags_are_refused_in_every_spelling(argument: str) -> None:
    raw = quickstart(engine={"type": "SGLang", "image": "sg:1"}, transfer__backend="NIXL")
    spec = PDClusterSpec.model_validate(raw)
    spec = spec.model_copy(update={"decode": spec.decode.model_copy(update={"extra_args": (argument, "1")})})
    failed = [f for f in preflight(spec).findings if f.status == "Fail"]
    assert [f.rule for f in failed][:1] == ["OwnedFlag"], failed


def fails(**changes: Any) -> set[str]:
    spec = PDClusterSpec.model_validate(quickstart(**changes))
    return {f.rule for f in preflight(spec).findings if f.status == "Fail"}


def test_rdma_without_anything_that_brings_an_hca_is_refused_and_tcp_is_warned_about() -> None:
    assert "RDMAWithoutDevices" in fails(transfer__fabric={"type": "RDMA"})
    assert fails() == set()
    warned = preflight(PDClusterSpec.model_validate(quickstart())).of("Warn")
    assert [f.rule for f in warned] == ["TCPFabric"]


def test_sglang_with_our_backend_fits() -> None:
    assert fails(engine={"type": "SGLang", "image": "sg:1"}) == set()
    assert fails(engine={"image": "sg:1"}) == set()  # both fields at their defaults


def test_fields_that_nothing_reads_yet_are_warned_about() -> None:
    spec = PDClusterSpec.model_validate(quickstart(transfer__verification={"intervalSeconds": 30}))
    told = [f.message.partition(" ")[0] for f in preflight(spec).of("Warn") if f.rule == "NoEffectYet"]
    assert told == ["spec.transfer.verification.intervalSeconds"]
    plain = PDClusterSpec.model_validate(quickstart())
    assert "NoEffectYet" not in [f.rule for f in preflight(plain).findings]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"decode__hierarchicalCache": {"ratio": 2}}, "spec.decode.hierarchicalCache"),
        ({"decode__radixCache": True}, "spec.decode.radixCache"),
        ({"decode__retractionBackup": "none"}, "spec.decode.retractionBackup"),
        ({"decode__hostKV": {"mode": "HostReceive", "size": "8G"}}, "spec.decode.hostKV.size"),
        ({"decode__hostKV": {"mode": "HostReceive", "threshold": 0.5}}, "spec.decode.hostKV.threshold"),
    ],
)
def test_what_the_reference_engine_would_pass_over_is_refused(change: dict[str, Any], named: str) -> None:
    spec = PDClusterSpec.model_validate(quickstart(**change))
    (finding,) = [f for f in preflight(spec).findings if f.rule == "ReferenceSetting"]
    assert finding.status == "Fail" and finding.message.startswith(named)
    own = PDClusterSpec.model_validate(
        quickstart(**change, engine={"type": "SGLang", "image": "sg:1"}, transfer__backend="NIXL")
    )
    assert "ReferenceSetting" not in [f.rule for f in preflight(own).findings]


@pytest.mark.parametrize(
    ("field", "value"),
    [("strategy", "Staged"), ("digest", True), ("stagingSize", "32Mi"), ("quarantineSize", "1Gi")],
)
def test_settings_of_our_backend_are_refused_with_another(field: str, value: Any) -> None:
    change = {f"transfer__{field}": value}
    assert "TransferSetting" not in fails(**change)
    assert "TransferSetting" in fails(**change, transfer__backend="NIXL")


def sglang(**changes: Any) -> list[tuple[str, str, str]]:
    """(rule, message, action) of what fails with SGLang and its NIXL backend."""
    raw = quickstart(engine={"type": "SGLang", "image": "sg:1"}, transfer__backend="NIXL", **changes)
    found = preflight(PDClusterSpec.model_validate(raw)).of("Fail")
    return [(f.rule, f.message, f.action) for f in found]


def test_host_pools_that_do_not_fit_the_memory_limit_are_refused_before_the_engine_does() -> None:
    cache = {"size": 30}
    # 2 ranks x 30 GB + 10 GiB = 70.7 GB.
    enough = {"limits": {"memory": "71G"}}
    short = {"limits": {"memory": "70G"}}
    assert sglang(prefill__hierarchicalCache=cache, prefill__resources=enough) == []
    ((rule, message, _),) = sglang(prefill__hierarchicalCache=cache, prefill__resources=short)
    assert rule == "HostMemory"
    assert "30 GB for each of 2 ranks" in message and "70.7 GB" in message and "70.0 GB" in message
    assert sglang(prefill__hierarchicalCache={"ratio": 50}, prefill__resources=short) == []  # not known before
    host = {"mode": "HostReceive", "size": "64Gi"}  # 68 whole GB for one rank
    rules = [rule for rule, *_ in sglang(decode__hostKV=host, decode__resources={"limits": {"memory": "64Gi"}})]
    assert "HostMemory" in rules


def test_a_flag_that_a_field_sets_otherwise_is_refused_in_extra_args() -> None:
    twice = {"decode__hierarchicalCache": {"ratio": 2}, "decode__extraArgs": ["--hicache-ratio=3", "--enable-metrics"]}
    ((rule, message, _),) = sglang(**twice)
    assert rule == "SetTwice" and "--hicache-ratio to 3.0" in message and "2.0" in message
    assert sglang(decode__extraArgs=["--hicache-ratio=3"]) == []


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--chunked-prefill-size", "many"], "--chunked-prefill-size: invalid int value: 'many'"),
        (["--max-running-requests"], "--max-running-requests: expected one argument"),
        (["--hicache-io-backend", "dma"], "--hicache-io-backend: invalid choice: 'dma'"),
        (["--enable-mixed-chunk=true"], "--enable-mixed-chunk: ignored explicit argument 'true'"),
        (["--mem-frac", "0.8", "0.9"], "'0.9' belongs to no flag"),
    ],
)
def test_what_sglangs_parser_refuses_is_refused_before_a_pod_exists(args: list[str], says: str) -> None:
    failed = sglang(decode__extraArgs=args)
    assert [rule for rule, *_ in failed] == ["EngineFlag"]
    assert says in failed[0][1]


def test_a_flag_of_another_version_is_no_reason_to_refuse_unless_the_version_is_known() -> None:
    args = {"decode__extraArgs": ["--flag-of-tomorrow", "7"]}
    assert sglang(**args) == []
    raw = quickstart(engine={"type": "SGLang", "image": "sg:1"}, transfer__backend="NIXL", **args)
    warned = preflight(PDClusterSpec.model_validate(raw)).of("Warn")
    assert any("--flag-of-tomorrow" in f.message for f in warned)
    raw["engine"]["version"] = "0.5.23"
    failed = preflight(PDClusterSpec.model_validate(raw)).of("Fail")
    assert any("--flag-of-tomorrow" in f.message for f in failed)


def test_a_value_that_only_the_pod_knows_is_not_judged() -> None:
    assert sglang(decode__extraArgs=["--max-running-requests", "$(LIMIT)"]) == []
    spec = PDClusterSpec.model_validate(
        quickstart(
            engine={"type": "SGLang", "image": "sg:1"},
            transfer__backend="NIXL",
            decode__env=[{"name": "UCX_NET_DEVICES", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "nic"}}}],
        )
    )
    assert spec_facts(spec)[1].ucx_net_devices is None
    assert spec_facts(spec)[0].ucx_net_devices == ""


def test_a_kv_dtype_that_sglang_does_not_have_names_the_field() -> None:
    ((rule, message, _), *rest) = sglang(kvCache={"pageSize": 16, "dtype": "float32"})
    assert rule == "EngineFlag" and message.startswith(
        "spec.kvCache.dtype: --kv-cache-dtype: invalid choice: 'float32'"
    )
    assert {rule for rule, *_ in rest} <= {"EngineFlag"}  # both roles say so


def test_another_version_than_the_one_that_is_known_is_warned_about() -> None:
    def warned(version: str) -> list[str]:
        raw = quickstart(engine={"type": "SGLang", "image": "sg:1", "version": version}, transfer__backend="NIXL")
        return [f.rule for f in preflight(PDClusterSpec.model_validate(raw)).of("Warn")]

    assert "V2" in warned("0.5.24")
    assert "V2" not in warned("v0.5.23")


def test_a_served_name_that_sglang_does_not_take_is_refused() -> None:
    assert [rule for rule, *_ in sglang(model__servedName="llama:7b")] == ["ServedName"]


@pytest.mark.parametrize(("example", "code"), [("quickstart", 0), ("sglang", 0), ("does-not-fit", 1)])
def test_examples_are_what_their_heads_say(example: str, code: int) -> None:
    file = Path(__file__).parents[2] / "examples" / f"{example}.yaml"
    assert main(["preflight", "-f", str(file)]) == code


def test_several_nodes_per_replica_are_refused_for_now() -> None:
    assert "MultiNode" in fails(prefill__nodesPerReplica=2)


def test_a_spec_without_a_model_is_refused(tmp_path: Path) -> None:
    assert main(["preflight", "-f", write(tmp_path, quickstart(model={"servedName": "x"}))]) == 1


def test_nccl_variables_are_warned_about() -> None:
    spec = PDClusterSpec.model_validate(quickstart(decode__env=[{"name": "NCCL_IB_HCA", "value": "mlx5_0"}]))
    assert "NCCLDoesNotSteer" in [f.rule for f in preflight(spec).of("Warn")]


def test_equal_and_unequal_tp_into_host_memory_fit_with_our_backend() -> None:
    for tp in (1, 2):
        assert fails(prefill__tensorParallelSize=tp, decode__hostKV={"mode": "HostReceive"}) == set()


def test_version_prints_a_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.strip()[0].isdigit()
