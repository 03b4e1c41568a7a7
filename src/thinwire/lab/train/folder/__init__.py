"""The folder of a run: its creation, its lock and its checkpoints."""
