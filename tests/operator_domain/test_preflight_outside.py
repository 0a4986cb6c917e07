"""`pdcluster preflight` for people without the operator: two command lines, or two running servers.

The servers here answer on loopback what two real SGLang 0.5.23 servers answered (sglang_answers/)."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pdoperator.cli import main
from pdoperator.cli_http import BadURL, get_json, server_url

ANSWERS = Path(__file__).parent / "sglang_answers"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
PREFILL = (
    "python -m sglang.launch_server --model-path m --disaggregation-mode prefill --host 0.0.0.0 "
    "--disaggregation-transfer-backend nixl --page-size 16 --kv-cache-dtype bfloat16"
)
DECODE = PREFILL.replace("prefill", "decode")
KNOWN = ["--engine-version", "0.5.23", "--gpu", "sm90"]


def answer(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((ANSWERS / f"{name}.json").read_text())
    return body


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    return str(file)


Run = Callable[..., tuple[int, Any]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `pdcluster preflight`: (exit code, parsed JSON), or what it says where it can not read the input."""

    def do(*argv: str) -> tuple[int, Any]:
        code = main(["preflight", *argv, "-o", "json"])
        said = capsys.readouterr()
        return code, said.err if code == 2 else json.loads(said.out)

    return do


def failing(out: Any) -> set[str]:
    return {f["rule"] for f in out["findings"] if f["status"] == "Fail"}


def warned(out: Any) -> set[str]:
    return {f["rule"] for f in out["findings"] if f["status"] == "Warn"}


def unknown(out: Any) -> set[str]:
    return {f["rule"] for f in out["findings"] if f["status"] == "Unknown"}


# Two command lines


def test_two_lines_that_fit_exit_0(run: Run, config: str) -> None:
    code, out = run("--prefill-args", PREFILL, "--decode-args", DECODE, "--model-config", config, *KNOWN)
    assert code == 0 and failing(out) == set() and unknown(out) == set(), out["findings"]
    assert out["verdict"] == "Pass"
    assert set(out) == {"verdict", "findings", "prefill", "decode"}
    assert out["decode"]["facts"]["page_size"] == 16
    assert out["decode"]["facts"]["geometry"]["kv_heads"] == 2


@pytest.mark.parametrize(
    "prefill, decode, rule",
    [
        ("--tp 3", "--tp 2", "A3"),
        ("--page-size 64", "", "B1"),
        ("--kv-cache-dtype fp8_e4m3", "", "B3"),
        ("", "--disaggregation-transfer-backend mooncake", "H1"),
        ("", "--host 127.0.0.1", "H5"),
        ("--speculative-algorithm EAGLE --speculative-draft-model-path d", "", "C2"),
        ("", "--pp-size 2", "A8"),
        ("--tp 2", "--enable-hierarchical-cache", "E2"),
    ],
)
def test_lines_that_do_not_fit_exit_1_and_name_the_rule(
    run: Run, config: str, prefill: str, decode: str, rule: str
) -> None:
    args = ("--prefill-args", f"{PREFILL} {prefill}", "--decode-args", f"{DECODE} {decode}")
    code, out = run(*args, "--model-config", config, *KNOWN)
    assert code == 1 and rule in failing(out)


def test_sglangs_default_backend_is_found_by_the_rules(run: Run, config: str) -> None:
    # Neither line names a backend: both run Mooncake, which fits.
    args = [line.replace("--disaggregation-transfer-backend nixl ", "") for line in (PREFILL, DECODE)]
    code, out = run("--prefill-args", args[0], "--decode-args", args[1], "--model-config", config, *KNOWN)
    assert code == 0 and out["prefill"]["facts"]["backend"] == "Mooncake"


def test_a_variable_of_the_line_is_a_fact(run: Run, config: str) -> None:
    line = f"SGLANG_DISAGGREGATION_NIXL_BACKEND=LIBFABRIC {PREFILL}"
    code, out = run("--prefill-args", line, "--decode-args", DECODE, "--model-config", config, *KNOWN)
    assert code == 1 and "H2" in failing(out)


