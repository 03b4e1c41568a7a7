"""Converts text to tokens: words, bytes, or byte-pair subwords with a vocabulary learned from the text.

`tokenizers` trains subword vocabularies. These and encoded text are cached (see `cache`). Files are UTF-8, with one sentence or
paragraph per line.

Source: Sennrich et al. 2016, Neural Machine Translation of Rare Words with Subword Units, arXiv 1508.07909.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....algorithm import require
from .cache import cached, cached_tensors, fingerprint, reading

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
"""First entries of every subword vocabulary; their places are the ids PAD, BOS, EOS and UNK of the Transformer."""
# The encodings of a whole text at once would need many times its memory.
CHUNK_LINES = 20_000


class Ragged(NamedTuple):
    """Concatenated sentences of different lengths.

    Args:
        tokens: (sum of lengths,) int32.
        starts: (N + 1,) int64; sentence i is `tokens[starts[i] : starts[i + 1]]`.
    """

    tokens: Tensor
    starts: Tensor

    @property
    def lengths(self) -> Tensor:
        """(N,) int64."""
        return self.starts.diff()

    def sentence(self, i: int) -> Tensor:
        """Tokens of sentence i."""
        return self.tokens[self.starts[i] : self.starts[i + 1]]


def read_lines(path: Path) -> list[str]:
    """The lines of a text file, without their ends; only a line feed ends a line.

    Raises:
        ValueError: the file is missing, empty, or not UTF-8.
    """
    require(
        path.is_file(),
        f"{path.absolute()} is not there; put the text there, or say where it is: --data.folder, or --data.train",
    )
    raw = path.read_bytes()
    try:
        # Some editors put a byte order mark at the start of a file.
        lines = raw.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path} is not UTF-8: byte 0x{raw[error.start]:02x} in line {line}; convert it, such as with iconv -t utf-8"
        ) from error
    require(any(line.strip() for line in lines), f"{path} has no text in it")
    return lines


def encode_words(train: Path, test: Path, _: int) -> tuple[Tensor, Tensor, int]:
    """Tokens of both files and the size of the vocabulary: words of the training file, `<unk>`, and `<eos>` at line ends.

    Ids follow the order of first appearance. Words of the test file that are not in the training file are `<unk>`.
    """
    ids = {"<unk>": 0, "<eos>": 1}
    first = [ids.setdefault(word, len(ids)) for word in _words(train)]
    # The vocabulary is complete by now: words of the test file add nothing to it.
    second = [ids.get(word, 0) for word in _words(test)]
    return torch.tensor(first, dtype=torch.int32), torch.tensor(second, dtype=torch.int32), len(ids)


def encode_bytes(train: Path, test: Path, _: int) -> tuple[Tensor, Tensor, int]:
    """The bytes of both files, 0..255, and 256."""
    first, second = (torch.from_numpy(np.fromfile(path, dtype=np.uint8)) for path in (train, test))
    return first, second, 256


def encode_subwords(train: Path, test: Path, vocabulary_size: int) -> tuple[Tensor, Tensor, int]:
    """Subwords of both files, and the size of the vocabulary, which is learned from the training file."""
    vocabulary = subwords([train], vocabulary_size)
    first, second = (encode_lines(vocabulary, path).tokens for path in (train, test))
    return first, second, load_subwords(vocabulary).get_vocab_size()


def subwords(paths: list[Path], size: int) -> Path:
    """The file of a byte-pair vocabulary of up to `size` entries, learned from these texts; the same for all workers.

    Text is split at spaces. Subwords keep a mark for a space, so that decoding restores the text.
    """

    def make(path: Path) -> None:
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=list(SPECIAL), show_progress=False)
        tokenizer.train_from_iterator((line for text in paths for line in read_lines(text)), trainer)
        tokenizer.save(str(path))

    return cached("subwords.json", f"{fingerprint(paths)} {size}", make)


def load_subwords(path: Path):
    """The tokenizer of a file that `subwords` returned."""
    from tokenizers import Tokenizer

    with reading(path):
        return Tokenizer.from_file(str(path))


def encode_lines(vocabulary: Path, text: Path) -> Ragged:
    """Every line of a text as subwords, with `<eos>` at its end."""

    def make() -> tuple[Tensor, Tensor]:
        tokenizer = load_subwords(vocabulary)
        end, pieces, lengths = tokenizer.token_to_id("<eos>"), [], [0]
        lines = read_lines(text)
        for first in range(0, len(lines), CHUNK_LINES):
            chunk = lines[first : first + CHUNK_LINES]
            ids = [[*encoding.ids, end] for encoding in tokenizer.encode_batch(chunk, add_special_tokens=False)]
            pieces.append(np.fromiter((i for line in ids for i in line), dtype=np.int32))
            lengths += map(len, ids)
        return torch.from_numpy(np.concatenate(pieces)), torch.tensor(lengths).cumsum(0)

    return Ragged(*cached_tensors("tokens.pt", f"{vocabulary.name} {fingerprint([text])}", make))


def _words(path: Path) -> Iterator[str]:
    for line in read_lines(path):
        yield from line.split()
        yield "<eos>"
