"""pdtransfer moves KV cache between prefill and decode ranks with NIXL.

It runs inside every engine rank (which owns the NIXL agent, because the KV pool lives there)
and as a sidecar next to them. `pdtransfer.contract` is what both sides and the operator agree on.
"""
