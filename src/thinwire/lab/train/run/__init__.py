"""One worker of a run: the training loop, and what stops it."""
