"""Two of eight workers attack: the test accuracy that each rule reaches on handwritten digits.

    python benchmarks/robust.py [CODEC ...]     such as "QSGD(bits=4)" "TopK(0.1)"

Each worker has an eighth of the examples. All train the same small network by 150 steps of gradient descent, with momentum on
each worker, as centered clipping wants. One table for each codec; biased codecs have error feedback.
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import thinwire as tw
from thinwire.average import Bucketing, CenteredClipping, GeometricMedian, Krum, Median, MedianNorm, TrimmedMean
from thinwire.testing.attacks import ATTACKS, Attack, Attacker

SIZE, FAULTY, STEPS, RATE, MOMENTUM = 8, (1, 6), 150, 0.1, 0.9
RULES = {
    "mean": None,
    "median norm": MedianNorm(),
    "centered clipping": CenteredClipping(tau=1.0),
    "median": Median(),
    "trimmed mean": TrimmedMean(faulty=2),
    "geometric median": GeometricMedian(),
    "Multi-Krum": Krum(faulty=2, selected=4),
    "median of pairs": Bucketing(Median()),
}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """The digits, shuffled: features (N, 64) and labels (N,)."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]


def accuracy(averager: tw.Mean, attack: Attack | None) -> float:
    """The accuracy in percent on 400 test examples; chance where the model is not finite."""
    images, labels = data()
    size = SIZE if attack is not None else SIZE - len(FAULTY)

    def worker(comm: tw.comm.Communicator) -> float:
        own = slice(400 + comm.rank, None, size)
        x, y = images[own], labels[own]
        attacker = None if attack is None else Attacker(attack, FAULTY)
        if attack is not None and comm.rank in FAULTY:
            y = attack.labels(y, 10)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        parameters = list(model.named_parameters())
        momenta = [(name, torch.zeros_like(p)) for name, p in parameters]
        sent = [(name, torch.zeros_like(p)) for name, p in parameters]
        state = averager.init(sent, comm)
        for _ in range(STEPS):
            gradients = torch.autograd.grad(cross_entropy(model(x), y), [p for _, p in parameters])
            for (_, m), (_, s), g in zip(momenta, sent, gradients, strict=True):
                s.copy_(m.mul_(MOMENTUM).add_(g))
            if attacker is not None:
                attacker.corrupt(sent, comm)
            averager.step(state, sent, comm).wait()
            if averager.commit(state):
                with torch.no_grad():
                    for (_, p), (_, s) in zip(parameters, sent, strict=True):
                        p.sub_(s, alpha=RATE)
        return 100 * (model(images[:400]).argmax(1) == labels[:400]).float().mean().item()

    return tw.LocalWorld(size).run(worker)[0]


def table(codec: str) -> None:
    """Print attacks by rules for one codec."""
    parsed = tw.parse(codec)
    memory = None if parsed.traits.unbiased or parsed.traits.lossless else tw.ErrorFeedback()
    averagers = {}
    for name, rule in RULES.items():
        try:
            averagers[name] = tw.Mean(parsed, memory, rule=rule)
        except ValueError:  # the rule does not suit this codec
            continue
    print(f"\n{codec}: {accuracy(tw.Mean(parsed, memory), None):.1f} % without attackers, by the mean\n")
    print("| attack | " + " | ".join(averagers) + " |\n|" + "---|" * (len(averagers) + 1))
    for attack in ATTACKS:
        row = [f"{accuracy(averager, attack):.1f}" for averager in averagers.values()]
        print(f"| `{attack}` | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    for text in sys.argv[1:] or ["Identity()"]:
        table(text)
