"""Operations of a communicator, each with its answer in closed form."""

from __future__ import annotations

import torch

SUMMABLE = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
]
ANY_DTYPE = [*SUMMABLE, torch.bool, torch.int16, torch.complex64]


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, which every dtype adds without rounding."""
    return ((torch.arange(numel) * 3 + rank) % 7).to(dtype)


def all_operations(comm) -> None:
    size, rank = comm.size, comm.rank
    for dtype in ANY_DTYPE:
        for numel in (0, 1, 5, 1000):
            check_gathers(comm, dtype, numel)
            if dtype in SUMMABLE:
                summed = values(rank, numel, dtype)
                assert comm.all_reduce(summed).wait() is summed
                assert torch.equal(summed, sum(values(r, numel, torch.int64) for r in range(size)).to(dtype))
    for root in range(size):
        matrix = values(rank, 6, torch.float32).reshape(2, 3)
        assert comm.broadcast(matrix, root).wait() is matrix
        assert torch.equal(matrix, values(root, 6, torch.float32).reshape(2, 3))
    comm.barrier()
    assert comm.gather_objects({"rank": [rank] * rank, "é": None}) == [
        {"rank": [r] * r, "é": None} for r in range(size)
    ]


def check_gathers(comm, dtype: torch.dtype, numel: int) -> None:
    size, rank = comm.size, comm.rank
    own = values(rank, numel, dtype)
    gathered = comm.all_gather(own).wait()
    assert gathered[rank] is own
    assert all(torch.equal(part, values(r, numel, dtype)) for r, part in enumerate(gathered))

    sizes = [numel * r for r in range(size)]  # rank 0 has nothing to send
    gathered = comm.all_gather(values(rank, sizes[rank], dtype), sizes).wait()
    assert all(torch.equal(part, values(r, sizes[r], dtype)) for r, part in enumerate(gathered))

    # Worker r sends (r + p) elements to worker p.
    sent = [values(10 * rank + p, (rank + p) * (numel > 0), dtype) for p in range(size)]
    received = comm.all_to_all(sent, [len(part) for part in sent]).wait()
    assert received[rank] is sent[rank]
    assert all(torch.equal(part, values(10 * r + rank, len(sent[r]), dtype)) for r, part in enumerate(received))


def many_outstanding(comm) -> None:
    """60 operations of all kinds in flight, waited for from last to first."""
    size, rank, handles = comm.size, comm.rank, []
    for i in range(15):
        x = torch.full((1 + 997 * i,), float(rank + i))
        handles.append((comm.all_reduce(x.clone()), [sum(r + i for r in range(size))]))
        handles.append((comm.all_gather(x), [r + i for r in range(size)]))
        handles.append((comm.broadcast(x.clone(), i % size), [i % size + i]))
        handles.append((comm.all_to_all([x + 100 * p for p in range(size)]), [r + i + 100 * rank for r in range(size)]))
    for handle, expected in reversed(handles):
        result = handle.wait()
        tensors = [result] if isinstance(result, torch.Tensor) else result
        assert [t.unique().tolist() for t in tensors] == [[float(value)] for value in expected]
        assert handle.wait() is result
