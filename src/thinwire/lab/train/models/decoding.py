"""One token at a time through the decoder of an `nn.Transformer`, keeping the keys and values of what came before.

Decoding token T + 1 afresh would compute all T before it again, as PyTorch's own layers must; kept keys and values make a
step's cost that of one token. The weights are those of the layers; a test holds the result to theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class IncrementalDecoder:
    """The decoder, at work on one batch of sources; not for training.

    Args:
        decoder: of an `nn.Transformer` with `batch_first`, its norms after each sum, in eval mode.
        memory_NSD: the encoder's output.
        padding_NS: True where a source is padded.
    """

    def __init__(self, decoder: nn.TransformerDecoder, memory_NSD: Tensor, padding_NS: Tensor):
        self._decoder, self._seen = decoder, ~padding_NS[:, None, None, :]
        self._memory = [_keys_and_values(layer.multihead_attn, memory_NSD) for layer in decoder.layers]
        self._past: list[tuple[Tensor, Tensor] | None] = [None] * len(decoder.layers)

    def step(self, x_N1D: Tensor) -> Tensor:
        """The decoder's output (N, 1, D) for the next embedded token."""
        for i, layer in enumerate(self._decoder.layers):
            blocks = [
                (layer.norm1, lambda x, i=i, layer=layer: self._look_back(i, layer.self_attn, x)),
                (layer.norm2, lambda x, i=i, layer=layer: self._look_at_source(i, layer.multihead_attn, x)),
                (layer.norm3, lambda x, layer=layer: layer.linear2(layer.activation(layer.linear1(x)))),
            ]
            for norm, block in blocks:
                x_N1D = norm(x_N1D + block(x_N1D))
        return self._decoder.norm(x_N1D)

    def _look_back(self, i: int, attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
        new = _keys_and_values(attention, x)
        if self._past[i] is not None:
            new = tuple(torch.cat(pair, dim=2) for pair in zip(self._past[i], new, strict=True))
        self._past[i] = new
        return _attend(attention, x, *new, None)

    def _look_at_source(self, i: int, attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
        return _attend(attention, x, *self._memory[i], self._seen)


def _keys_and_values(attention: nn.MultiheadAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Each (N, heads, T, D / heads)."""
    width = attention.embed_dim
    both = F.linear(x, attention.in_proj_weight[width:], attention.in_proj_bias[width:])
    return tuple(_by_head(attention, part) for part in both.chunk(2, dim=-1))


def _attend(attention: nn.MultiheadAttention, x: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None) -> Tensor:
    width = attention.embed_dim
    query = _by_head(attention, F.linear(x, attention.in_proj_weight[:width], attention.in_proj_bias[:width]))
    heads = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen)
    return attention.out_proj(heads.transpose(1, 2).flatten(2))


def _by_head(attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
    return x.unflatten(-1, (attention.num_heads, attention.head_dim)).transpose(1, 2)
