"""An encoder-decoder Transformer for translation, based on PyTorch's `nn.Transformer`.

The default is the base model of the paper, whose Table 3 gives 65 million parameters. This one has 63,121,544, with one
vocabulary of 37,000 entries for both languages and the output layer, as in the paper.

Source: Vaswani et al. 2017, Attention Is All You Need, arXiv 1706.03762.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ....algorithm import require
from ....options import require_integer, require_number
from .base import Model
from .decoding import IncrementalDecoder

PAD, BOS, EOS, UNK = range(4)
"""Ids of the special tokens in every vocabulary for translation: padding, begin, end, unknown."""


@dataclass(frozen=True)
class Transformer(Model):
    """Encoder and decoder with sinusoidal positions and one embedding for both languages and the output.

    Raises:
        ValueError: a size below 1, an odd width, a width that heads do not divide, or a dropout outside [0, 1).

    Example:
        >>> import torch
        >>> module = Transformer(layers=1, width=8, heads=2, hidden=16).build(num_classes=11)
        >>> source, target = torch.tensor([[5, 6, EOS]]), torch.tensor([[BOS, 7]])
        >>> module(source, target).shape
        torch.Size([1, 2, 11])
    """

    layers: int = 6
    """Layers of the encoder, and of the decoder."""
    width: int = 512
    """Numbers in a token's vector; higher => better, slower, more to send."""
    heads: int = 8
    """Attention heads; each has an equal part of the width."""
    hidden: int = 2048
    """Width of the layer inside each feed-forward block."""
    dropout: float = 0.1
    """Share of numbers set to 0 while training; higher => less overfitting, slower learning."""

    def __post_init__(self):
        for name in ("layers", "width", "heads", "hidden"):
            require_integer(f"model.{name}", getattr(self, name), 1)
        require(self.width % 2 == 0, f"model.width must be even, got {self.width}")
        require(self.width % self.heads == 0, f"model.heads must divide model.width {self.width}, got {self.heads}")
        require_number("model.dropout", self.dropout, least=0, below=1)

    def build(self, num_classes: int = 37_000) -> nn.Module:
        """Maps sources (N, S) and targets so far (N, T), padded at the end, to scores (N, T, num_classes)."""
        return TransformerModule(self, num_classes)


class TransformerModule(nn.Module):
    """The network of `Transformer`."""

    def __init__(self, config: Transformer, num_tokens: int):
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.transformer = nn.Transformer(
            d_model=config.width,
            nhead=config.heads,
            num_encoder_layers=config.layers,
            num_decoder_layers=config.layers,
            dim_feedforward=config.hidden,
            dropout=config.dropout,
            batch_first=True,
        )
        self.transformer.encoder.use_nested_tensor = False  # a prototype, about which PyTorch warns
        self.output = nn.Linear(config.width, num_tokens)
        # One matrix for all, as in section 3.4 of the paper.
        self.output.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=config.width**-0.5)
        nn.init.zeros_(self.output.bias)

    def forward(self, source_NS: Tensor, target_NT: Tensor) -> Tensor:
        length = target_NT.shape[1]
        # Targets are padded at their end, where the causal mask hides the padding from every counted position.
        hidden = self.transformer.decoder(
            self._embed(target_NT),
            self.encode(source_NS),
            tgt_mask=torch.ones(length, length, dtype=torch.bool, device=target_NT.device).triu(1),
            tgt_is_causal=True,
            memory_key_padding_mask=source_NS == PAD,
        )
        return self.output(hidden)

    def encode(self, source_NS: Tensor) -> Tensor:
        """The encoder's output for the sources: (N, S, width)."""
        return self.transformer.encoder(self._embed(source_NS), src_key_padding_mask=source_NS == PAD)

    @torch.no_grad()
    def translate(self, source_NS: Tensor, num_extra: int = 20) -> Tensor:
        """Greedy translations (N, T) up to EOS, padded with PAD; the module must be in eval mode.

        Args:
            source_NS: sources, padded at the end.
            num_extra: the number of tokens by which a translation may exceed its source.
        """
        padding = source_NS == PAD
        decoder = IncrementalDecoder(self.transformer.decoder, self.encode(source_NS), padding)
        limits = (~padding).sum(dim=1) + num_extra
        token = source_NS.new_full((len(source_NS),), BOS)
        ended = torch.zeros_like(token, dtype=torch.bool)
        tokens: list[Tensor] = []
        while not ended.all():
            scores = self.output(decoder.step(self._embed(token[:, None], len(tokens)))[:, 0])
            token = scores.argmax(dim=-1).masked_fill(ended, PAD)
            tokens.append(token)
            ended |= (token == EOS) | (len(tokens) >= limits)
        return torch.stack(tokens, dim=1)

    def _embed(self, tokens_NT: Tensor, first: int = 0) -> Tensor:
        width = self.embedding.embedding_dim
        x = self.embedding(tokens_NT)
        positions = sinusoids(first + tokens_NT.shape[1], width, x)[first:]
        return self.dropout(math.sqrt(width) * x + positions)


def sinusoids(length: int, width: int, like: Tensor) -> Tensor:
    """Positions (length, width): `sin` and `cos` of `position / 10000^(2i/width)` in alternate columns.

    Example:
        >>> [[round(v, 3) for v in row] for row in sinusoids(2, 2, torch.zeros(1)).tolist()]
        [[0.0, 1.0], [0.841, 0.54]]
    """
    position = torch.arange(length, device=like.device, dtype=torch.float32)
    rate = torch.exp(torch.arange(0, width, 2, device=like.device) * (-math.log(10_000) / width))
    angle = position[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).to(like.dtype)
