"""Incremental decoding with an `nn.Transformer`: one token at a time, with the keys and values of earlier tokens kept.

PyTorch's own layers compute all T earlier tokens again for token T + 1. With kept keys and values, a step costs one token.
The weights are those of the layers; a test compares the results.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class IncrementalDecoder:
    """Decodes one batch of sources; not for training.

    Args:
        decoder: the decoder of an `nn.Transformer` with `batch_first` and `norm_first=False`, in eval mode.
        memory_NSD: the encoder's output.
        padding_NS: True where a source is padded.
    """

    def __init__(self, decoder: nn.TransformerDecoder, memory_NSD: Tensor, padding_NS: Tensor):
        self._seen = ~padding_NS[:, None, None, :]
        self._memory = [_keys_and_values(layer.multihead_attn, memory_NSD) for layer in decoder.layers]
        assert decoder.norm is not None, "the decoder of an `nn.Transformer` ends in a norm"
        self._norm = decoder.norm
        # A `ModuleList` does not know the type of its modules.
        self._layers = [cast(nn.TransformerDecoderLayer, layer) for layer in decoder.layers]
        self._past: list[tuple[Tensor, Tensor] | None] = [None] * len(decoder.layers)

    def step(self, x_N1D: Tensor) -> Tensor:
        """The decoder's output (N, 1, D) for the next embedded token."""
        x = x_N1D
        for i, layer in enumerate(self._layers):
            x = layer.norm1(x + self._look_back(i, layer.self_attn, x))
            x = layer.norm2(x + _attend(layer.multihead_attn, x, *self._memory[i], self._seen))
            x = layer.norm3(x + layer.linear2(layer.activation(layer.linear1(x))))
        return self._norm(x)

    def _look_back(self, i: int, attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
        keys, values = _keys_and_values(attention, x)
        past = self._past[i]
        if past is not None:
            keys, values = torch.cat((past[0], keys), dim=2), torch.cat((past[1], values), dim=2)
        self._past[i] = keys, values
        return _attend(attention, x, keys, values, None)


def _keys_and_values(attention: nn.MultiheadAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Each (N, heads, T, D / heads)."""
    width = attention.embed_dim
    # One matrix has the weights of queries, keys and values, in this order.
    both = F.linear(x, attention.in_proj_weight[width:], attention.in_proj_bias[width:])
    keys, values = both.chunk(2, dim=-1)
    return _by_head(attention, keys), _by_head(attention, values)


def _attend(attention: nn.MultiheadAttention, x: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None) -> Tensor:
    width = attention.embed_dim
    query = _by_head(attention, F.linear(x, attention.in_proj_weight[:width], attention.in_proj_bias[:width]))
    heads = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen)
    return attention.out_proj(heads.transpose(1, 2).flatten(2))


def _by_head(attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
    return x.unflatten(-1, (attention.num_heads, attention.head_dim)).transpose(1, 2)
