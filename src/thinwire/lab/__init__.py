"""The lab: runs experiments with the library. `cli` is the command; the library never imports from here."""
