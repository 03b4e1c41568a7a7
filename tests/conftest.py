"""One thread for each worker, as in a real run, and so that sums do not depend on the number of cores."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch is loaded: threads that are started later read it then

import torch  # noqa: E402

torch.set_num_threads(1)
