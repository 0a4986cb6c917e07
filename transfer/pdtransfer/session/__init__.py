"""Request level of the transfer module: one endpoint per engine rank.

api          what an engine sees: Endpoint, Sender, Receiver, configuration
endpoint     RankEndpoint, where the parts meet
core         the endpoint's thread: loop, agent, mover, progress
wiring       peers: load, connect, shake hands, probe, judge, let go  (handshake, channel, frames)
probe/lender the two ends of a probe  (scratch)
source       prefill: requests, chunks, drain acknowledgements  (feeder, tombstones)
destination  decode: receives, page ledger, fences  (receives)
transfers    the objects an engine holds
"""
