"""Elastic runs, whose workers come and go.

`communicator` has the rounds. `forming` says who is in one, `healing` gives the state to workers that join, and `lighthouse` is
where workers meet.
"""
