"""How CHOCO, DeepSqueeze and Moniqua agree at their defaults: 5,000 rounds with every codec of the conformance suite.

    python benchmarks/step_sizes.py [--rounds N] [--only TEXT]

Eight workers on a ring start with 20 x 50 normal values each. Prints, per codec, by which factor the squared error has fallen
after 400 rounds, the largest error since then over that at the start, and the step size in the end: a table for
docs/consensus.md. CHOCO and DeepSqueeze are simulated by their definitions, to which tests hold them. Codecs without a fixed
size, or that need an agreement or a key of all workers, serve no gossip averager and are left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from script import run_script
from torch import Tensor

import thinwire as tw

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.codecs import gossiped
from helpers.fitted import fitted
from helpers.lockstep import gossip_in_lockstep

SIZE, SHAPE, EARLY = 8, (20, 50), 400


def starts() -> Tensor:
    """The values of all workers."""
    return torch.stack([torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank)) for rank in range(SIZE)])


def error(x: Tensor) -> float:
    """The sum of squared distances to the mean."""
    return float((x - x.mean(0)).double().square().sum())


def show(name: str, errors: list[float], step_size: float) -> None:
    """Print a line of the table."""
    start = error(starts())
    # The first entry is the error after the first round.
    fall, largest = start / errors[EARLY - 1], max(errors[EARLY - 1 :]) / start
    print(f"| `{name}` | {fall:.3g} | {largest:.2g} | {step_size:.3g} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--only", default="", metavar="TEXT")
    options = parser.parse_args()
    torch.set_num_threads(1)
    averagers = [kind(codec=codec) for kind in (tw.Choco, tw.DeepSqueeze) for codec in gossiped()]
    averagers += [tw.Moniqua(bits=bits) for bits in (2, 3, 4, 8)]
    chosen = [averager for averager in averagers if options.only in repr(averager)]
    if not chosen:
        raise ValueError(f"no averager contains {options.only!r}; the first is {averagers[0]!r}")
    print("| averager | falls in 400 rounds | largest error since | step size |\n|---|---|---|---|")
    for averager in chosen:
        errors, x = list[float](), starts()

        def note(_: int, x: Tensor, errors: list[float] = errors) -> None:
            errors.append(error(x))

        if isinstance(averager, tw.Moniqua):
            states = gossip_in_lockstep(averager, x, options.rounds, note)
            step_size = averager.diagnostics(states[0])["step_size"]
        else:
            step_size = fitted(type(averager), averager.codec, x, options.rounds, note)
        show(repr(averager), errors, step_size)


if __name__ == "__main__":
    run_script(main)
