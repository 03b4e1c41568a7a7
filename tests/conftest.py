"""One thread for each worker, as in a real run on these machines, and so that results do not depend on the host."""

import torch

torch.set_num_threads(1)
