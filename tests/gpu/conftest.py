"""The checks run by file name, with `scripts/gpu.py`, and are not collected with the other tests."""

collect_ignore_glob = ["check_*.py"]
