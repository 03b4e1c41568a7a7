"""Functions that run on the device, shared by the kernels: segments, random numbers, bit packing, ordered sums.

A kernel works on a *tile*: rows of `WIDTH` elements, a power of two; the first `SIZE` of each row are elements of the
segment, so that a row can be a bucket of any size. `SIZE` is a multiple of 8: a row's codes fill whole bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find(first, count, item):
    """The segment of a program: the last i < count with first[i] <= item."""
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(first + middle) <= item:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def find_segment(rows, num_segments):
    """This program's segment, and its tile there; row 0 of the table has the first tile of each segment."""
    program = tl.program_id(0)
    segment = find(rows, num_segments, program)
    return segment, program - tl.load(rows + segment)


@triton.jit
def load_pointer(entry, VECTOR: tl.constexpr):
    """A segment's address from its entry in a table, as a pointer to float32; for `VECTOR` see `launch.by_alignment`."""
    pointer = tl.load(entry).to(tl.pointer_type(tl.float32))
    if VECTOR > 1:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def load_size(entry, VECTOR: tl.constexpr):
    """A segment's number of elements from its entry in a table."""
    size = tl.load(entry)
    if VECTOR > 1:
        size = tl.multiple_of(size, VECTOR)
    return size


@triton.jit
def magnitude(x):
    """The bits of |x| as int32; as integers, NaN > infinity > finite."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def is_finite(x):
    return magnitude(x) < 0x7F800000


@triton.jit
def negated(x):
    """-x. Triton's own minus subtracts from 0, so that it makes 0 of 0."""
    return (x.to(tl.uint32, bitcast=True) ^ 0x80000000).to(tl.float32, bitcast=True)


