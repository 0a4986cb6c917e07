"""Servers of which test_rules_against_sglang_launch.py asks whether they start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kit_settings import Case

from pdtransfer.contract.base import Backend, Role

NAMES = {Backend.NIXL: "nixl", Backend.MOONCAKE: "mooncake", Backend.PDCLUSTER: "pdcluster"}
P, D = Role.PREFILL, Role.DECODE


@dataclass(frozen=True)
class Server:
    """One server: its flags beside those of every server here, and its environment."""

    rule: str
    role: Role
    flags: str = ""
    model: str = "llama"
    backend: Backend = Backend.NIXL
    accelerator: str = "SM90"
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def case(self) -> Case:
        """The server as SGLang and our reader of command lines are asked about it."""
        argv = ("--disaggregation-transfer-backend", NAMES[self.backend], *self.flags.split())
        return Case(self.model, self.accelerator, self.role, argv, dict(self.variables))


def both(rule: str, flags: str = "", **more: Any) -> list[Server]:
    return [Server(rule, role, flags, **more) for role in (P, D)]


def each(rule: str, role: Role, flags: str, **more: Any) -> list[Server]:
    return [Server(rule, role, flags, backend=b, **more) for b in NAMES]


SHARD = "--tp-size 4 --enable-kv-cache-sharding --attention-backend fa3 --page-size 64 --chunked-prefill-size 8192"
EAGLE = "--speculative-algorithm EAGLE --speculative-num-steps 3"
TREE = f"{EAGLE} --speculative-eagle-topk 4 --speculative-num-draft-tokens 8"
CHAIN = f"{EAGLE} --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
LATE = "--disaggregation-decode-allocation-policy prefill_complete"
RADIX = "--disaggregation-decode-enable-radix-cache"
SERVERS: list[Server] = [
    *(
        s
        for m in ("llama", "deepseek_v3", "deepseek_v32", "qwen3_next", "deepseek_v4")
        for s in both("none", model=m, accelerator="SM100" if m == "deepseek_v4" else "SM90")
    ),
    *(s for b in NAMES for s in both("none", backend=b)),
    *both("A2", "--tp-size 6 --attn-dp-size 4"),
    *both("A2", "--tp-size 4 --attn-dp-size 2"),
    *both("A2", "--tp-size 4 --dp-size 2 --attn-dp-size 2"),
    *both("A2", "--tp-size 4 --dp-size 2 --enable-dp-attention"),
    *both("A11", "--pp-size 2 --speculative-algorithm NGRAM"),
    *both("A11", "--speculative-algorithm NGRAM"),
    *both("A11", "--pp-size 2"),
    *each("A14", D, "--tp-size 4 --dcp-size 2", model="deepseek_v3"),
    *both("A16", "--tp-size 4 --dcp-size 2", model="deepseek_v32"),
    Server("A16", P, "--tp-size 4 --dcp-size 2", model="deepseek_v3"),
    *each("A18", P, SHARD, model="deepseek_v3"),
    Server("A18", D, SHARD, model="deepseek_v3"),
    Server("A18", P, SHARD.replace("--tp-size 4", "--tp-size 1"), model="deepseek_v3"),
    Server("A18", P, f"{SHARD} --attn-dp-size 2", model="deepseek_v3"),
    Server("A18", P, SHARD.replace("64", "1"), model="deepseek_v3"),
    Server("A18", P, SHARD.replace("8192", "-1"), model="deepseek_v3"),
    Server("A18", P, SHARD.replace("8192", "1000"), model="deepseek_v3"),
    Server("A18", P, f"{SHARD} --dcp-size 2", model="deepseek_v3"),
    Server("A18", P, f"{SHARD} --enable-hierarchical-cache", model="deepseek_v3"),
    Server("A18", P, f"{SHARD} --enable-hierarchical-cache --hicache-storage-backend file", model="deepseek_v3"),
    Server("A18", P, f"{SHARD} --enable-lmcache", model="deepseek_v3"),
    Server("A18", P, SHARD),
    Server("A18", P, SHARD, model="deepseek_v3", variables=(("SGLANG_DISAGG_STAGING_BUFFER", "1"),)),
    *each("A19", P, "--enable-dsa-cache-layer-split", model="deepseek_v3"),
    *each("A19", P, LATE),
    *each("A19", D, LATE),
    *(
        Server("A19", role, f"{LATE} {more}", backend=Backend.MOONCAKE)
        for role in (P, D)
        for more in (
            "--tp-size 2",
            "--tp-size 2 --dp-size 2 --enable-dp-attention",
            "--pp-size 2",
            "--enable-pd-role-switch",
            "--enable-hierarchical-cache",
            "--enable-hierarchical-cache --hicache-write-policy write_back",
        )
    ),
    Server("A19", D, f"{LATE} {RADIX}", backend=Backend.MOONCAKE),
    Server("A19", P, LATE, backend=Backend.MOONCAKE, variables=(("SGLANG_DISAGG_STAGING_BUFFER", "1"),)),
    *both("A19", "--enable-unified-memory"),
    *both("A20", "--enable-pd-role-switch"),
    *both("A20", "--enable-pd-role-switch --pp-size 2"),
    *both("A20", "--enable-pd-role-switch --tp-size 2 --ep-size 2", model="deepseek_v3"),
    *both("A20", "--enable-pd-role-switch --speculative-algorithm NGRAM"),
    *both("A20", "--enable-pd-role-switch", backend=Backend.MOONCAKE),
    *both("B9", "--kv-cache-dtype nvfp4 --attention-backend trtllm_mha", accelerator="SM100"),
    *both("B11", "--dsv4-attn-backend trtllm", model="deepseek_v4", accelerator="SM100"),
    *both("B11", "--dsv4-attn-backend flashmla", model="deepseek_v4", accelerator="SM100"),
    *both("B12", "--page-size 16 --chunked-prefill-size 1000"),
    *both("B12", "--page-size 16 --chunked-prefill-size 1024"),
    *both("B12", "--page-size 16 --chunked-prefill-size -1"),
    *both("B12", "--page-size 16 --chunked-prefill-size 1056 --tp-size 2 --attn-dp-size 2"),
    *both("B12", "--page-size 16 --chunked-prefill-size 1064 --tp-size 2 --attn-dp-size 2"),
    Server("C7", D, f"{RADIX} --speculative-algorithm NGRAM"),
    Server("C7", D, RADIX),
    Server("C7", D, f"{RADIX} --speculative-algorithm EAGLE", model="deepseek_v3"),
    Server("C7", D, f"{RADIX} --speculative-algorithm NEXTN", model="deepseek_v3"),
    # The table has no C8: SGLang's own code is the source.
    *both("C8", "--speculative-algorithm NGRAM"),
    *both("C8", "--speculative-algorithm NGRAM --page-size 16"),
    *both("C8", "--speculative-algorithm NGRAM --page-size 16 --attention-backend flashinfer"),
    *both("C8", "--speculative-algorithm NGRAM --page-size 16 --attention-backend triton"),
    *both("C8", "--speculative-algorithm NGRAM --page-size 16 --speculative-ngram-max-bfs-breadth 1"),
    *both("C8", "--speculative-algorithm NGRAM --page-size 16 --speculative-eagle-topk 1"),
    *both("C8", "--speculative-algorithm NGRAM --page-size 16", accelerator="SM100"),
    *both("C8", "--speculative-algorithm NGRAM --tp-size 2 --attn-dp-size 2"),
    *both("C8", "--speculative-algorithm STANDALONE --tp-size 2 --attn-dp-size 2"),
    # These two have their draft in the checkpoint.
    *both("C8", "--speculative-algorithm EAGLE --page-size 16", model="deepseek_v3"),
    *both("C8", f"{TREE} --page-size 16 --attention-backend fa3", model="deepseek_v3"),
    *both("C8", f"{TREE} --page-size 16 --attention-backend triton", model="deepseek_v3"),
    *both("C8", f"{TREE} --page-size 64", model="deepseek_v3", accelerator="SM100"),
    *both("C8", f"{CHAIN} --page-size 64", model="deepseek_v3", accelerator="SM100"),
    *both("C8", f"{TREE} --page-size 64 --attention-backend fa3", model="glm4_moe"),
    *both("C8", f"{TREE} --page-size 64 --attention-backend fa4", model="glm4_moe"),
    *both("C8", f"{TREE} --attention-backend trtllm_mha", model="glm4_moe", accelerator="SM100"),
    *both("C8", f"{CHAIN} --attention-backend trtllm_mha", model="glm4_moe", accelerator="SM100"),
    *both("C8", f"{TREE} --prefill-attention-backend trtllm_mha", model="glm4_moe", accelerator="SM100"),
    *both("D6", "--enable-linear-replayssm --disable-overlap-schedule", model="qwen3_next"),
    *both("D6", "--enable-linear-replayssm-spec", model="qwen3_next"),
    *(
        Server("D6", role, f"--disable-overlap-schedule --mamba-radix-cache-strategy {kept} {more}", model="qwen3_next")
        for role, more in ((P, ""), (P, "--disable-radix-cache"), (D, ""), (D, RADIX))
        for kept in (
            "no_buffer --page-size 1",
            "no_buffer --page-size 64",
            "extra_buffer --page-size 64",
            "extra_buffer_lazy --page-size 64",
            "auto --page-size 64",
        )
    ),
    *both("D7", "--enable-lmcache"),
    *both("D7", "--enable-watermark"),
    *both("D7", "--enable-response-store"),
    *both("D7", "--enable-pdmux --chunked-prefill-size -1 --disable-overlap-schedule"),
    *both("none", "--dllm-algorithm LowConfidence", model="diffusion"),
    *both("D7", model="minicpm"),
    *both("D7", "--attention-backend minicpm_flashattn", model="minicpm"),
    *both("D7", "--attention-backend fa3", model="minicpm"),
    *both("D7", model="minicpm", variables=(("SGLANG_MINICPM_FORCE_DENSE", "1"),)),
]
