"""SGLang's KV transfer backend `pdcluster`: found by SGLang itself, by the entry point group `sglang.srt.plugins`.

plugin        what SGLang calls at start: checks SGLang, adds the backend's name, gives out the classes
interfaces    what of SGLang is relied on, and whether this SGLang has it
settings      what the environment says: pod, sidecar, certificates, tuning
layout        SGLang's KVArgs as regions of a card (pure); memory: where a pointer lies
identity      model, engine and rank as a card template
rank          endpoint, where its peers come from (sidecar, or introductions), and whether it is well
rows          SGLang's metadata rows as bytes and back
bootstrap     prefill's HTTP registry, with cards
messages      what decode tells prefill ranks beside the control channel: introductions, notes, aborts
manager       what both sides share; prefill and decode are its two halves
meetings      decode: first contact with a prefill engine, apart from the scheduler;  sockets  those to be closed
sender        prefill's side of one request;  receiver  decode's;  reasons  why a room failed
threads       threads that do not die silently

Only plugin, manager, prefill, decode, sender, receiver, sockets, bootstrap and identity import SGLang.
"""