def test_files_hold_command_lines_and_configs(run: Run, config: str, tmp_path: Path) -> None:
    script, settings = tmp_path / "p.sh", tmp_path / "d.yaml"
    script.write_text("#!/bin/bash\nexport TP=2\n" + PREFILL.replace(" --", " \\\n  --") + " --tp $TP\n")
    settings.write_text("tp-size: 2\n")
    args = ("--prefill-args", f"@{script}", "--decode-args", f"{DECODE} --config {settings}")
    code, out = run(*args, "--model-config", config, *KNOWN)
    assert code == 0
    assert [out[r]["facts"]["tensor_parallel"] for r in ("prefill", "decode")] == [2, 2]
    assert out["prefill"]["source"] == str(script)


def test_one_script_that_starts_both_sides_is_read_for_each(run: Run, config: str, tmp_path: Path) -> None:
    script = tmp_path / "both.sh"
    script.write_text(f"export TP=2\n{PREFILL} --tp $TP &\nTP=1\n{DECODE} --tp $TP &\nwait\n")
    args = ("--prefill-args", f"@{script}", "--decode-args", f"@{script}")
    code, out = run(*args, "--model-config", config, *KNOWN)
    assert code == 0
    assert [out[r]["facts"]["tensor_parallel"] for r in ("prefill", "decode")] == [2, 1]
    script.write_text(f"{PREFILL}\n{PREFILL}\n")
    code, said = run(*args)
    assert code == 2 and "it holds 2 commands of SGLang, and 2 of them with --disaggregation-mode prefill" in said


def test_what_is_not_read_is_named(run: Run, config: str) -> None:
    line = f"{PREFILL} --log-level debug --trust-remote-code --future-flag 3 --tp_size 2"
    code, out = run("--prefill-args", line, "--decode-args", DECODE, "--model-config", config, "--gpu", "SM90")
    assert out["prefill"]["notChecked"] == ["--log-level", "--trust-remote-code"]
    found = [f["message"] for f in out["findings"] if f["rule"] == "EngineFlag"]
    assert len(found) == 2 and "not checked: --future-flag" in found[0] and "--tp-size" in found[1]
    # Another version may have such a flag; the version that the rules are from has not.
    assert code == 0 and "EngineFlag" in unknown(out)
    code, out = run("--prefill-args", line, "--decode-args", DECODE, "--model-config", config, *KNOWN)
    assert code == 1 and "EngineFlag" in failing(out)


def test_a_value_that_only_a_plugin_can_bring_is_unknown(run: Run, config: str) -> None:
    args = ("--prefill-args", f"{PREFILL} --attention-backend mine", "--decode-args", DECODE)
    code, out = run(*args, "--model-config", config, *KNOWN)
    (found,) = [f for f in out["findings"] if f["rule"] == "EngineFlag"]
    assert code == 0 and found["status"] == "Unknown" and "--attention-backend mine" in found["message"]


def test_what_sglang_refuses_fails(run: Run) -> None:
    code, out = run("--prefill-args", f"{PREFILL} --tp many", "--decode-args", DECODE.replace("--model-path m ", ""))
    messages = " ".join(f["message"] for f in out["findings"] if f["rule"] == "EngineFlag")
    assert code == 1 and "invalid int value: 'many'" in messages and "decode: --model-path is missing" in messages


def test_swapped_lines_are_told(run: Run) -> None:
    code, out = run("--prefill-args", DECODE, "--decode-args", PREFILL)
    found = [f for f in out["findings"] if f["rule"] == "Role"]
    assert code == 1 and len(found) == 2 and "swap the two command lines" in found[0]["action"]


def test_a_line_without_a_mode_is_told(run: Run) -> None:
    code, out = run("--prefill-args", "--model-path m", "--decode-args", DECODE)
    assert code == 1 and "Role" in failing(out)


def test_one_host_makes_loopback_fine(run: Run, config: str) -> None:
    args = [line.replace("--host 0.0.0.0 ", "") for line in (PREFILL, DECODE)]
    lines = ("--prefill-args", args[0], "--decode-args", args[1], "--model-config", config, *KNOWN)
    assert "H5" in warned(run(*lines)[1])  # on one machine it works, which nobody told
    assert "H5" not in warned(run(*lines, "--same-host")[1])
    mixed = ("--prefill-args", args[0], "--decode-args", DECODE, "--model-config", config, *KNOWN)
    assert "H5" in failing(run(*mixed)[1])


