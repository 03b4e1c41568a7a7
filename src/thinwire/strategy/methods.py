"""Methods of training across the internet, put together: strategies of local updates, or of gradients.

With n elements, W workers and H steps between rounds, plain float32 gradients cost a worker `2 (W-1)/W 4n` bytes a step. Each
function says what its method costs instead.
"""

from __future__ import annotations

from ..average import Dion, Mean, Mix
from ..codec import DCT, QSGD, BinMeans, BlockwiseTopK, Float4, Tiles, chain
from ..memory import ErrorFeedback, SignDescent
from ..options import require_integer, require_number
from ..topology import RandomPairs
from .gradients.gradients import Gradients
from .local.local import Local
from .local.outer_sgd import OuterSGD
from .local.quorum import Quorum


def diloco(every: int = 30, lr: float = 0.7, momentum: float = 0.9) -> Local:
    """DiLoCo: H local steps, then an outer step of Nesterov SGD on the mean change.

        g = 1/W sum_i (anchor - x_i);   v <- momentum v + g;   anchor <- anchor - lr (g + momentum v);   x_i <- anchor

    Bytes per worker and step: `2 (W-1)/W 4n / H`, all of them in one step of H.

    Args:
        every: H; higher => fewer bytes, workers drift further apart. Published: 30 to 500.
        lr: of the outer optimizer.
        momentum: of the outer optimizer.

    Returns:
        A strategy; the inner optimizer is AdamW.

    Source: Douillard et al. 2023, DiLoCo, arXiv 2311.08105.

    Example:
        >>> import thinwire as tw
        >>> tw.diloco(every=50)
        Local(Mean(), every=50, outer=OuterSGD())
    """
    return Local(Mean(), every, OuterSGD(lr, momentum))


def streaming_diloco(
    every: int = 100,
    fragments: int = 4,
    delay: int = 5,
    alpha: float = 0.5,
    lr: float = 0.7,
    momentum: float = 0.9,
    format: str | None = "e3m0",
) -> Local:
    """Streaming DiLoCo: fragments at offsets of their own, messages that fly during tau steps, floats of 4 bits.

        x_i <- alpha x_i + (1 - alpha) anchor,   tau steps after the fragment's round began

    Bytes per worker and step with 4 bits: about `(W-1) n/2 / H` by an all-gather, or `2 (W-1)/W n/2 / H` by the exchange that
    encodes the mean again, which "auto" takes from 5 workers on; 1/P of a period's bytes at a time.

    Args:
        every: H, steps between two rounds of a fragment.
        fragments: P; higher => lower peaks.
        delay: tau; higher => slower networks are hidden, changes come later.
        alpha: the share of a worker's own parameters when the result is merged.
        lr: of the outer optimizer.
        momentum: of the outer optimizer.
        format: of the changes, as in `Float4`; None sends float32.

    Returns:
        A strategy; the inner optimizer is AdamW.

    Source: Douillard et al. 2025, Streaming DiLoCo, arXiv 2501.18512.

    Example:
        >>> import thinwire as tw
        >>> tw.streaming_diloco(delay=2)
        Local(Mean(Float4(), min_ndim=0), every=100, outer=OuterSGD(), fragments=4, delay=2, alpha=0.5)
    """
    averager = Mean() if format is None else Mean(Float4(format), min_ndim=0)
    return Local(averager, every, OuterSGD(lr, momentum), fragments=fragments, delay=delay, alpha=alpha)


