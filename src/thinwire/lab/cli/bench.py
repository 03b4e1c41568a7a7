"""usage: thinwire bench codecs [OPTIONS]
       thinwire bench step [OPTIONS]

Measure how fast codecs encode and decode, or a training step over this network: gradients, gossip or local updates, beside the
least time that its computation, bytes and passes over memory need. Each benchmark prints a table and explains its options with
--help.
"""

from __future__ import annotations

from ...suggestion import named
from .options import parsed, show_help


def bench_command(options: list[str]) -> None:
    """Run a benchmark; it prints a table."""
    name, *options = options or ["--help"]
    if name in ("-h", "--help"):
        show_help(__doc__)
        return
    from .. import bench
    from ..train.start.environment import set_variables

    benches = {"codecs": bench.CodecsBench, "step": bench.StepBench}
    set_variables()
    parsed(named(benches, name, "benchmark", "thinwire bench --help"), options, f"thinwire bench {name}").run()


def consensus_command(options: list[str]) -> None:
    """Average without training, and measure the error against the bits sent."""
    from ..bench import ConsensusBench

    parsed(ConsensusBench, options, "thinwire consensus").run()
