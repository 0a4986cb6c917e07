"""Everything that reads bytes which another process wrote, as functions that may only take or refuse them.

`run(data)` returns a short word for what happened (a new word keeps its input in the corpus); any exception is a
finding. `corpus` are valid inputs, made by the package's own models, so that they follow the contract.
"""

from __future__ import annotations

import json
from typing import Any

from fuzz_frames import FRAMES, channel, frame, live_peer, stream
from fuzz_sidecar import (
    MINE,
    call,
    control_api,
    full_card,
    link_lines,
    measured,
    pod_answers,
    rank_card,
    rank_lines,
    rank_metrics,
    roster_body,
)
from fuzz_target import Target, text
from sidecar_kit import CLUSTER, POD, card, peer, roster, verdict

from pdtransfer.contract.base import Role
from pdtransfer.contract.card import PodCards
from pdtransfer.contract.geometry import GeometryError
from pdtransfer.contract.hf_config import read_geometry
from pdtransfer.contract.link import Drain, Heartbeat, Hello, Peers, Probe, Refuse, Verdicts
from pdtransfer.contract.roster import RosterRefusal
from pdtransfer.contract.verdict import PodVerdicts

CONFIGS: tuple[dict[str, Any], ...] = (
    {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
     "num_key_value_heads": 8, "torch_dtype": "bfloat16", "max_position_embeddings": 8192},
    {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
     "num_attention_heads": 128, "index_head_dim": 128, "dtype": "bfloat16"},
    {"text_config": {"model_type": "gemma2", "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 64,
     "sliding_window": 4096, "layer_types": ["full_attention", "sliding_attention"] * 2}, "dtype": "bfloat16"},
    {"model_type": "nemotron_h", "num_hidden_layers": 6, "hybrid_override_pattern": "M*-EM*", "head_dim": 128,
     "num_attention_heads": 8, "num_key_value_heads": 2},
    {"num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 64, "full_attention_interval": 4,
     "linear_attn_config": {"kda_layers": [1, 3]}, "num_kv_shared_layers": 1, "v_head_dim": 32,
     "swa_num_key_value_heads": 2, "hybrid_layer_pattern": [1, 0, 0, 1]},
)  # fmt: skip


def hf_config(data: bytes) -> str:
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        return "no JSON"
    try:
        got = read_geometry(config)
        for tp in (1, 2, 8):
            got.heads_per_rank(tp)
            got.page_bytes(16, tp, "bfloat16")
    except GeometryError as error:
        return "refused " + str(error)[:30]
    return f"{got.attention} {len(got.sliding_window_layers) > 0} {len(got.linear_layers) > 0}"


def targets() -> dict[str, Target]:
    """By name."""
    body = text(roster((2, 1)))
    hello = Hello(card=full_card(), expected_ranks=2)
    said = Verdicts(verdicts=(verdict(0, peer(0)),))
    lines = b"\n".join(text(m) for m in (hello, Heartbeat(inflight=2), said))
    told = (Peers(term=1, counter=1, roster_hash="h", peers=(peer(0),)), Drain(), Probe(pod_uids=("x",)))
    shown = PodCards(cluster_uid=CLUSTER, pod_uid=POD, role=Role.PREFILL, expected_ranks=2, cards=(card(0), card(1)))
    judged = PodVerdicts(cluster_uid=CLUSTER, pod_uid=POD, role=Role.PREFILL, verdicts=said.verdicts, inflight=3)
    refused = RosterRefusal(reason="LowerKey", message="m", term=1)
    calls = (
        call("PUT", "/v1/roster", body, **{"content-type": "application/json"}),
        call("GET", "/v1/cards", **{"if-none-match": '"x", W/"y"'}),
        call("GET", "/v1/verdicts"),
        call("POST", "/v1/probe", b'{"pod_uids": ["peer-1"]}'),
        call("POST", "/v1/drain"),
    )
    return {
        "frame": Target(tuple(text(f) for f in FRAMES), frame),
        "channel": Target((stream(*FRAMES), stream(FRAMES[0], *FRAMES[3:9]), stream(FRAMES[12])), channel),
        "card": Target((text(full_card()), text(card(1, layers=3)), text(MINE)), rank_card),
        "roster": Target((body, text(roster((1, 1), {0: (full_card(),)})), text(roster((0, 0), {}))), roster_body),
        "rank-lines": Target((lines, text(hello), text(Refuse(reason="r", message="m"))), rank_lines),
        "rank-metrics": Target((measured(), text(Heartbeat())), rank_metrics),
        "link-lines": Target((b"\n".join(text(m) for m in told), text(Refuse(reason="r", message="m"))), link_lines),
        "control-api": Target(calls, control_api),
        "pod-answers": Target((text(shown), text(judged), text(refused)), pod_answers),
        "hf-config": Target(tuple(json.dumps(c).encode() for c in CONFIGS), hf_config),
        "live-peer": live_peer(),
    }
