"""`pdcluster preflight` on two running servers, for people without the operator.

The servers here answer on loopback what two real SGLang 0.5.23 servers answered (sglang_answers/)."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from preflight_kit import Run, Serve, Server, both, failing, pair, unknown

from pdoperator.cli_http import BadURL, get_json, server_url
from real_answers import answer


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
    assert code == 2 and said.count(f"is a {role} server") == 2


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
        code, said = run(*both(prefill, slow), "--timeout", "4")  # enough for the other one on a slow machine
    finally:
        ended.set()
    # Each byte comes well within the limit: only a limit on the whole answer ends it.
    assert code == 2 and f"{slow.url} can not be read: no answer within 4 s" in said


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
    assert "is larger" in get_json(server.url + "/server_info", 60.0).problem
