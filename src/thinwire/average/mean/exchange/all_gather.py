"""Each worker sends its message to all others: 1 step, (W-1)(p + d) bytes per worker, N(W-N)(p + d) from a node.

If the codec's size is not fixed, workers first send sizes: 2 steps, (W-1)(p + d + 8) bytes.
"""

from __future__ import annotations

from torch import Tensor

from ....algorithm import require
from ....codec import Codec
from ....kernels import Flag
from ....memory import Memory
from ....options import require_choice
from ...robust.base import Rule
from ..clip import Clip
from .base import Finish, Job, pack
from .contract import Exchange


class AllGather(Exchange):
    """The result is `1/W sum_i C(x_i)`, for any codec; each worker encodes once."""

    word = "all_gather"
    is_uniform = True
    one_step = True
    takes_selection = True
    gathers = True

    def steps(self, size: int, workers_per_node: int) -> int:
        return int(size > 1)

    def num_bytes(self, size: int, workers_per_node: int, message: float) -> float:
        return workers_per_node * (size - workers_per_node) * message

    def begin(self, job: Job) -> Finish:
        message = pack(job.dense, job.encode(job.tensors, job.keys, job.masked))
        with job.clock("exchange"):
            if job.codec.traits.fixed_size:
                handle = job.comm.all_gather(message)
            else:
                # The limit bounds the memory that an announced size can take.
                handle = job.comm.all_gather(message, variable=True, limit=job.message_nbytes())

        def finish(totals: list[Tensor], dense_total: Tensor) -> Flag:
            with job.clock("wait"):
                messages = handle.wait()
            return job.decode_messages(messages, totals, dense_total)

        return finish


def check_divisor(divide_by: str, exchange: Exchange | None, codec: Codec, memory: Memory | None) -> None:
    """Raise ValueError unless sums can be divided so.

    "workers" divides by W. "senders" divides an element by the number of workers that sent it, so that results are up to W
    times as large. It needs workers to see what each of them sent, and nothing to rely on the mean over all of them.
    """
    allowed = ("workers", "senders")
    require_choice("Mean: divide_by", divide_by, allowed)
    if divide_by == "workers":
        return
    gathers, word = (False, "auto") if exchange is None else (exchange.gathers, exchange.word)
    require(gathers, f"Mean: divide_by={divide_by!r} needs exchange='all_gather', got {word!r}")
    user = codec if codec.traits.votes else memory if memory is not None and memory.needs_mean else None
    require(user is None, f"Mean: {user} needs the mean over all workers; use divide_by='workers'")


def check_rule(rule: Rule, codec: Codec, memory: Memory | None, clip: Clip | None) -> None:
    """Raise ValueError unless a rule can take the place of the mean for what workers send."""
    require(
        not codec.traits.votes and codec.traits.agreement is None and codec.traits.adaptive is None,
        f"Mean: under {codec} workers vote, or agree on numbers that one wrong worker can choose, before {rule} sees their "
        "messages; use a codec such as QSGD",
    )
    require(memory is None or not memory.needs_mean, f"Mean: {memory} needs the mean over all workers, not {rule}")
    require(
        clip is None or not clip.needs_norms,
        f"Mean: one wrong worker can choose the norm in {clip}; use ClipByNorm with {rule}",
    )
    rule.check_codec(codec)
