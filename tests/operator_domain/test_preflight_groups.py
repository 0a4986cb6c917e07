"""`pdcluster preflight` on what no command line and no server tells: other decode groups (A21), plugins in an
image (H4), and what limits top_logprobs (H12). Expected by hand from the SGLang PD rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from preflight_kit import DECODE, KNOWN, LLAMA, PREFILL, Run, Serve, both, failing, pair, unknown, warned

from pdoperator.cli import main
from real_answers import answer

LIMITED = KNOWN[KNOWN.index("--max-top-logprobs") :]


def lines(*decodes: str, prefill: str = "--tp 2") -> list[str]:
    found = ["--prefill-args", f"{PREFILL} {prefill}"]
    for decode in decodes:
        found += ["--decode-args", f"{DECODE} {decode}"]
    return found


@pytest.fixture
def heads8(tmp_path: Path) -> str:
    """A model with 8 KV heads."""
    file = tmp_path / "heads8.json"
    file.write_text(json.dumps(LLAMA | {"num_key_value_heads": 8}))
    return str(file)


def test_the_second_group_breaks_what_the_first_alone_passes(run: Run, heads8: str) -> None:
    # 8 KV heads, prefill TP 2: 4 heads a rank. Decode TP 1 takes slices of 4 heads, decode TP 4 of 2.
    alone = run(*lines("--tp 1"), "--model-config", heads8, *KNOWN)
    assert alone[0] == 0 and "A21" not in failing(alone[1]) | unknown(alone[1])
    assert "it serves no other decode group than this one" in alone[1]["prefill"]["assumed"]
    code, out = run(*lines("--tp 1", "--tp 4"), "--model-config", heads8, *KNOWN)
    assert code == 1 and "A21" in failing(out)
    found = next(f for f in out["findings"] if f["rule"] == "A21" and f["status"] == "Fail")
    assert found["message"].startswith("pair with decode ")
    assert "4 heads for decode attention TP 1, 2 heads for decode attention TP 4" in found["message"]


def test_groups_are_told_one_by_one_in_text(heads8: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*lines("--tp 1", "--tp 4"), "--model-config", heads8, *KNOWN]
    assert main(["preflight", *argv]) == 1
    said = capsys.readouterr().out
    assert "pair with decode 1: Fail" in said and "pair with decode 2: Fail" in said
    assert "it serves no other decode group than these" in said


def test_a_plugin_that_an_image_may_not_have_is_asked_for_and_checked(run: Run, config: str) -> None:
    efa = [line.replace("python", "SGLANG_DISAGGREGATION_NIXL_BACKEND=LIBFABRIC python") for line in (PREFILL, DECODE)]
    argv = ["--prefill-args", efa[0], "--decode-args", efa[1], "--model-config", config, *KNOWN]
    code, out = run(*argv)
    assert code == 0 and unknown(out) == {"H4"}
    found = next(f for f in out["findings"] if f["rule"] == "H4")
    assert "--nixl-plugins" in found["action"] and "get_plugin_list()" in found["action"]
    code, out = run(*argv, "--nixl-plugins", "UCX,POSIX")
    assert code == 1 and failing(out) == {"H4"}
    code, out = run(*argv, "--nixl-plugins", "UCX, LIBFABRIC")
    assert code == 0 and out["verdict"] == "Pass"


@pytest.mark.parametrize(("stated", "status"), [([], "Unknown"), (["128"], "Pass"), (["129"], "Warn")])
def test_what_limits_top_logprobs_has_to_be_stated(run: Run, config: str, stated: list[str], status: str) -> None:
    known = KNOWN[: KNOWN.index("--max-top-logprobs")]
    more = ["--max-top-logprobs", *stated] if stated else []
    code, out = run(*lines(""), "--model-config", config, *known, *more)
    found = next(f for f in out["findings"] if f["rule"] == "H12")
    assert code == 0 and found["status"] == status
    assert status != "Unknown" or "--max-top-logprobs" in found["action"]


def test_running_servers_do_not_tell_it_either(run: Run, serve: Serve) -> None:
    servers = both(*pair(serve))
    code, out = run(*servers)
    found = next(f for f in out["findings"] if f["rule"] == "H12")
    assert code == 0 and found["status"] == "Unknown" and "--max-top-logprobs" in found["action"]
    _, out = run(*servers, *LIMITED)
    assert "H12" not in unknown(out) | warned(out)
    # They run: the plugin was there.
    assert "H4" not in unknown(out)


def test_one_prefill_server_with_two_decode_servers(run: Run, serve: Serve) -> None:
    prefill, decode = pair(serve)
    other = serve({"/server_info": (200, answer("decode_server_info"))})
    code, out = run(*both(prefill, decode), "--server", other.url, *LIMITED)
    assert code == 0, out
    assert [side["source"] for side in out["decode"]] == [decode.url, other.url]
    assert out["prefill"]["source"] == prefill.url


def test_a_deep_draft_is_read_from_its_folder(run: Run, heads8: str, tmp_path: Path) -> None:
    # C3: decode alone drafts with a model as deep as the target, 4 layers, at unequal TP.
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps(LLAMA))
    speculation = f"--tp 4 --speculative-algorithm STANDALONE --speculative-draft-model-path {tmp_path / 'draft'}"
    code, out = run(*lines(speculation), "--model-config", heads8, *KNOWN)
    assert code == 1 and "C3" in failing(out)
    assert out["decode"]["facts"]["draft_layers"] == 4
    code, out = run(*lines(speculation.replace(str(tmp_path), "/elsewhere")), "--model-config", heads8, *KNOWN)
    assert "C3" in unknown(out)


def test_what_only_a_servers_environment_tells_is_unknown_and_named(run: Run, serve: Serve, config: str) -> None:
    code, out = run(*both(*pair(serve)), "--model-config", config, *LIMITED)
    told = {f["rule"]: f["action"] for f in out["findings"] if f["status"] == "Unknown"}
    variables = {
        "H2": "SGLANG_DISAGGREGATION_NIXL_BACKEND",
        "H8": "SGLANG_HOST_IP",
        "H10": "SGLANG_ENABLE_DISAGG_SAMPLING_MASK",
        "G6": "SGLANG_DISAGG_STAGING_BUFFER",
    }
    assert code == 0
    for rule, variable in variables.items():
        assert told[rule] == f"compare {variable} in the environments of both sides", told
