"""Request level of the transfer module: one endpoint per engine rank.

api          what an engine sees: Endpoint, Sender, Receiver, configuration
endpoint     RankEndpoint, where the parts meet
core         the endpoint's thread: loop, agent, mover, progress  (naps)
wiring       peers: load, probe, judge, let go  (loader, proofs, deaths)
connections  dial, accept, who may stay  (handshake, channel, frames)
exchange     whom a frame concerns
probe/lender the two ends of a probe  (scratch, scratch_moves, calibrate)
source       prefill: rooms, legs, their end  (rooms)
askers       prefill: what requests and aborts are answered with  (tombstones)
feeding      prefill: chunks routed and queued for a leg  (feeder, links, coverage, digests)
stager       prefill: blocks packed and put through slots  (depot)
destination  decode: receives, how they go  (opening, receives, strategy, pairs)
custody      decode: what a receive holds until its sources have let go  (quarantine)
intake       decode: slots lent, what was filled scattered  (slots)
rotation     decode: a new agent, the last fence  (generations, apart); moves: peers follow
transfers    the objects an engine holds  (validate)
"""
