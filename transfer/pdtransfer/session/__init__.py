"""Request level of the transfer module: one endpoint per engine rank.

api          what an engine sees: Endpoint, Sender, Receiver, configuration
endpoint     RankEndpoint, where the parts meet
core         the endpoint's thread: loop, agent, mover, progress
wiring       peers: load, probe, judge, let go  (loader)
connections  dial, accept, who may stay  (handshake, channel, frames)
probe/lender the two ends of a probe  (scratch)
source       prefill: rooms, legs, their end  (rooms, feeder)
askers       prefill: what requests and aborts are answered with  (tombstones)
destination  decode: receives, page ledger, fences  (receives)
transfers    the objects an engine holds
"""
