"""Staging: registered memory beside the KV pool, the copies between the two, and who holds which slot.

arena    the memory, in slots, of one memory kind
device   the GPU's context in the thread that calls the agent
copier   pack (pool rows into a slot) and scatter (slot into pool rows) with torch
slots    which of this rank's slots is used for packing to whom; pure
"""
