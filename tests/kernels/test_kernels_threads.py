"""Several threads call the C++ kernels at once: the binding releases the GIL, and no result may change."""

from __future__ import annotations

import threading

import torch
from helpers.cases import case
from torch import Tensor

from thinwire import kernels
from thinwire.kernels.quantize import Quantizer

NUM_THREADS, NUM_ROUNDS = 4, 3
XS = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (30_000, 1, 517)]
NUMELS, COUNTS, KEYS = [x.numel() for x in XS], [300, 1, 500], [1, 2, 3]


def quantized() -> list[Tensor]:
    quantizer = Quantizer(4, 15, 512)
    payload = torch.zeros(quantizer.nbytes(NUMELS), dtype=torch.uint8)
    residuals, decoded = [[torch.zeros(n) for n in NUMELS] for _ in range(2)]
    kernels.quantize.encode(XS, payload, KEYS, quantizer, residuals)
    kernels.quantize.decode_add(payload, decoded, 0.5, quantizer)
    return [payload, *residuals, *decoded]


def signs() -> list[Tensor]:
    payload = torch.zeros(kernels.sign.nbytes(NUMELS), dtype=torch.uint8)
    decoded = [torch.zeros(n) for n in NUMELS]
    kernels.sign.encode(XS, payload)
    kernels.sign.decode_add(payload, decoded, 0.5)
    return [payload, *decoded]


def selected() -> list[Tensor]:
    indices, values = kernels.select.topk(XS, COUNTS)
    code = kernels.rice.encode(indices, COUNTS, NUMELS)
    return [indices, values, code, kernels.rice.decode(code, COUNTS, NUMELS)]


def test_threads_get_the_results_of_one():
    for compute in (quantized, signs, selected):
        with case(compute.__name__):
            expected, results = compute(), [[] for _ in range(NUM_THREADS)]
            start = threading.Barrier(NUM_THREADS)

            def work(own: list, compute=compute, start=start) -> None:
                start.wait()
                own += [compute() for _ in range(NUM_ROUNDS)]

            threads = [threading.Thread(target=work, args=(own,)) for own in results]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for own in results:
                assert len(own) == NUM_ROUNDS  # no thread failed
                assert all(torch.equal(a, b) for got in own for a, b in zip(got, expected, strict=True))


if __name__ == "__main__":  # scripts/sanitize.sh binding
    torch.set_num_threads(1)
    test_threads_get_the_results_of_one()
