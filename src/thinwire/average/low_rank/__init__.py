"""Averagers that send matrices of low rank: `power_sgd` and `dion`; `matrices` is what they share."""