def asynchronous_diloco(
    every: int = 30,
    quorum: int | None = None,
    fragments: int = 1,
    delay: int = 3,
    bits: int | None = None,
    lr: float = 0.7,
    momentum: float | None = None,
) -> Local:
    """DiLoCo with workers of unequal speed: none waits for all, and a slow one takes fewer steps.

        g = sum_i n_i (anchor - x_i) / sum_i n_i,  over those that have come;   Nesterov's outer step, its momentum delayed

    Bytes per worker and step: `(W-1) 4n / H`, or `(W-1) n bits/8 / H`, by messages to all others.

    Args:
        every: H of the fastest worker; the others' follow their speed.
        quorum: K, workers that make a round; None => all that are left, which come at the same time because their steps
            follow their speed. Lower => less waiting where speeds change fast, but late changes cost loss.
        fragments: P; higher => lower peaks.
        delay: tau, steps from the send of a change to its merging; higher => slower networks and uneven steps are hidden.
        bits: of each element, see `QSGD`; None sends float32.
        lr: of the outer optimizer.
        momentum: of the outer optimizer; None => 0.8 with a quorum of all, else 0.4: what is merged tau steps after its send,
            or rounds later, acts as momentum of its own.

    Returns:
        A strategy; the inner optimizer is AdamW.

    Source: Liu et al. 2024, Asynchronous Local-SGD, arXiv 2401.09135; Douillard et al. 2026, Decoupled DiLoCo,
        arXiv 2604.21428.

    Example:
        >>> import thinwire as tw
        >>> tw.strategy.asynchronous_diloco(every=50, quorum=2)
        Local(Mean(), every=50, outer=OuterSGD(momentum=0.4), delay=3, quorum=Quorum(workers=2))
    """
    # With 0.9 a quorum of two of four ended far behind (docs/negative-results.md).
    momentum = momentum if momentum is not None else 0.8 if quorum is None else 0.4
    averager = Mean() if bits is None else Mean(QSGD(bits=bits), min_ndim=0)
    return Local(averager, every, OuterSGD(lr, momentum), fragments=fragments, delay=delay, quorum=Quorum(quorum))


def sparse_loco(
    every: int = 15, ratio: float = 0.02, decay: float = 0.95, bits: int = 2, tile: int = 64, lr: float = 1.0
) -> Local:
    """SparseLoCo: each worker sends the largest few of every tile of its decayed error feedback, in 2 bits.

        m_i <- decay m_i + (anchor - x_i);   c_i = C(m_i);   m_i <- m_i - c_i;   anchor <- anchor - lr mean c_i

    As in the released code, the mean of a coordinate is over the workers that sent it, and the tiles of a tensor are equal:
    each dimension is cut by its largest divisor up to 64. A smaller tile sends as many elements as a whole one, or all of
    them. So vectors are sent whole, in 2 bits, where `ratio` is 1/64 or more.

    Bytes per worker and step: about `(W-1) k (bits + log2(n/k) + 1.44)/8 / H`, k = ratio n for whole tiles, by an all-gather.

    Args:
        every: H. Published: 15 to 50.
        ratio: of the elements of a whole tile that are sent; lower => smaller messages. Published: 0.01 to 0.03.
        decay: of the error feedback.
        bits: of each value; see `BinMeans`.
        tile: rows and columns of a whole tile, 64 at most.
        lr: of the outer step.

    Returns:
        A strategy; the inner optimizer is AdamW.

    Source: Sarfi et al. 2025, SparseLoCo, arXiv 2508.15706.

    Example:
        >>> import thinwire as tw
        >>> averager = tw.sparse_loco().averager
        >>> averager.codec, averager.divide_by
        (chain(Tiles(divisors=True), BlockwiseTopK(ratio=0.02), BinMeans()), 'senders')
    """
    codec = chain(Tiles(tile, divisors=True), BlockwiseTopK(ratio, tile * tile), BinMeans(bits))
    averager = Mean(codec, ErrorFeedback(decay), exchange="all_gather", min_ndim=0, divide_by="senders")
    return Local(averager, every, OuterSGD(lr, momentum=0.0, nesterov=False))


def demo(frequencies: int = 32, tile: int = 64, decay: float = 0.999) -> Gradients:
    """DeMo: every step, the largest frequencies of each tile of the momentum; the update is the sign of their mean.

        m_i <- decay m_i + g_i;   c_i = top-k of DCT(m_i);   m_i <- m_i - DCT^-1(c_i);   result = sign(DCT^-1(mean c_i))

    As in the released code, the mean of a frequency is over the workers that sent it, and the tiles of a tensor are equal:
    each dimension is cut by its largest divisor up to 64. A smaller tile sends as many frequencies as a whole one, or all of
    them: of a vector, 32 of every 64.

    The released code's momentum adds up rate times gradient. Where the learning rate changes, call `(loss * rate).backward()`
    with the rate of the step to have the same. The result is a sign, so it does not depend on the size of the loss.

    Bytes per worker and step: `(W-1) k (4 + 12/8)`, k = frequencies for each tile, or less where indices code better.

    Args:
        frequencies: k of each tile; higher => larger messages.
        tile: rows and columns of a whole tile, 64 at most.
        decay: of the momentum.

    Returns:
        A strategy, with `torch.optim.SGD` without momentum; its learning rate is like Adam's.

    Raises:
        ValueError: more frequencies than a tile has.

    Source: Peng et al. 2024, DeMo, arXiv 2411.19870.

    Example:
        >>> import thinwire as tw
        >>> averager = tw.strategy.demo(frequencies=64).averager
        >>> averager.codec, averager.divide_by
        (chain(DCT(divisors=True), BlockwiseTopK(ratio=0.015625)), 'senders')
    """
    require_integer("demo: frequencies", frequencies, 1, tile * tile)
    codec = chain(DCT(tile, divisors=True), BlockwiseTopK(frequencies / tile**2, tile * tile))
    memory = SignDescent(ErrorFeedback(decay))
    return Gradients(Mean(codec, memory, exchange="all_gather", min_ndim=0, divide_by="senders"))


