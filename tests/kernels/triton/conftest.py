"""The checks run by file name, on a GPU or in the interpreter, and are not collected with the other tests."""

collect_ignore_glob = ["check_*.py"]
