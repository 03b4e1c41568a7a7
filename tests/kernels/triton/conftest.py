"""The checks run by file name, with `make test-triton` or on a GPU, and are not collected with the other tests."""

collect_ignore_glob = ["check_*.py"]
