"""Gossip: workers average with their neighbours. `base` has the contract, `mix` is the shortest example."""