def test_overrides_of_the_model_change_its_geometry(run: Run, config: str) -> None:
    line = PREFILL + """ --json-model-override-args '{"num_hidden_layers": 2}'"""
    code, out = run("--prefill-args", line, "--decode-args", DECODE, "--model-config", config, *KNOWN)
    assert code == 1 and "B7" in failing(out)
    assert out["prefill"]["facts"]["geometry"]["layers"] == 2


def test_a_value_that_only_the_shell_knows_is_named(run: Run, config: str) -> None:
    line = PREFILL.replace("0.0.0.0", "$POD_IP")
    code, out = run("--prefill-args", line, "--decode-args", DECODE, "--model-config", config, *KNOWN)
    assert code == 0 and {"ShellVariable", "H5"} <= unknown(out)
    assert out["prefill"]["facts"].get("host") is None


@pytest.mark.parametrize(
    "prefill, why",
    [
        ("vllm serve m", "it holds no command of SGLang"),
        (f"{PREFILL} --tp $TP", "only its shell knows what"),
        (f"{PREFILL} $MORE", "only its shell knows what"),
        (f"{PREFILL} --disaggregation-mode $ROLE", "only its shell knows what"),
        (f"{PREFILL} --disaggregation-transfer-backend $B", "only its shell knows the value of"),
        (f"{PREFILL} 'x", "a quote does not close"),
        ("@/nonexistent/p.sh", "/nonexistent/p.sh can not be read"),
        (f"{PREFILL} --config /nonexistent/c.yaml", "/nonexistent/c.yaml can not be read"),
        (f"{PREFILL} --config c.json", "SGLang takes files that end in .yaml or .yml"),
        (f"{PREFILL} --config", "--config needs one file"),
    ],
)
def test_a_line_that_can_not_be_read_exits_2_and_says_which(run: Run, prefill: str, why: str) -> None:
    code, said = run("--prefill-args", prefill, "--decode-args", DECODE)
    assert code == 2 and why in said and ("prefill" in said or "/nonexistent/p.sh" in said)


@pytest.mark.parametrize("content, why", [("{", "Expecting"), ("[]", "object"), ("{}", "num_hidden_layers")])
def test_a_model_config_that_can_not_be_read_exits_2(run: Run, tmp_path: Path, content: str, why: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    code, said = run("--prefill-args", PREFILL, "--decode-args", DECODE, "--model-config", str(file))
    assert code == 2 and str(file) in said and why in said


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--prefill-args", "x"],
        ["--server", "h:1"],
        ["-f", "x", "--server", "h:1"],
        ["--server", "a", "--server", "b", "--server", "c"],
    ],
)
def test_half_a_question_is_a_usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["preflight", *argv])
    assert end.value.code == 2 and "needed" in capsys.readouterr().err