def dion(rank: int = 16, mu: float = 0.95) -> Gradients:
    """Dion: every step, an orthonormal update of low rank, `x <- x - lr sqrt(n/m) P Q'`.

    Bytes per worker and step: `2 (W-1)/W 4 (r (n + m) + dense)`, for matrices of n x m.

    Args:
        rank: r; higher => more bytes.
        mu: of the momentum.

    Returns:
        A strategy, with `torch.optim.SGD` without momentum; see `Dion`.

    Source: Ahn et al. 2025, Dion, arXiv 2504.05295.

    Example:
        >>> import thinwire as tw
        >>> tw.strategy.dion(rank=8)
        Gradients(Dion(rank=8))
    """
    return Gradients(Dion(rank, mu))


def no_loco(every: int = 50, lr: float = 0.7, momentum: float = 0.5, gamma: float = 0.7, seed: int = 0) -> Local:
    """NoLoCo: random pairs average their changes, without an all-reduce, and a term pulls their anchors together.

        d_i <- momentum d_i + lr mean_pair(anchor - x) + gamma (anchor_i - mean_pair(anchor));   anchor_i <- anchor_i - d_i

    Bytes per worker and step: `8n / H`, for changes and anchors, to one peer, whatever W is.

    Args:
        every: H.
        lr: of the outer step.
        momentum: of the outer step.
        gamma: higher => anchors are pulled together faster; stable between about `momentum` and 1.5. The authors take `lr`.
        seed: of the pairs.

    Returns:
        A strategy; the inner optimizer is AdamW. `synchronize` at the end gives one model.

    Source: Kolehmainen et al. 2025, NoLoCo, arXiv 2506.10911.

    Example:
        >>> import thinwire as tw
        >>> tw.strategy.no_loco(every=20).averager
        Mix(RandomPairs())
    """
    require_number("no_loco: gamma", gamma, least=0)
    # The outer step multiplies all by `lr`, and the published term has no such factor.
    return Local(Mix(RandomPairs(seed)), every, OuterSGD(lr, momentum, nesterov=False), pull=gamma / lr)


def mulo_co(
    every: int = 30,
    bits: int | None = 2,
    decay: float = 0.9,
    lr: float | None = None,
    momentum: float | None = None,
) -> Local:
    """MuLoCo: DiLoCo with Muon as the inner optimizer, whose changes can be sent in 2 bits with error feedback.

        g = 1/W sum_i C(anchor - x_i + e_i);   Nesterov's outer step as in `diloco`

    Bytes per worker and step: about `(W-1) n bits/8 / H` by an all-gather.

    Args:
        every: H.
        bits: of each element, see `BinMeans`; None sends float32.
        decay: of the error feedback.
        lr: of the outer optimizer; None => the authors': 0.8, or 0.9 without bits.
        momentum: of the outer optimizer; None => the authors': 0.9, or 0.8 without bits.

    Returns:
        A strategy; the inner optimizer is `MuonAdamW`, whose defaults are MuLoCo's.

    Source: Therien et al. 2025, MuLoCo, arXiv 2505.23725.

    Example:
        >>> import thinwire as tw
        >>> tw.mulo_co().averager
        Mean(BinMeans(), ErrorFeedback(decay=0.9), min_ndim=0)
        >>> tw.mulo_co(bits=None).outer
        OuterSGD(lr=0.9, momentum=0.8)
    """
    lr = lr if lr is not None else 0.9 if bits is None else 0.8
    momentum = momentum if momentum is not None else 0.8 if bits is None else 0.9
    averager = Mean() if bits is None else Mean(BinMeans(bits), ErrorFeedback(decay), min_ndim=0)
    return Local(averager, every, OuterSGD(lr, momentum))
