"""Runs experiments with the library. `cli` is the command line. The library never imports this package."""