def test_the_text_names_rule_action_and_sides(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{PREFILL} --page-size 64 --log-level debug"
    code = main(["preflight", "--prefill-args", line, "--decode-args", DECODE, "--model-config", config, *KNOWN])
    said = capsys.readouterr().out
    assert code == 1 and said.startswith("pair: Fail")
    assert "B1" in said and "no rule of fit reads: --log-level" in said and "backend NIXL" in said


# Two running servers


class Server:
    """A server on loopback with fixed answers: path -> (status, body) or a function that writes what it likes."""

    def __init__(self, pages: dict[str, Any]) -> None:
        self.asked: list[tuple[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                outer.asked.append((self.path, self.headers.get("Authorization", "")))
                page = pages.get(path, (404, b"not found"))
                if callable(page):
                    page(self)
                    return
                status, body = page
                self.send_response(status)
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


Serve = Callable[[dict[str, Any]], Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    made: list[Server] = []

    def start(pages: dict[str, Any]) -> Server:
        made.append(Server(pages))
        return made[-1]

    yield start
    for server in made:
        server.close()


def pair(
    serve: Serve, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, route: Any = None
) -> tuple[Server, Server]:
    """(prefill, decode) servers with the real answers, changed so."""
    bootstrap = serve({"/route": (200, answer("prefill_route")) if route is None else route})
    info = answer("prefill_server_info") | {"disaggregation_bootstrap_port": bootstrap.port} | (prefill or {})
    return serve({"/server_info": (200, info)}), serve(
        {
            "/server_info": (
                200,
                answer("decode_server_info") | {"disaggregation_bootstrap_port": bootstrap.port} | (decode or {}),
            )
        }
    )


def both(*servers: Server) -> list[str]:
    return [word for server in servers for word in ("--server", server.url)]


def test_two_real_servers_fit_in_any_order(run: Run, serve: Serve, config: str) -> None:
    prefill, decode = pair(serve)
    for servers in ((prefill, decode), (decode, prefill)):
        code, out = run(*both(*servers), "--model-config", config)
        assert code == 0 and failing(out) == set(), out["findings"]
        assert out["prefill"]["source"] == prefill.url and out["decode"]["source"] == decode.url
        assert out["prefill"]["facts"]["tensor_parallel"] == 2
        assert out["prefill"]["facts"]["route_registered"] is True
    # What only the environment tells is said not to be known, not taken for granted.
    assert "H2" in unknown(out)


def test_the_bootstrap_server_is_asked_as_decode_asks_it(run: Run, serve: Serve) -> None:
    bootstrap = serve({"/route": (200, answer("prefill_route"))})
    info = answer("prefill_server_info") | {"disaggregation_bootstrap_port": bootstrap.port}
    decode = serve({"/server_info": (200, answer("decode_server_info"))})
    run(*both(serve({"/server_info": (200, info)}), decode))
    assert bootstrap.asked[0][0] == "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"


@pytest.mark.parametrize(
    "decode, rule",
    [
        ({"page_size": 64}, "B1"),
        ({"kv_cache_dtype": "bfloat16"}, "B3"),
        ({"disaggregation_transfer_backend": "mooncake"}, "H1"),
        ({"version": "0.5.22"}, "V1"),
        ({"pp_size": 2}, "A8"),
    ],
)
def test_servers_that_do_not_fit_exit_1(run: Run, serve: Serve, config: str, decode: dict[str, Any], rule: str) -> None:
    code, out = run(*both(*pair(serve, decode=decode)), "--model-config", config)
    assert code == 1 and rule in failing(out)


def test_an_old_server_answers_at_the_old_address(run: Run, serve: Serve) -> None:
    prefill, _ = pair(serve)
    decode = serve({"/get_server_info": (200, answer("decode_server_info"))})
    code, _ = run(*both(prefill, decode))
    assert code == 0 and [path for path, _ in decode.asked] == ["/server_info", "/get_server_info"]


def test_a_route_of_another_server_fails(run: Run, serve: Serve) -> None:
    other = answer("prefill_route") | {"attn_tp_size": 8}
    code, out = run(*both(*pair(serve, route=(200, other))))
    assert code == 1 and "Route" in failing(out)


def test_ranks_that_did_not_register_fail(run: Run, serve: Serve) -> None:
    code, out = run(*both(*pair(serve, route=(503, b"Prefill server not fully registered yet"))))
    assert out["prefill"]["facts"]["route_registered"] is False
    assert code == 1 and "H7" in failing(out)


def test_a_bootstrap_port_that_is_closed_from_here_is_unknown(run: Run, serve: Serve) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refused, and nobody else gets the port meanwhile
        prefill, decode = pair(serve, prefill={"disaggregation_bootstrap_port": taken.getsockname()[1]})
        code, out = run(*both(prefill, decode))
    assert code == 0 and "Route" in unknown(out)
    assert any("connection refused" in f["message"] for f in out["findings"] if f["rule"] == "Route")


def test_an_api_key_goes_to_the_servers_only(run: Run, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDCLUSTER_API_KEY", "secret")
    bootstrap = serve({"/route": (200, answer("prefill_route"))})
    prefill = serve(
        {"/server_info": (200, answer("prefill_server_info") | {"disaggregation_bootstrap_port": bootstrap.port})}
    )
    _, decode = pair(serve)
    run(*both(prefill, decode))
    assert {key for _, key in prefill.asked + decode.asked} == {"Bearer secret"}
    assert {key for _, key in bootstrap.asked} == {""}


def unreadable(serve: Serve, what: str) -> Server:
    pages: dict[str, dict[str, Any]] = {
        "no JSON": {"/server_info": (200, b"<html>")},
        "a list": {"/server_info": (200, [])},
        "another program": {},
        "not P/D": {"/server_info": (200, answer("decode_server_info") | {"disaggregation_mode": "null"})},
        "a field of the wrong type": {"/server_info": (200, answer("decode_server_info") | {"tp_size": "two"})},
        "an error": {"/server_info": (500, b"")},
        "a key": {"/server_info": (401, b"")},
        "a redirect": {"/server_info": (302, b"")},
        "half an answer": {"/server_info": lambda handler: handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Len")},
        "no HTTP": {"/server_info": lambda handler: handler.wfile.write(b"\x00\x01\x02\x03")},
    }
    return serve(pages[what])


@pytest.mark.parametrize(
    "what, why",
    [
        ("no JSON", "its answer is no JSON"),
        ("a list", "it is no JSON object but list"),
        ("another program", "has neither /server_info nor /get_server_info"),
        ("not P/D", "its disaggregation_mode is 'null'"),
        ("a field of the wrong type", "its tp_size is 'two'"),
        ("an error", "HTTP 500"),
        ("a key", "set PDCLUSTER_API_KEY"),
        ("a redirect", "HTTP 302"),
        ("half an answer", "can not be read"),
        ("no HTTP", "can not be read"),
    ],
)
def test_a_server_that_can_not_be_read_exits_2_and_is_named(run: Run, serve: Serve, what: str, why: str) -> None:
    prefill, _ = pair(serve)
    broken = unreadable(serve, what)
    code, said = run(*both(prefill, broken))
    assert code == 2 and broken.url in said and why in said


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_two_servers_of_one_role_exit_2(run: Run, serve: Serve, role: str) -> None:
    servers = [serve({"/server_info": (200, answer(f"{role}_server_info"))}) for _ in range(2)]
    code, said = run(*both(*servers))
    assert code == 2 and f"are both {role} servers" in said


def test_a_server_that_is_not_there_exits_2(run: Run, serve: Serve) -> None:
    prefill, _ = pair(serve)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        code, said = run("--server", prefill.url, "--server", url)
    assert code == 2 and url in said and "connection refused" in said


def test_a_server_that_never_ends_its_answer_exits_2_in_time(run: Run, serve: Serve) -> None:
    ended = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while not ended.wait(0.02):
                handler.wfile.write(b" ")
        except OSError:
            pass

    prefill, _ = pair(serve)
    slow = serve({"/server_info": drip})
    try:
        code, said = run(*both(prefill, slow), "--timeout", "1.5")  # enough for the other one on a slow machine
    finally:
        ended.set()
    # Each byte comes well within the limit: only a limit on the whole answer ends it.
    assert code == 2 and f"{slow.url} can not be read: no answer within 1.5 s" in said


@pytest.mark.parametrize(
    "text", ["ftp://h:1", "http://", "http://h:x", "http://u:p@h", "http://h:1/v1", "http://h?x=1", "http://h:99999"]
)
def test_what_is_no_address_of_a_server_is_refused(text: str) -> None:
    with pytest.raises(BadURL):
        server_url(text)


def test_addresses_are_completed() -> None:
    assert server_url("h:30000") == "http://h:30000"
    assert server_url("https://[::1]:8/") == "https://[::1]:8"


def test_a_password_in_a_url_is_not_repeated() -> None:
    with pytest.raises(BadURL) as error:
        server_url("http://user:hunter2@h:1")
    assert "hunter2" not in str(error.value)


def test_an_answer_without_end_is_cut(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdoperator.cli_http.MAX_BODY", 100)
    server = serve({"/server_info": (200, b" " * 200)})
    assert "is larger" in get_json(server.url + "/server_info", 5.0).problem
