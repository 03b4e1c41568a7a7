"""Train a GPT with several methods on one GPU for `scripts/gpu.py`: loss against bytes.

python scripts/gpu_study.py FOLDER [--minutes 6.5] [--steps 400] [--workers 4] [--layers 10] [--width 512]

The text is on every machine: the Python sources that came with Python and PyTorch, of which one file in twenty is held out.
A token is a byte. The workers are threads of this process, and replicas on the one GPU. Every method trains from the same
weights on equally many tokens. A run is a file in FOLDER, and no run is computed twice: another call goes on with the next
seed. A call starts no run after so many minutes.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sysconfig
import time
import zlib
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import thinwire as tw
from thinwire.comm import Communicator, LocalWorld

IS_DRY = os.environ.get("THINWIRE_FAKE_GPU") == "1"
DEVICE = torch.device("cpu") if IS_DRY else torch.device("cuda", 0)
METHODS = {  # name: strategy, and the inner optimizer's learning rate
    "DDP": ("Gradients(Mean())", 1e-3),
    "4 bits": ("Gradients(Mean(QSGD(bits=4), ErrorFeedback()))", 1e-3),
    "4 bits every 4": ("Local(Mean(QSGD(bits=4), exchange='scatter_reduce'), every=4)", 1e-3),
    "Streaming DiLoCo": ("streaming_diloco(every=20, fragments=2, delay=2)", 1e-3),
    "SparseLoCo": ("sparse_loco(every=20)", 1e-3),
    "MuLoCo": ("mulo_co(20)", 0.02),
}
CONTEXT = 256


class GPT(nn.Module):
    """A causal Transformer on bytes."""

    def __init__(self, layers: int, width: int):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)  # the first also scores what follows
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores (N, T, 256) of what follows each of the tokens (N, T)."""
        length = tokens.shape[1]
        x = self.token(tokens) + self.position.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device, dtype=x.dtype)
        return F.linear(self.layers(x, mask=mask, is_causal=True), self.token.weight)


def read() -> tuple[Tensor, Tensor]:
    """The bytes to learn from, and those to test on."""
    folders = [Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent]
    paths = sorted({path.resolve() for folder in folders for path in folder.rglob("*.py")})
    texts: list[list[bytes]] = [[], []]
    for path in paths[:: 400 if IS_DRY else 1]:
        texts[zlib.crc32(path.name.encode()) % 20 == 0].append(path.read_bytes())
    learn, test = (torch.frombuffer(bytearray(b"".join(text)), dtype=torch.uint8).to(DEVICE) for text in texts)
    return learn, test


def windows(text: Tensor, starts: Tensor) -> Tensor:
    """Runs of bytes (N, CONTEXT + 1), of which each but the first is to be told from those before it."""
    at = starts.to(text.device)[:, None] + torch.arange(CONTEXT + 1, device=text.device)
    return text[at].long()


def loss_of(model: nn.Module, run: Tensor) -> Tensor:
    """Nats per byte."""
    with torch.autocast(DEVICE.type, torch.bfloat16):
        scores = model(run[:, :-1])
    return F.cross_entropy(scores.float().flatten(0, 1), run[:, 1:].flatten())


def train(
    comm: Communicator,
    initial: nn.Module,
    method: str,
    texts: tuple[Tensor, Tensor],
    seed: int,
    options: argparse.Namespace,
) -> dict[str, float]:
    """A run of one worker: the loss of the mean model on the held-out text, and the bytes that the worker sent."""
    strategy, rate = METHODS[method]
    model = copy.deepcopy(initial)
    optimizer = optimizer_of(model, method, rate)
    generator = torch.Generator().manual_seed(1000 * seed + comm.rank)
    learn, test = texts
    with tw.attach(model, optimizer, strategy, comm=comm, seed=seed) as handle:
        before = comm.ledger.bytes_sent
        for step in range(options.steps):
            warm, left = (step + 1) / (0.1 * options.steps), 1.1 * (1 - step / options.steps)
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, warm, left)
            starts = torch.randint(len(learn) - CONTEXT, (options.batch,), generator=generator)
            optimizer.zero_grad()
            loss_of(model, windows(learn, starts)).backward()
            optimizer.step()
        sent = comm.ledger.bytes_sent - before
        with handle.average_model(), torch.no_grad():
            starts = torch.linspace(0, len(test) - CONTEXT - 1, options.test_windows).long()[comm.rank :: comm.size]
            losses = [loss_of(model, windows(test, part)) * len(part) for part in starts.split(64)]
        total = float(comm.all_reduce(torch.stack(losses).sum()).wait())
    return {"loss": total / options.test_windows, "bytes": sent}


