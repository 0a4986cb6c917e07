"""What prefill, decode and the operator agree on: pure data and pure rules.

Nothing here does I/O. Only the standard library and pydantic are imported, so that the operator,
the sidecar, the engine ranks and `pdcluster preflight` share one source of truth about fit.
"""
