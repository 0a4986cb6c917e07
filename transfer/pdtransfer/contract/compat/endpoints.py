"""Family H, continued: addresses, ports, load balancing, and what a request may ask for."""

from __future__ import annotations

from ipaddress import ip_address

from pdtransfer.contract.base import Backend
from pdtransfer.contract.compat.rule import SGLANG_ONLY, Family, Hit, Outcome, columns, every, known
from pdtransfer.contract.effective.transport import DEFAULT_BOOTSTRAP_PORT
from pdtransfer.contract.facts import NO_LIMIT, RoleFacts

H = Family()
TOP_LOGPROBS = 128
"""Entries of top_logprobs that fit into SGLang's metadata row."""
_ONE_MACHINE = "They reach each other on one machine, in one network namespace, and nowhere else."
_FORCE = "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK"


def is_loopback(host: str) -> bool:
    """True for an address that only its own pod reaches."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@H.rule(
    "H5",
    "Servers listen where the other pods reach them",
    every(Outcome.REQ),
    needs=("host",),
    change="set --host 0.0.0.0 (SGLang's default is 127.0.0.1)",
)
def h5(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    lonely = [facts for facts in (p, d) if facts.host is not None and is_loopback(facts.host)]
    hosts = [known(facts.host, facts, "host") for facts in (p, d)]
    if len(lonely) == len(hosts):
        return Hit("both roles listen on loopback", consequence=_ONE_MACHINE, outcome=Outcome.WARN)
    for facts in lonely:
        other = "decode can't fetch its bootstrap data" if facts is p else "the router can't reach it"
        return Hit(f"{facts.role.value} listens on {facts.host}: {other}")
    return None


@H.rule(
    "H6",
    "One bootstrap port",
    every(Outcome.WARN),
    needs=("bootstrap_port", "rust_server", "port"),
    change="set the same --disaggregation-bootstrap-port on both roles",
)
def h6(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    ours, theirs = known(p.bootstrap_port, p, "bootstrap_port"), known(d.bootstrap_port, d, "bootstrap_port")
    on_api_port = p.rust_server and backend is not Backend.PDCLUSTER and p.port is not None
    if on_api_port and ours not in (DEFAULT_BOOTSTRAP_PORT, p.port):
        return Hit(
            f"prefill's bootstrap port is {ours} and its port {p.port}; with SGLANG_RUST_SERVER one serves both",
            change="drop --disaggregation-bootstrap-port on prefill",
            outcome=Outcome.START,
        )
    if ours == theirs:
        return None
    return Hit(
        f"prefill's bootstrap port is {ours}, decode falls back to {theirs}",
        consequence="A request that names no bootstrap_port fails; one that does (as the router's do) is served.",
    )


@H.rule(
    "H7",
    "Prefill is registered at its bootstrap server",
    columns(Outcome.REQ, Outcome.HANG, Outcome.HANG),
    needs=("route_registered",),
    change="restart the prefill engine: it does not register again by itself",
    engines=SGLANG_ONLY,
)
def h7(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if known(p.route_registered, p, "route_registered"):
        return None
    problem = "prefill's bootstrap server does not answer /route for all of its ranks"
    if backend is Backend.PDCLUSTER:
        return Hit(
            problem,
            "wait, or see the log of the prefill engine: it says what its ranks can not reach",
            consequence="Requests fail and say so. The ranks go on registering for 300 s, then they are unhealthy.",
        )
    return Hit(
        problem,
        consequence="SGLang gives up registering after five tries and stays up: every request fails, while /health "
        "stays green.",
    )


@H.rule(
    "H8",
    "Ranks tell each other an address that the other pods reach",
    every(Outcome.REQ),
    needs=("rank_host",),
    change="set SGLANG_HOST_IP to the pod's address on both roles; a NetworkPolicy has to let all TCP ports through "
    "between the roles (each rank has a port of its own that nobody can choose)",
    engines=SGLANG_ONLY,
)
def h8(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if p.rank_host and d.rank_host and is_loopback(p.rank_host) and is_loopback(d.rank_host):
        return Hit("the ranks of both roles name a loopback address", consequence=_ONE_MACHINE, outcome=Outcome.WARN)
    for facts in (p, d):
        host = known(facts.rank_host, facts, "rank_host")
        if host and is_loopback(host):
            other = "decode's" if facts is p else "prefill's"
            return Hit(f"{facts.role.value} has SGLANG_HOST_IP {host}, which {other} ranks can't reach in its pod")
    return None


@H.rule(
    "H9",
    "Both sides find the same data-parallel rank of prefill",
    every(Outcome.REQ),
    needs=("attention_data_parallel", "load_balance_method", "force_query_prefill_dp_rank"),
    change=f"set {_FORCE} alike on both roles (1 where a router picks the rank by itself)",
    engines=SGLANG_ONLY,
)
def h9(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    ranks = p.attention_dp * p.replicas_inside
    if ranks == 1:
        return None
    method = known(p.load_balance_method, p, "load_balance_method")
    if method != "follow_bootstrap_room":
        return None  # Prefill tells its choice, and decode asks for it.
    ours = known(p.force_query_prefill_dp_rank, p, "force_query_prefill_dp_rank")
    theirs = known(d.force_query_prefill_dp_rank, d, "force_query_prefill_dp_rank")
    what = f"prefill has {ranks} data-parallel ranks and goes by the room's number"
    if theirs and not ours:
        return Hit(f"{what}; {_FORCE} is set on decode only, which asks for a rank that prefill never registers")
    if ours and not theirs:
        return Hit(
            f"{what}; {_FORCE} is set on prefill only",
            outcome=Outcome.WARN,
            consequence="A request that a router sends to another rank fails.",
        )
    if ours:
        return None
    return Hit(
        f"{what}: a router that picks the rank by itself has to agree, or its requests fail",
        change=f"For such a router set {_FORCE}=1 on both roles.",
        outcome=Outcome.FINE,
    )


@H.rule(
    "H10",
    "Sampling mask on both sides or neither",
    columns(Outcome.REQ, Outcome.HANG, Outcome.HANG),
    needs=("sampling_mask", "sampling_mask_max_tokens"),
    change="set SGLANG_ENABLE_DISAGG_SAMPLING_MASK and --sampling-mask-max-tokens alike on both roles",
    engines=SGLANG_ONLY,
)
def h10(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    ours, theirs = known(p.sampling_mask, p, "sampling_mask"), known(d.sampling_mask, d, "sampling_mask")
    if ours != theirs:
        return Hit(
            f"SGLANG_ENABLE_DISAGG_SAMPLING_MASK is {ours} on prefill and {theirs} on decode",
            consequence=_ROWS if backend is Backend.PDCLUSTER else "",
        )
    if ours and p.sampling_mask_max_tokens != d.sampling_mask_max_tokens:
        return Hit(
            f"the sampling mask has {_or_default(p.sampling_mask_max_tokens)} tokens on prefill and "
            f"{_or_default(d.sampling_mask_max_tokens)} on decode",
            consequence="The rows that carry it are of two sizes.",
        )
    return None


_ROWS = "The two sides have another number of metadata buffers; every request is failed by name."


def _or_default(tokens: int | None) -> str:
    return "the default number of" if tokens is None else str(tokens)


@H.rule(
    "H11",
    "KV checksums on both sides, over one layout",
    columns(Outcome.REQ, Outcome.WARN, Outcome.WARN),
    needs=("kv_checksum", "tensor_parallel", "pipeline_parallel", "page_size", "kv_dtype"),
    change="set --disaggregation-enable-kv-checksum on both roles or on neither",
    engines=SGLANG_ONLY,
)
def h11(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    ours, theirs = known(p.kv_checksum, p, "kv_checksum"), known(d.kv_checksum, d, "kv_checksum")
    if ours != theirs:
        side = "prefill" if ours else "decode"
        return Hit(
            f"--disaggregation-enable-kv-checksum is set on {side} only",
            consequence=_ROWS if backend is Backend.PDCLUSTER else "Requests are admitted unverified.",
        )
    if not ours:
        return None
    for name in ("attention_tp", "pipeline_parallel", "page_size", "kv_dtype"):
        mine, its = getattr(p, name), getattr(d, name)
        if mine is not None and its is not None and mine != its:
            return Hit(
                f"KV checksums are on, and {name.replace('_', ' ')} is {mine} on prefill and {its} on decode",
                change="drop --disaggregation-enable-kv-checksum: it compares equal layouts only",
                outcome=Outcome.WARN,
                consequence="Requests are admitted unverified, with one warning in the log.",
            )
    return None


@H.rule(
    "H12",
    "top_logprobs fit into the metadata row",
    every(Outcome.WARN),
    needs=("max_top_logprobs",),
    change=f"refuse top_logprobs above {TOP_LOGPROBS} in front of the engines",
    engines=SGLANG_ONLY,
)
def h12(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    """SGLang takes any number (`top_logprobs` of chat, `logprobs` of completions, `top_logprobs_num` of /generate), so
    only what stands in front of the engine can tell this fact. SGLang's router refuses more than 20 in chat requests
    and lets any number through in the other two."""
    limit = known(p.max_top_logprobs, p, "max_top_logprobs")
    if limit <= TOP_LOGPROBS:
        return None
    return Hit(
        "nothing limits top_logprobs" if limit >= NO_LIMIT else f"requests may ask for {limit} top_logprobs",
        consequence=f"One that asks for more than {TOP_LOGPROBS} ends prefill's scheduler, and with it the server.",
    )
