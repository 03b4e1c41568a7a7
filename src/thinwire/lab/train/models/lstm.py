"""An LSTM language model whose output layer shares the weights of the embedding.

It has 28,949,319 parameters (110 MiB) with the vocabulary of PowerSGD and PowerGossip, 28,869 words of WikiText-2, and
31,819,578 with the full vocabulary of 33,278 words.

Source: Press and Wolf 2017, Using the Output Embedding to Improve Language Models, arXiv 1608.05859; as trained by
Vogels et al. 2020, PowerGossip, arXiv 2008.01425: 3 layers of 650, dropout 0.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ....options import require_integer, require_number
from .base import Model


@dataclass(frozen=True)
class LSTMLanguageModel(Model):
    """Embedding, LSTM, and a linear layer that shares the embedding's weights.

    Raises:
        ValueError: a size below 1, or a dropout outside [0, 1).
    """

    width: int = 650
    """Numbers in an embedding and in a layer's state; higher => better, slower, more to send."""
    layers: int = 3
    """LSTM layers on top of one another."""
    dropout: float = 0.4
    """Share of numbers set to 0 between layers while training; higher => less overfitting, slower learning."""

    def __post_init__(self):
        for name in ("width", "layers"):
            require_integer(f"model.{name}", getattr(self, name), 1)
        require_number("model.dropout", self.dropout, least=0, below=1)

    def build(self, num_classes: int = 33_278) -> nn.Module:
        """Maps tokens (N, T) to scores (N, T, num_classes) and the state after the last of them."""
        return LSTMModule(num_classes, self.width, self.layers, self.dropout)


class LSTMModule(nn.Module):
    """The network of `LSTMLanguageModel`; state is a pair of (layers, N, width)."""

    def __init__(self, num_words: int, width: int, layers: int, dropout: float):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(num_words, width)
        between = dropout if layers > 1 else 0.0  # PyTorch warns about dropout between layers if there is only one
        self.lstm = nn.LSTM(width, width, layers, dropout=between, batch_first=True)
        self.output = nn.Linear(width, num_words)
        # The layers share it, so it is sent and updated once.
        self.output.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.output.bias)

    def forward(
        self, tokens_NT: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if state is not None:
            state = state[0].detach(), state[1].detach()  # gradients end at the start of the batch
        inputs = self.dropout(self.embedding(tokens_NT))
        if inputs.is_cpu and not cpu_computes_lstms_in_bf16():
            with torch.autocast("cpu", enabled=False):
                hidden, state = self.lstm(inputs.float(), state)
        else:
            hidden, state = self.lstm(inputs, state)
        return self.output(self.dropout(hidden)), state


def cpu_computes_lstms_in_bf16() -> bool:
    """PyTorch's LSTM raises RuntimeError in bf16 on CPUs without AVX-512, even in autocast."""
    return "AVX512" in torch.backends.cpu.get_cpu_capability()
