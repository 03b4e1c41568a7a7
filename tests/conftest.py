"""What all tests need: one thread a worker, and Ctrl-C heard by the processes that tests start."""

import os
import signal

# As in a real run, and so that sums do not depend on the number of cores.
os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch is loaded: threads that are started later read it then

import hypothesis  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)

# A shell has what it starts in the background ignore Ctrl-C, and our children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Test machines are shared: how long one example takes says nothing about the library.
hypothesis.settings.register_profile("thinwire", deadline=None)
hypothesis.settings.load_profile("thinwire")
