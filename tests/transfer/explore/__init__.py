"""Breadth-first exploration of the real session code over small worlds.

One process, one thread, virtual time: the real endpoints (rooms, askers, tombstones, receives, page
ledger, mover, wiring, handshake) run on an event loop that only moves when an action says so, with
sockets replaced by a pool of messages that may be lost, doubled and reordered, and with the shipped
fake agent, whose every handle waits until an action lands, fails or delays it.

`world` builds it, `actions` lists what may happen next, `checks` says what must hold, `search`
explores, `seeded` holds known bugs as negative controls.
"""
