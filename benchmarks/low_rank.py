"""How long averagers of low rank work, in copies of the matrices: `step`, and what follows it.

    python benchmarks/low_rank.py

On 25 MiB of matrices, one thread, in processor time. The messages of other workers are there at once.
"""

from __future__ import annotations

import argparse

import torch

import thinwire as tw
from thinwire import average
from thinwire.lab.bench.plan import BUCKET, measure_low_rank

AVERAGERS = (tw.PowerSGD, average.Dion, tw.PowerGossip)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':20}" + "".join(f"{f'rank {rank}':>10}" for rank in options.ranks))
    for kind in AVERAGERS:
        shares = [measure_low_rank(kind(rank=rank), BUCKET, options.repetitions) for rank in options.ranks]
        for name, copies in (("step", [1 / s.encode for s in shares]), ("wait", [1 / s.decode for s in shares])):
            print(f"{kind.__name__ + ', ' + name:20}" + "".join(f"{value:10.1f}" for value in copies), flush=True)


if __name__ == "__main__":
    main()
