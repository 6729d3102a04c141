"""The parameter-server roles of a stage, as machines: front, back, shard, ledger, and the decider of stage 0."""
