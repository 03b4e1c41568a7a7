"""Starts a run: from the command to connected workers."""
