"""A small GPT in torchtitan's style, on the text of thinwire's licence: a mesh, a function that parallelizes, a trainer.

Two replicas of two shards each. Between replicas travel a twentieth of the gradient in 4 bits; inside a replica 8 bits.

torchrun --nproc-per-node 4 examples/trainers/torchtitan_gpt.py
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from thinwire.integrations.checkpoint import StrategyState, load
from thinwire.integrations.numbers import numbers, summary

TEXT = Path(__file__).parents[2] / "LICENSE"
CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 64, 4, 2, 8
AVERAGER = tw.Mean(tw.chain(tw.TopK(0.05), tw.QSGD(bits=4)), tw.ErrorFeedback())


class Block(nn.Module):
    """Causal self-attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Predicts the next byte; the embedding is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x))


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """Activation checkpointing, then FSDP over the shards of one replica."""
    for name, layer in model.layers.items():
        model.layers[name] = fully_shard(checkpoint_wrapper(layer), mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])


class Trainer:
    """The model, its optimizer and its data, and what goes into a checkpoint."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.step = options, 0
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        size = (dist.get_world_size() // options.shards, options.shards)
        mesh = init_device_mesh(self.device.type, size, mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(0)
        self.model = GPT().to(self.device)
        parallelize(self.model, mesh)
        # The two lines of thinwire.
        self.shards = tw.compress_shards(self.model, gradients=tw.QSGD(bits=8), parameters=tw.QSGD(bits=8))
        self.handle = tw.compress_gradients(self.model, AVERAGER, replicas=mesh["replicate"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.text = torch.tensor(list(TEXT.read_bytes()))

    def batch(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.step * dist.get_world_size() + dist.get_rank())
        starts = torch.randint(len(self.text) - CONTEXT - 1, (BATCH,), generator=generator)
        return torch.stack([self.text[s : s + CONTEXT + 1] for s in starts]).to(self.device)

    def train_step(self) -> tuple[float, float]:
        tokens = self.batch()
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).full_tensor()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.item(), norm.item()

    def train(self) -> None:
        start = time.perf_counter()
        while self.step < self.options.steps:
            loss, norm = self.train_step()
            if self.step % self.options.log_every == 0:
                seconds, start = time.perf_counter() - start, time.perf_counter()
                rate = self.options.log_every * BATCH * CONTEXT / seconds
                line = f"step: {self.step:3}  loss: {loss:.4f}  grad_norm: {norm:.3f}  tps: {rate:,.0f}"
                self.log(f"{line}  thinwire: {summary(self.handle, self.shards)}")
            if self.step % self.options.save_every == 0:
                self.save()

    def save(self) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        entries = {"model": model, "optimizer": optimizer, "shards": self.shards, "step": self.step}
        dcp.save(entries | {"thinwire": StrategyState(self.handle)}, checkpoint_id=self.folder(self.step))

    def load(self, step: int) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        entries = {"model": model, "optimizer": optimizer, "shards": self.shards, "step": 0}
        dcp.load(entries, checkpoint_id=self.folder(step))
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        load(self.handle, self.folder(step))
        self.step = entries["step"]

    def folder(self, step: int) -> str:
        return f"{self.options.output}/step-{step}"

    def log(self, line: str) -> None:
        if dist.get_rank() == 0:
            print(line, flush=True)

    def close(self) -> None:
        fewer = numbers(self.handle, self.shards)["thinwire/fewer_than_fp32"]
        self.log(f"done, {fewer:.1f} times less than fp32")
        self.handle.detach()
        self.shards.detach()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--shards", type=int, default=2, help="workers that share one replica")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--output", default="runs/torchtitan")
    parser.add_argument("--resume", type=int, help="step of the checkpoint to continue")
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    trainer = Trainer(options)
    if options.resume is not None:
        trainer.load(options.resume)
    trainer.train()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
