"""The gossip averagers that suites run over."""

from __future__ import annotations

import thinwire as tw

RING = tw.Ring()
GOSSIP = [
    tw.Mix(),
    tw.Mix(tw.Exponential()),
    tw.average.ClippedGossip(tau=0.5),
    tw.average.ClippedGossip(tw.Exponential(), tau=float("inf")),
    tw.PushSum(),
    tw.PushSum(tw.topology.Linear()),
    tw.Choco(),
    tw.Choco(tw.topology.Torus(), tw.TopK(0.1), step_size=0.2),
    tw.Choco(tw.topology.Star(), tw.codec.SignNorm(), step_size=0.1),
    tw.DeepSqueeze(step_size=0.05),
    tw.DeepSqueeze(RING, tw.chain(tw.TopK(0.1), tw.QSGD(bits=4)), step_size=0.05),
    tw.PowerGossip(),
    tw.PowerGossip(RING, rank=2, iterations=3),
    tw.PowerGossip(RING, warm_start=False, shared_p=True),
    tw.PowerGossip(RING, sign_p=True, step_size=0.5),
    tw.Moniqua(theta=8.0),
    tw.Moniqua(tw.Exponential(), theta=8.0, bits=4),
    tw.Mix(tw.topology.Hierarchical(tw.Ring(), workers_per_node=2)),
    tw.PushSum(tw.topology.Hierarchical(tw.Exponential(), workers_per_node=2)),
    tw.Choco(tw.topology.Hierarchical(tw.Ring(), workers_per_node=2)),
]
