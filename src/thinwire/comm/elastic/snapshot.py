"""The state of a worker as others get it: sections, cut into chunks with hashes.

    section     a part of the state, such as the model, as bytes (`state_bytes.py`)
    chunk       at most `CHUNK_BYTES` of a section: first those of its description, then those of its tensors, which so lie at
                the same places after every round
    manifest    number of bytes (8, little-endian), bytes of the description (8), then the SHA-256 of each chunk (32 each)
    root        the SHA-256 of the names and manifests of the sections that are the same on all workers

A snapshot is taken when a round begins with a worker that must be healed, on all workers that are up to date. A listener
(`tls/connections.py`) serves it while the round lasts. It answers

    "manifests", key, name, ...   -> "ok", the manifest of each section; empty if there is none of this name. Then the chunks of
                                     those of at most `SMALL_BYTES`, each of which would take a round trip by itself
    "chunk", key, name, number    -> "ok", the bytes
    "steps", key                  -> "ok", how many steps this worker has taken since the round began

or else "wait": its round has not begun yet; "gone": the round has ended; "failed": it cannot save its state.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from torch import Tensor

from ..compare import hashes
from .state_bytes import tensors_begin

CHUNK_BYTES, SMALL_BYTES = 1 << 20, 1 << 14
HASH_BYTES = 32
SIZES = struct.Struct("<QQ")
OK, WAIT, GONE, FAILED = b"ok", b"wait", b"gone", b"failed"
MAX_KEYS = 100  # of rounds that have ended


class Manifest(NamedTuple):
    """What a section consists of.

    Args:
        num_bytes: of the section.
        first: bytes of its description.
        hashes: SHA-256 of each chunk, one after the other.

    Example:
        >>> import torch
        >>> from thinwire.comm.elastic.state_bytes import packed
        >>> manifest = Manifest.of(packed({"weights": torch.zeros(1 << 19)}))
        >>> manifest.num_chunks, Manifest.parsed(manifest.data()) == manifest
        (4, True)
    """

    num_bytes: int
    first: int
    hashes: bytes

    @classmethod
    def of(cls, section: Tensor) -> Manifest:
        """The manifest of a section, (n,) uint8."""
        bare = cls(len(section), min(tensors_begin(section), len(section)), b"")
        return bare._replace(hashes=b"".join(hashes(section[bare.place(number)] for number in range(bare.num_chunks))))

    @classmethod
    def parsed(cls, data: bytes) -> Manifest:
        """The manifest that came from another worker.

        Raises:
            ValueError: it is none.
        """
        if len(data) < SIZES.size:
            raise ValueError(f"a manifest of {len(data)} bytes")
        num_bytes, first = SIZES.unpack_from(data)
        manifest = cls(num_bytes, first, data[SIZES.size :])
        expected = HASH_BYTES * manifest.num_chunks
        if not 0 < manifest.first <= manifest.num_bytes or len(manifest.hashes) != expected:
            raise ValueError(f"a manifest of {manifest.num_bytes} bytes has {len(manifest.hashes)} bytes of hashes")
        return manifest

    def data(self) -> bytes:
        """The manifest as bytes."""
        return SIZES.pack(self.num_bytes, self.first) + self.hashes

    @property
    def num_chunks(self) -> int:
        """How many chunks there are."""
        return sum(map(len, self._begins()))

    def place(self, number: int) -> slice:
        """Where a chunk lies in the section."""
        head, rest = self._begins()
        begin, end = (head[number], self.first) if number < len(head) else (rest[number - len(head)], self.num_bytes)
        return slice(begin, min(begin + CHUNK_BYTES, end))

    def _begins(self) -> tuple[range, range]:
        """Where the chunks of the description begin, and those of the tensors."""
        return range(0, self.first, CHUNK_BYTES), range(self.first, self.num_bytes, CHUNK_BYTES)

    def hash(self, number: int) -> bytes:
        """The SHA-256 of a chunk."""
        return self.hashes[HASH_BYTES * number : HASH_BYTES * (number + 1)]


def root_of(manifests: Mapping[str, Manifest], names: Iterable[str]) -> str:
    """One hash for these sections of a state, as hexadecimal digits."""
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(hashlib.sha256(name.encode()).digest() + hashlib.sha256(manifests[name].data()).digest())
    return digest.hexdigest()


Section: TypeAlias = "Tensor | Callable[[], Tensor]"


class Snapshots:
    """Serves the snapshot of the present round, if somebody is healed in it.

    Attributes:
        steps: that this worker has taken since the round began.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key, self._sections = b"", dict[str, Section]()
        self._manifests: dict[str, Manifest] = {}
        self._ended: deque[bytes] = deque(maxlen=MAX_KEYS)
        self.steps = 0

    def offer(self, key: str, sections: Mapping[str, Section]) -> None:
        """Serve these sections, whatever was served before.

        Args:
            key: name of the round, which no other round has.
            sections: by name, or what makes one when it is asked for; none if this worker cannot save its state.
        """
        self.drop()
        with self._lock:
            self._key, self._sections, self._manifests, self.steps = key.encode(), dict(sections), {}, 0

    def drop(self) -> None:
        """Serve nothing more."""
        with self._lock:
            if self._key:
                # A joiner that asks later learns that the round has ended, and does not wait for it.
                self._ended.append(self._key)
            self._key, self._sections, self._manifests = b"", {}, {}

    def answer(self, question: list[bytes]) -> list[bytes]:
        """The answer to a question of a worker that is healed.

        Raises:
            ValueError: it is none.
        """
        what, key, *rest = question
        with self._lock:
            if key != self._key or not key:
                return [GONE if key in self._ended else WAIT]
            sections, answer = self._sections, [OK]
            if not sections:
                return [FAILED]
            if what == b"manifests":  # the training does not wait for the hashes
                names = [name.decode() for name in rest]
                if len({*names}) < len(names):  # else a short question would have an answer of gigabytes
                    raise ValueError(f"{len(names)} names, and some of them twice")
                for name in names:
                    if name in sections and name not in self._manifests:
                        self._manifests[name] = Manifest.of(self._section(name))
                answer += [self._manifests[name].data() if name in sections else b"" for name in names]
                for name in names:
                    if name in sections and self._manifests[name].num_bytes <= SMALL_BYTES:
                        answer += [self._chunk(name, number) for number in range(self._manifests[name].num_chunks)]
            elif what == b"steps":
                answer.append(str(self.steps).encode())
            elif what == b"chunk":
                name, number = rest[0].decode(), int(rest[1])
                if name not in self._manifests or not 0 <= number < self._manifests[name].num_chunks:
                    raise ValueError(f"no chunk {number} of {name[:80]!r}")
                answer.append(self._chunk(name, number))
            else:
                raise ValueError(f"unknown question {what[:80]!r}")
        return answer

    def _chunk(self, name: str, number: int) -> bytes:
        return self._section(name)[self._manifests[name].place(number)].numpy().tobytes()

    def _section(self, name: str) -> Tensor:
        section = self._sections[name]
        if not isinstance(section, Tensor):
            self._sections[name] = section = section()
        return section