def optimizer_of(model: GPT, method: str, rate: float) -> torch.optim.Optimizer:
    """Muon for the matrices of MuLoCo's layers, and AdamW for all else."""
    if method == "MuLoCo":
        return tw.strategy.MuonAdamW(
            model.parameters(), lr=rate, adamw=[model.token.weight, model.position.weight], betas=(0.9, 0.95)
        )
    return torch.optim.AdamW(model.parameters(), rate, (0.9, 0.95), weight_decay=0.1, fused=DEVICE.type == "cuda")


def path_of(method: str, seed: int, options: argparse.Namespace) -> Path:
    sizes = f"{options.layers}x{options.width}-{options.workers}x{options.batch}x{options.steps}"
    path: Path = options.folder / f"{sizes}{'-dry' * IS_DRY}" / f"{method.replace(' ', '-')}-{seed}.json"
    return path


def run_all(options: argparse.Namespace) -> list[str]:
    """Runs that are not there yet, seed by seed, as far as the minutes reach; all rows after each of them."""
    end = time.monotonic() + 60 * options.minutes
    texts: tuple[Tensor, Tensor] | None = None
    for seed in range(options.seeds):
        for method in METHODS:
            path = path_of(method, seed, options)
            if path.exists() or time.monotonic() > end:
                continue
            texts = read() if texts is None else texts
            torch.manual_seed(seed)
            initial = GPT(options.layers, options.width).to(DEVICE)
            began = time.monotonic()
            found = LocalWorld(options.workers, 300.0).run(train, initial, method, texts, seed, options)[0]
            found |= {"seconds": time.monotonic() - began, "parameters": sum(p.numel() for p in initial.parameters())}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found))
            (options.folder / "study.rows.json").write_text(json.dumps(table(options)))
    return table(options)


def table(options: argparse.Namespace) -> list[str]:
    """A row for each method, the mean of its seeds; what has not run says so."""
    tokens = options.steps * options.workers * options.batch * CONTEXT
    rows = [f"{'method':18} {'nats per byte':>13} {'MB sent':>10} {'seconds':>8}  {tokens / 1e6:.1f} million tokens"]
    for method in METHODS:
        paths = [path_of(method, seed, options) for seed in range(options.seeds)]
        runs = [json.loads(path.read_text()) for path in paths if path.exists()]
        if not runs:
            rows.append(f"{method:18} not run")
            continue
        loss, megabytes, seconds = (mean(run[key] for run in runs) for key in ("loss", "bytes", "seconds"))
        seeds = f"{runs[0]['parameters'] / 1e6:.1f} million parameters, {len(runs)} seeds"
        rows.append(f"{method:18} {loss:13.4f} {megabytes / 1e6:10.1f} {seconds:8.0f}  {seeds}")
    return rows


def main() -> None:
    small = IS_DRY
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the results")
    parser.add_argument("--minutes", type=float, default=6.5)
    parser.add_argument("--workers", type=int, default=2 if small else 4)
    parser.add_argument("--layers", type=int, default=1 if small else 10)
    parser.add_argument("--width", type=int, default=64 if small else 512)
    parser.add_argument("--batch", type=int, default=1 if small else 32, help="windows of a worker in a step")
    parser.add_argument("--steps", type=int, default=4 if small else 400)
    parser.add_argument("--seeds", type=int, default=1 if small else 3)
    parser.add_argument("--test-windows", type=int, default=8 if small else 2048)
    torch.set_float32_matmul_precision("high")
    print("\n".join(run_all(parser.parse_args())))


if __name__ == "__main__":
    main()
