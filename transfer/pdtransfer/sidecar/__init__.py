"""The pod's sidecar: gathers the ranks' cards over a unix socket and speaks to the operator over HTTPS.

Pure parts are `state` (transitions on frozen data) and `views` (answers computed from a state);
`hub` holds the current state, `sockets` and `api` are the two I/O edges, `main` puts them together.
`rank_link` is the only module that runs inside an engine rank. None of them imports torch, NIXL or
numpy: one sidecar runs in every pod.
"""
