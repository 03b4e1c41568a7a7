"""Plain text for language models: one long row of tokens, cut into windows.

Window i holds tokens `i*T .. i*T + T-1`, and its labels are the tokens one further on. Shuffled windows serve a model
that starts afresh with each (a GPT). In order, a worker reads its contiguous part of the text as `batch_size` streams side
by side, and the model's state goes on from each window to the next (an LSTM).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ....algorithm import require
from ....options import require_choice, require_integer
from .base import IGNORE, Batch, Data, Dataset
from .vocabulary import encode_bytes, encode_subwords, encode_words, read_lines

ENCODERS = {"word": encode_words, "byte": encode_bytes, "subword": encode_subwords}


@dataclass(frozen=True)
class PlainText(Data):
    """Two text files in UTF-8, one to learn from and one to test on.

    Raises:
        ValueError: an unknown unit or a value out of range; when loading: a file that is missing, empty or not UTF-8.
    """

    train: Path = Path("data/text/train.txt")
    """Text to learn from."""
    test: Path = Path("data/text/test.txt")
    """Text to test on."""
    unit: str = "word"
    """What a token is: "word", what stands between spaces (and the end of a line); "byte"; "subword", byte-pair encoding."""
    vocabulary_size: int = 8000
    """Subwords in the vocabulary; higher => shorter text, larger model. Words and bytes have as many as there are."""
    context: int = 35
    """Tokens in a window; higher => gradients reach further back, fewer and larger steps."""
    in_order: bool = True
    """Whether windows follow one another, for a model that carries its state; False shuffles them."""

    def __post_init__(self):
        require_choice("data.unit", self.unit, ENCODERS)
        require_integer("data.context", self.context, 1)
        require_integer("data.vocabulary_size", self.vocabulary_size, 300)

    def load(self) -> Text:
        """Both files as tokens, in the vocabulary of the training file."""
        for path in (self.train, self.test):
            read_lines(path)  # what is wrong with a file is said before anything is made of it
        train, test, num_tokens = ENCODERS[self.unit](self.train, self.test, self.vocabulary_size)
        return Text(train, test, num_tokens, self.context, self.in_order)


@dataclass(frozen=True)
class WikiText2(Data):
    """WikiText-2: two million words of Wikipedia, in words as its authors cut them; 33,278 with all of its training part.

    Source: Merity et al. 2017, Pointer Sentinel Mixture Models, arXiv 1609.07843.
    """

    folder: Path = Path("data/wikitext-2")
    """Holds the parts."""
    train: str = "train.txt"
    """File of the part to learn from; "valid.txt" has a tenth of the text, for short runs."""
    test: str = "test.txt"
    """File of the part to test on."""
    context: int = 35
    """Tokens in a window; higher => gradients reach further back, fewer and larger steps."""
    in_order: bool = True
    """Whether windows follow one another, for a model that carries its state; False shuffles them."""

    def load(self) -> Text:
        """Both parts as tokens, in the vocabulary of the training part."""
        train, test = self.folder / self.train, self.folder / self.test
        return PlainText(train, test, "word", context=self.context, in_order=self.in_order).load()


class Text(Dataset):
    """Rows of tokens.

    Args:
        train, test: (L,) integers.
        num_tokens: entries of the vocabulary.
        context: tokens T in a window.
        in_order: whether a model carries its state from window to window.

    Raises:
        ValueError: the training text is shorter than one window and the token after it.

    Example:
        >>> data = Text(torch.arange(9), torch.arange(4), num_tokens=9, context=2, in_order=True)
        >>> plan = data.plan(torch.arange(data.num_examples), batch_size=2)
        >>> [batch.inputs[0].tolist() for batch in data.batches(plan, seed=0, rank=0, epoch=0)]
        [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    """

    metric_names = ("loss", "accuracy", "perplexity")
    best_metric = "perplexity"

    def __init__(self, train: Tensor, test: Tensor, num_tokens: int, context: int, in_order: bool):
        require(
            len(train) > context,
            f"a window of data.context {context} needs {context + 1} training tokens, got {len(train)}",
        )
        require(len(test) > 1, f"the test text needs 2 tokens or more, got {len(test)}")
        self._train, self._test, self._context, self.in_order = train, test, context, in_order
        self.num_classes, self.num_examples = num_tokens, (len(train) - 1) // context

    def batch(self, indices: Tensor, generator: torch.Generator, epoch: int) -> Batch:
        places = indices[:, None] * self._context + torch.arange(self._context)
        return Batch((self._train[places].long(),), self._train[places + 1].long())

    def test_batches(self, rank: int, size: int, batch_size: int) -> Iterator[Batch]:
        # Every worker reads `batch_size` streams of equal length; places past the end of the text don't count.
        num_labels = len(self._test) - 1
        num_windows = -(-num_labels // self._context)
        per_stream = -(-num_windows // (size * batch_size))
        streams = (rank * batch_size + torch.arange(batch_size)) * per_stream
        for j in range(per_stream):
            places = (streams + j)[:, None] * self._context + torch.arange(self._context)
            outside = places >= num_labels
            places = places.clamp(max=num_labels - 1)
            yield Batch((self._test[places].long(),), self._test[places + 1].long().masked_fill(outside, IGNORE))
