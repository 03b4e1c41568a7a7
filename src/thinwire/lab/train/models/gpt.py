"""A small GPT: a causal Transformer language model with tied embeddings.

The default has 10.6 million parameters besides its embeddings of positions and tokens. GPT-2's small size, of 12 layers
and heads, width 768, context 1024 and 50,257 tokens, has 124,439,808.

Source: Radford et al. 2019, Language Models are Unsupervised Multitask Learners (GPT-2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ....algorithm import require
from ....options import require_integer, require_number
from .base import Model


@dataclass(frozen=True)
class GPT(Model):
    """Decoder-only Transformer: pre-norm, GELU, learned positions, output layer tied to the embedding.

    Raises:
        ValueError: a size below 1, a width that heads do not divide, or a dropout outside [0, 1).

    Example:
        >>> import torch
        >>> module = GPT(layers=1, width=8, heads=2, context=4).build(num_classes=5)
        >>> module(torch.zeros(2, 3, dtype=torch.int64)).shape
        torch.Size([2, 3, 5])
    """

    layers: int = 6
    """Transformer layers."""
    width: int = 384
    """Numbers in a token's vector; higher => better, slower, more to send."""
    heads: int = 6
    """Attention heads; each has an equal part of the width."""
    context: int = 256
    """Largest number of tokens that the model reads."""
    dropout: float = 0.1
    """Share of numbers set to 0 while training; higher => less overfitting, slower learning."""

    def __post_init__(self):
        for name in ("layers", "width", "heads", "context"):
            require_integer(f"model.{name}", getattr(self, name), 1)
        require(self.width % self.heads == 0, f"model.heads must divide model.width {self.width}, got {self.heads}")
        require_number("model.dropout", self.dropout, least=0, below=1)

    def build(self, num_classes: int = 50_257) -> nn.Module:
        """Maps tokens (N, T), T up to `context`, to scores (N, T, num_classes)."""
        return GPTModule(self, num_classes)


class GPTModule(nn.Module):
    """The network of `GPT`."""

    def __init__(self, config: GPT, num_tokens: int):
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        layer = nn.TransformerEncoderLayer(
            config.width, config.heads, 4 * config.width, config.dropout, "gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(config.width)
        # PyTorch warns that nested tensors do not go with `norm_first`.
        self.layers = nn.TransformerEncoder(layer, config.layers, norm, enable_nested_tensor=False)
        self.output = nn.Linear(config.width, num_tokens, bias=False)
        self.output.weight = self.tokens.weight
        _initialise(self, config.layers)

    def forward(self, tokens_NT: Tensor) -> Tensor:
        length = tokens_NT.shape[1]
        if length > self.positions.num_embeddings:
            raise ValueError(f"{length} tokens do not fit in a context of {self.positions.num_embeddings}; cut them")
        x = self.tokens(tokens_NT) + self.positions(torch.arange(length, device=tokens_NT.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device, dtype=x.dtype)
        # `is_causal` only promises what the mask is; PyTorch needs both.
        return self.output(self.layers(self.dropout(x), mask=mask, is_causal=True))


def _initialise(module: GPTModule, layers: int) -> None:
    """Initialise as GPT-2: normal of 0.02, divided by `sqrt(2 * layers)` in layers that add to the residual stream."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            adds = name.endswith(("out_proj.weight", "linear2.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
