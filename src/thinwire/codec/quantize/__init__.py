"""Quantizers: every element is sent, rounded to one of few levels."""