@triton.jit
def one_nan(x):
    """x, with the NaN that is sent in place of every NaN."""
    bits = tl.where(magnitude(x) > 0x7F800000, 0x7FC00000, x.to(tl.int32, bitcast=True))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def hash_of(key, positions):
    """32 random bits for each position (uint32), of a 64-bit key; `kernels.random.hash_of`."""
    # All arithmetic is modulo 2^32, so every operand must be uint32.
    h = positions * tl.full([], 0x9E3779B9, tl.uint32) + key.to(tl.uint32)
    h = (h ^ (h >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    h = h ^ (h >> 15) ^ (key >> 32).to(tl.uint32)
    h = h * tl.full([], 0x846CA68B, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def uniform(key, positions):
    """Numbers in [0, 1) for each position (uint32), multiples of 2^-24; `kernels.uniform`."""
    return (hash_of(key, positions) >> 8).to(tl.float32) * (2.0**-24)


@triton.jit
def load_floats(address, index, mask, ALIGNED: tl.constexpr):
    """float32 numbers at `address + 4 index`, an address of any alignment; 0 where masked."""
    if ALIGNED:
        values = tl.load(address.to(tl.pointer_type(tl.float32)) + index, mask=mask, other=0.0)
    else:
        bits = tl.zeros(index.shape, tl.uint32)
        for i in tl.static_range(4):
            # int64, because four times an index may exceed an int32.
            byte = tl.load(address + 4 * index.to(tl.int64) + i, mask=mask, other=0)
            bits = bits | (byte.to(tl.uint32) << (8 * i))
        values = bits.to(tl.float32, bitcast=True)
    return values


@triton.jit
def store_floats(address, index, values, mask, ALIGNED: tl.constexpr):
    """Store float32 numbers at `address + 4 index`, an address of any alignment."""
    if ALIGNED:
        tl.store(address.to(tl.pointer_type(tl.float32)) + index, values, mask=mask)
    else:
        bits = values.to(tl.uint32, bitcast=True)
        for i in tl.static_range(4):
            tl.store(address + 4 * index.to(tl.int64) + i, ((bits >> (8 * i)) & 0xFF).to(tl.uint8), mask=mask)


CHUNK = tl.constexpr(128)  # elements of a row that a warp loads at once, four in each thread


@triton.jit
def tile_offsets(
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, EVERY: tl.constexpr = 1, BITS: tl.constexpr = 8
):
    """Where every `EVERY`-th element of a tile lies, relative to the first, and whether it is one; one-dimensional.

    First come the first chunks of all rows, then the second ones, so that a warp has few rows. The unit is eight bits, of
    `BITS` for each element; by default, an element.
    """
    LENGTH: tl.constexpr = CHUNK if WIDTH > CHUNK else WIDTH
    item = tl.arange(0, ROWS * WIDTH // EVERY)
    line = item // (LENGTH // EVERY)
    row = line % ROWS
    chunk = line // ROWS
    group = item % (LENGTH // EVERY)
    inside = chunk * (LENGTH // EVERY) + group < SIZE // EVERY
    # Without a division the compiler sees which addresses are neighbours.
    group = group * (EVERY * BITS // 8) if EVERY * BITS % 8 == 0 else group * (EVERY * BITS) // 8
    return row * (SIZE * BITS // 8) + (chunk * (LENGTH * BITS // 8) + group), inside


@triton.jit
def by_row(x, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Elements of a tile in the shape (chunks, ROWS, elements of a chunk), so that (1, ROWS, 1) broadcasts."""
    LENGTH: tl.constexpr = CHUNK if WIDTH > CHUNK else WIDTH
    return tl.reshape(x, (WIDTH // LENGTH, ROWS, LENGTH))


@triton.jit
def flat(x, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Undo `by_row`."""
    return tl.reshape(x, (ROWS * WIDTH,))


@triton.jit
def position_of(start, offset):
    """Positions in the segment as uint32, the counters of the random numbers."""
    return start.to(tl.uint32) + offset.to(tl.uint32)


@triton.jit
def store_codes(
    address,
    codes,
    nbytes,
    WORDS: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Pack the codes (int32, 0 where there is no element) of a tile, the lowest bit first.

    Args:
        address: of the tile's first byte.
        codes: in the order of `tile_offsets`.
        nbytes: bytes from there to the end of the segment's codes.
        WORDS: whether the address and `nbytes` are multiples of 4.
    """
    PER: tl.constexpr = 8 // BITS if 8 % BITS == 0 else 1 if BITS == 16 else 8  # codes that fill whole bytes
    offset, inside = tile_offsets(SIZE, WIDTH, ROWS, PER, BITS)
    if 8 % BITS == 0:
        shifts = tl.arange(0, PER) * BITS
        packed = tl.sum(tl.reshape(codes, (ROWS * WIDTH // PER, PER)) << shifts[None, :], axis=1)
        tl.store(address + offset, packed.to(tl.uint8), mask=inside & (offset < nbytes))
    elif BITS == 16:
        mask = inside & (offset < nbytes)
        if WORDS:
            words = address.to(tl.pointer_type(tl.uint16))
            tl.store(words + tile_offsets(SIZE, WIDTH, ROWS)[0], codes.to(tl.uint16), mask=mask)
        else:
            tl.store(address + offset, (codes & 0xFF).to(tl.uint8), mask=mask)
            tl.store(address + offset + 1, (codes >> 8).to(tl.uint8), mask=mask)
    else:
        # Eight codes fill BITS bytes, which one or two 64-bit words hold.
        groups = tl.reshape(codes, (ROWS * WIDTH // 8, 8)).to(tl.uint64)
        shifts = (tl.arange(0, 8) * BITS)[None, :].to(tl.uint64)
        byte = tl.arange(0, 8)[None, :]
        for word in tl.static_range((BITS + 7) // 8):
            if word == 0:
                # A shift by 64 or more is undefined, so `& 63` bounds it where `where` drops the result.
                parts = tl.where(shifts < 64, groups << (shifts & 63), 0)
            else:
                whole = tl.where(shifts >= 64, groups << (shifts & 63), 0)
                split = (shifts < 64) & (shifts + BITS > 64)
                parts = whole | tl.where(split, groups >> ((64 - shifts) & 63), 0)
            # The fields do not overlap, so that their sum joins them.
            packed = tl.sum(parts, axis=1)[:, None] >> (8 * byte).to(tl.uint64)
            at = byte + 8 * word
            place = offset[:, None] + at
            mask = inside[:, None] & (at < BITS) & (place < nbytes)
            tl.store(address + place, (packed & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def load_codes(
    address,
    nbytes,
    WORDS: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Undo `store_codes`: int32 in the order of `tile_offsets`, 0 where there is no byte.

    A thread loads the codes of its neighbouring elements in one word, so that no codes move between threads.
    """
    # Four codes begin at multiples of this many bits, so at one of the bits 0 to 8 - STEP of a byte.
    STEP: tl.constexpr = 8 if BITS % 2 == 0 else 4
    NBYTES: tl.constexpr = (4 * BITS + 8 - STEP + 7) // 8
    # A load takes this many bytes: those of four codes, or four where there are more.
    UNIT: tl.constexpr = (4 if BITS > 8 else BITS // 2) if WORDS and 16 % BITS == 0 and BITS > 1 else 1
    TYPE: tl.constexpr = tl.uint32 if UNIT == 4 else tl.uint16 if UNIT == 2 else tl.uint8
    offset = tile_offsets(SIZE, WIDTH, ROWS, 4, BITS)[0]
    word = tl.zeros(offset.shape, tl.uint32 if NBYTES <= 4 else tl.uint64)
    for i in tl.static_range(0, NBYTES, UNIT):
        part = tl.load((address + offset + i).to(tl.pointer_type(TYPE)), mask=offset + i < nbytes, other=0)
        word = word | (part.to(word.dtype) << (8 * i))
    if STEP < 8:
        first_bit = tl.arange(0, ROWS * WIDTH // 4) * (4 * BITS) % 8
        word = word >> first_bit.to(word.dtype)
    even = tl.join(_field(word, 0, BITS), _field(word, 2, BITS))
    odd = tl.join(_field(word, 1, BITS), _field(word, 3, BITS))
    return tl.reshape(tl.join(even, odd), (ROWS * WIDTH,))


@triton.jit
def _field(word, i: tl.constexpr, BITS: tl.constexpr):
    """The code of number i in a word, as int32."""
    return ((word >> (i * BITS)) & ((1 << BITS) - 1)).to(tl.int32)


@triton.constexpr_function
def log2(n: int) -> int:
    """The logarithm of a power of two."""
    return n.bit_length() - 1


@triton.jit
def halve(sums, ROWS: tl.constexpr, WIDTH: tl.constexpr, LEFT: tl.constexpr = 1):
    """Sum each of ROWS rows of WIDTH by adding its second half to its first until LEFT are left; (ROWS * LEFT,).

    WIDTH and LEFT are powers of two.
    """
    # A sum of two is the same in either order, so `tl.sum` may be used for a pair.
    for i in tl.static_range(log2(WIDTH // LEFT)):
        sums = tl.sum(tl.reshape(sums, (ROWS, 2, WIDTH >> (i + 1))), axis=1)
    return tl.reshape(sums, (ROWS * LEFT,))


@triton.jit
def sums_of_squares(x, numel, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """The sum of squares in float64 of each of ROWS rows of SIZE elements, in the order of `kernels.scales.tree_sum`.

    Args:
        x: pointer to the first row.
        numel: elements from there to the end of the segment.
    """
    BLOCKS: tl.constexpr = WIDTH // 1024 if WIDTH > 1024 else 1
    STEPS: tl.constexpr = 32 if WIDTH > 1024 else (WIDTH // 32 if WIDTH > 32 else 1)
    block = tl.arange(0, ROWS * BLOCKS)[:, None]
    column = (block % BLOCKS) * 1024 + tl.arange(0, 32)[None, :]
    offset = (block // BLOCKS) * SIZE + column
    lanes = tl.zeros((ROWS * BLOCKS, 32), tl.float64)
    for i in range(STEPS):
        inside = (column + 32 * i < SIZE) & (offset + 32 * i < numel)
        # A second read, which the cache serves: the order of the sum needs rows of 32 lanes.
        value = tl.load(x + offset + 32 * i, mask=inside, other=0.0).to(tl.float64)
        lanes += value * value
    return halve(tl.reshape(halve(lanes, ROWS * BLOCKS, 32), (ROWS, BLOCKS)), ROWS, BLOCKS)


@triton.jit
def root(sums):
    """The smallest float32 whose square is at least the sum (float64); `kernels.scales.root`."""
    roots = tl.sqrt(sums).to(tl.float32)
    wide = roots.to(tl.float64)
    roots = tl.where(wide * wide < sums, next_float(roots, 1), roots)
    below = next_float(roots, -1)
    wide = below.to(tl.float64)
    return tl.where(wide * wide >= sums, below, roots)


@triton.jit
def next_float(x, STEP: tl.constexpr):
    return (x.to(tl.int32, bitcast=True) + STEP).to(tl.float32, bitcast=True)


@triton.jit
def scale_of_sums(sums, least, most):
    """The scale that is stored for a sum of squares: its root, kept in range."""
    finite = (sums.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF) < 0x7FF0000000000000
    roots = root(tl.where(finite, sums, 0.0))
    return in_range(tl.where(finite, at_most_largest(roots), sums.to(tl.float32)), least, most)


@triton.jit
def scale_of_magnitude(largest, least, most):
    """The scale that is stored for the bits of the largest magnitude."""
    scale = largest.to(tl.float32, bitcast=True)
    return in_range(tl.where(largest < 0x7F800000, at_most_largest(scale), scale), least, most)


@triton.jit
def at_most_largest(scale):
    """A finite scale, at most `kernels.scales.MAX_SCALE`: bits of floats that are not negative ascend like floats."""
    bits = scale.to(tl.int32, bitcast=True)
    return tl.where(bits > 0x7F7FF800, 0x7F7FF800, bits).to(tl.float32, bitcast=True)


@triton.jit
def in_range(scale, least, most):
    """One NaN for every NaN, 0 below `least`, and infinity above `most`."""
    return one_nan(tl.where(scale < least, 0.0, tl.where(scale > most, float("inf"), scale)))
