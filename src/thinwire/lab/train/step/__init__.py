"""One step: its batches, its place in the course of the run, and the state that it changes."""
