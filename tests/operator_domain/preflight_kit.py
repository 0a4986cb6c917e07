"""What tests of `pdcluster preflight` from outside share: command lines, servers on loopback, findings by status."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from real_answers import answer

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
KNOWN = ["--engine-version", "0.5.23", "--gpu", "sm90", "--max-top-logprobs", "20"]


Run = Callable[..., tuple[int, Any]]


def failing(out: Any) -> set[str]:
    return {f["rule"] for f in out["findings"] if f["status"] == "Fail"}


def warned(out: Any) -> set[str]:
    return {f["rule"] for f in out["findings"] if f["status"] == "Warn"}


def unknown(out: Any) -> set[str]:
    return {f["rule"] for f in out["findings"] if f["status"] == "Unknown"}


def refuses_model_config(run: Run, folder: Path, content: str, why: str) -> None:
    """Of two lines that fit, with this as the model's config.json: exit 2, and words that name the file and say why."""
    file = folder / "config.json"
    file.write_text(content)
    code, said = run("--prefill-args", PREFILL, "--decode-args", DECODE, "--model-config", str(file))
    assert code == 2 and str(file) in said and why in said, (code, said)


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
