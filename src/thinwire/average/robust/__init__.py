"""Rules that bound what one wrong worker can do to a round: `base` has the contract; one rule, one file."""
