"""Encrypted connections between workers that know each other.

`keys` makes credentials, `credentials` loads them, `connections` and `store` use them. `relay` passes on sealed bytes between
workers that cannot reach each other.
"""
