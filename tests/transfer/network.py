"""Three network namespaces of our own, joined by veth pairs, whose links tests cut: one for a prefill rank, two for
decode ranks. Root only; nothing outside of the namespaces is touched."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

RATE = "200mbit"
"""Of each link towards decode: a transfer takes long enough to be cut in its middle."""
PREFILL = "198.18.0.1"
"""Reachable over both links (198.18.0.0/15 is reserved for tests of networks)."""


def sh(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


class Network:
    """`hub` holds the prefill rank; `spokes[i]` a decode rank at `198.18.(i+1).2`, over device `v(i)`."""

    def __init__(self, spokes: int = 2) -> None:
        if os.geteuid() != 0:
            pytest.skip("network namespaces need root")
        if not all(shutil.which(program) for program in ("ip", "nft", "tc")):
            from e2e.cluster.debian import ensure_packages

            ensure_packages(print)
        mark = f"pdc{os.getpid()}"
        self.hub = f"{mark}-hub"
        self.spokes = [f"{mark}-{i}" for i in range(spokes)]
        self.devices = ",".join(f"v{i}" for i in range(spokes))
        for name in (self.hub, *self.spokes):
            sh("ip", "netns", "add", name)
            self.within(name, "ip", "link", "set", "lo", "up")
        self.within(self.hub, "ip", "address", "add", f"{PREFILL}/32", "dev", "lo")
        for i, spoke in enumerate(self.spokes):
            ends = (f"{mark}h{i}"[-15:], f"{mark}s{i}"[-15:])
            sh("ip", "link", "add", ends[0], "netns", self.hub, "type", "veth", "peer", "name", ends[1], "netns", spoke)
            self.within(self.hub, "ip", "link", "set", ends[0], "name", f"v{i}")
            self.within(spoke, "ip", "link", "set", ends[1], "name", "v")
            self.within(self.hub, "ip", "address", "add", f"198.18.{i + 1}.1/24", "dev", f"v{i}")
            self.within(spoke, "ip", "address", "add", f"{self.address(i)}/24", "dev", "v")
            self.within(self.hub, "ip", "link", "set", f"v{i}", "up")
            self.within(spoke, "ip", "link", "set", "v", "up")
            self.within(spoke, "ip", "route", "add", PREFILL, "via", f"198.18.{i + 1}.1")
            limit = ("tbf", "rate", RATE, "burst", "256kb", "latency", "100ms")
            self.within(self.hub, "tc", "qdisc", "add", "dev", f"v{i}", "root", *limit)

    @staticmethod
    def address(spoke: int) -> str:
        return f"198.18.{spoke + 1}.2"

    def within(self, name: str, *command: str) -> None:
        sh("ip", "netns", "exec", name, *command)

    def cut(self, spoke: int, how: str) -> None:
        """`down`: the interface goes down. `black hole`: every packet is dropped, both ways, without a sign."""
        if how == "down":
            self.within(self.hub, "ip", "link", "set", f"v{spoke}", "down")
            return
        self.within(self.spokes[spoke], "nft", "add table inet cut")
        for hook in ("input", "output"):
            chain = f"add chain inet cut {hook} {{ type filter hook {hook} priority 0 ; policy drop ; }}"
            self.within(self.spokes[spoke], "nft", chain)

    def mend(self, spoke: int, how: str) -> None:
        if how == "down":
            self.within(self.hub, "ip", "link", "set", f"v{spoke}", "up")
        else:
            self.within(self.spokes[spoke], "nft", "delete", "table", "inet", "cut")

    def remove(self) -> None:
        for name in (self.hub, *self.spokes):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20, check=False)
