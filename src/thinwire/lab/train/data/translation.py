"""Sentence pairs for translation: one line of each file is a translation of the same line of the other.

Both languages share one byte-pair vocabulary. Pairs of similar length are grouped once into batches of up to `max_tokens`
tokens, padding included. Such a batch is one example: shares and epochs shuffle batches.

Source: Vaswani et al. 2017, arXiv 1706.03762 (batches by tokens); BLEU: Papineni et al. 2002, as computed by sacreBLEU
(Post 2018, arXiv 1804.08771) on text as it is written, with its default tokens ("13a").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ....algorithm import require
from ....options import require_integer
from ..models.transformer import BOS, PAD, TransformerModule
from .base import IGNORE, Batch, Data, Dataset
from .vocabulary import Ragged, encode_lines, load_subwords, read_lines, subwords


@dataclass(frozen=True)
class ParallelText(Data):
    """Files `<folder>/<part>.<language>`, such as Multi30k's or WMT's.

    Raises:
        ValueError: a value out of range; when loading: files that are missing, not UTF-8, or of different lengths.
    """

    folder: Path = Path("data/multi30k")
    """Folder of the files."""
    train: str = "train"
    """Part for training."""
    test: str = "test_2016_flickr"
    """Part for testing."""
    source: str = "en"
    """Language to translate from."""
    target: str = "de"
    """Language to translate to."""
    vocabulary_size: int = 8000
    """Subwords in the vocabulary of both languages; higher => shorter sentences, larger model."""
    max_tokens: int = 4096
    """Tokens of the longer side in a batch, padding included; higher => fewer and larger steps."""
    max_length: int = 128
    """Most tokens in a training sentence; longer pairs are left out."""

    def __post_init__(self):
        require_integer("data.vocabulary_size", self.vocabulary_size, 300)
        require_integer("data.max_length", self.max_length, 1, self.max_tokens, hint="; the most are data.max_tokens")

    def load(self) -> Pairs:
        """All sentences as subwords."""
        files = [
            [self.folder / f"{part}.{side}" for side in (self.source, self.target)] for part in (self.train, self.test)
        ]
        for pair in files:
            check_pair(*pair)
        vocabulary = subwords(files[0], self.vocabulary_size)
        train, test = ([encode_lines(vocabulary, path) for path in pair] for pair in files)
        return Pairs(self, vocabulary, train, test, read_lines(files[1][1]))


class Pairs(Dataset):
    """The data set that `ParallelText` loads.

    Inputs of a batch are sources (N, S), which end in EOS, and targets (N, T), which start with BOS. Labels are the targets
    from their first word to EOS. All are padded at the end.
    """

    metric_names = ("loss", "accuracy", "perplexity", "bleu")
    best_metric = "bleu"

    def __init__(
        self, config: ParallelText, vocabulary: Path, train: list[Ragged], test: list[Ragged], references: list[str]
    ):
        self._train, self._test, self._references = train, test, references
        self._tokenizer = load_subwords(vocabulary)
        sources, targets = train
        self._batches = batches_by_tokens(sources.lengths, targets.lengths, config.max_tokens, config.max_length)
        fit = f"no training pair of {config.folder} has {config.max_length} tokens or fewer; raise data.max_length"
        require(len(self._batches) > 0, fit)
        self.num_classes, self.num_examples = self._tokenizer.get_vocab_size(), len(self._batches)

    def batch(self, indices: Tensor, generator: torch.Generator, epoch: int) -> Batch:
        return _batch(self._train, torch.cat([self._batches[i] for i in indices.tolist()]))

    def test_batches(self, rank: int, size: int, batch_size: int) -> Iterator[Batch]:
        return (_batch(self._test, part) for part in self._test_parts(rank, size, batch_size))

    def evaluate(self, module: nn.Module, rank: int, size: int, batch_size: int) -> Tensor:
        """The four sums of every data set, then the ten sums for BLEU: (14,) float64.

        Args:
            batch_size: sentences in a batch.
        """
        sums_4 = super().evaluate(module, rank, size, batch_size)
        return torch.cat([sums_4, self._bleu_sums(module, rank, size, batch_size)])

    def metrics(self, sums_K: Tensor) -> dict[str, float]:
        """Metrics of the sums; with BLEU (0..100) if they come from `evaluate`."""
        return super().metrics(sums_K) | ({"bleu": bleu(sums_K[4:])} if len(sums_K) > 4 else {})

    def translate(self, module: nn.Module, source_NS: Tensor) -> list[str]:
        """Translate greedily, and return sentences as text."""
        tokens = cast(TransformerModule, module).translate(source_NS)  # no other model is for this data
        return self._tokenizer.decode_batch([row[row != PAD].tolist() for row in tokens.cpu()])

    def _bleu_sums(self, module: nn.Module, rank: int, size: int, batch_size: int) -> Tensor:
        device, ours, theirs = next(module.parameters()).device, [], []
        for part in self._test_parts(rank, size, batch_size):
            ours += self.translate(module, _batch(self._test, part).inputs[0].to(device))
            # In the order of our translations, which are sorted by length.
            theirs += [self._references[i] for i in part.tolist()]
        return bleu_sums(ours, theirs)

    def _test_parts(self, rank: int, size: int, batch_size: int) -> list[Tensor]:
        # By length, so that a batch has little padding; distributed one by one, so that all workers have equal work.
        order = self._test[0].lengths.argsort(stable=True)[rank::size]
        return [part for part in order.split(batch_size) if len(part)]


def check_pair(source: Path, target: Path) -> None:
    """Check that two files have the same number of lines, as translations of each other have.

    Raises:
        ValueError: they do not, or cannot be read.
    """
    lines = [len(read_lines(path)) for path in (source, target)]
    require(
        lines[0] == lines[1],
        f"{source} and {target} must have a line for each of the other's, got {lines[0]:,} and {lines[1]:,} lines",
    )


def batches_by_tokens(source_lengths: Tensor, target_lengths: Tensor, max_tokens: int, max_length: int) -> list[Tensor]:
    """Group pairs of similar length; `batch size * longest sentence of either side` is at most `max_tokens`.

    Args:
        source_lengths, target_lengths: (N,) int64.
        max_tokens: tokens in a batch.
        max_length: pairs with a longer side are left out, and so are those with an empty side (of EOS alone).

    Returns:
        Indices of pairs, batch by batch.

    Example:
        >>> lengths = torch.tensor([3, 9, 3, 2, 5])
        >>> [batch.tolist() for batch in batches_by_tokens(lengths, lengths, max_tokens=9, max_length=8)]
        [[3, 0, 2], [4]]
    """
    longest = torch.maximum(source_lengths, target_lengths)
    # By the longer side, then by the source, so that neighbours need little padding.
    order = (longest * (max_length + 1) + source_lengths.clamp(max=max_length)).argsort(stable=True)
    used = (longest <= max_length) & (torch.minimum(source_lengths, target_lengths) > 1)
    order = order[used[order]]
    batches, first = [], 0
    for i, length in enumerate(longest[order].tolist()):
        if (i + 1 - first) * length > max_tokens:  # lengths ascend, so the last is the longest of the batch
            batches.append(order[first:i])
            first = i
    return batches + [order[first:]] * (first < len(order))


def bleu_sums(ours: list[str], theirs: list[str]) -> Tensor:
    """The sums for BLEU, (10,) float64: matching n-grams and all n-grams for n = 1..4, and both lengths.

    They may be added over workers. An empty list gives zeros.
    """
    from sacrebleu.metrics import BLEU

    if not ours:
        return torch.zeros(10, dtype=torch.float64)
    score = BLEU().corpus_score(ours, [theirs])
    return torch.tensor([*score.counts, *score.totals, score.sys_len, score.ref_len], dtype=torch.float64)


def bleu(sums_10: Tensor) -> float:
    """BLEU, 0..100, from the sums of all workers."""
    from sacrebleu.metrics import BLEU

    *ngrams, ours, theirs = [int(value) for value in sums_10.tolist()]
    # Smoothing "exp" is the default of sacreBLEU.
    return BLEU.compute_bleu(ngrams[:4], ngrams[4:], ours, theirs, smooth_method="exp").score


def _batch(sides: list[Ragged], indices: Tensor) -> Batch:
    sources, targets = ([side.sentence(i).long() for i in indices.tolist()] for side in sides)
    begin = torch.tensor([BOS])
    inputs = _padded(sources, PAD), _padded([torch.cat([begin, target[:-1]]) for target in targets], PAD)
    return Batch(inputs, _padded(targets, IGNORE))


def _padded(rows: list[Tensor], value: int) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=value)
