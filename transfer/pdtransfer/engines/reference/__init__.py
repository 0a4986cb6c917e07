"""The Reference engine: a small real engine for Llama checkpoints, on a CPU.

It has what the transfer module needs of an engine and nothing for speed: a paged KV pool, TP ranks as
processes, chunked prefill, continuous batching, and SGLang's HTTP API with bootstrap_{host,port,room}.

    leader process (no torch)                      rank process, one per TP rank
    main -> http_* -> answers -> engine  ==pipe==> rank -> llama over kv_pool, collective (gloo)
                                 scheduler (pure)       -> transfers -> endpoint (NIXL) <- link (sidecar)

The leader decides (scheduler.py, no I/O) and every rank carries out the same messages in the same order.
One rank's death ends the group: the kubelet starts a new incarnation.
"""
