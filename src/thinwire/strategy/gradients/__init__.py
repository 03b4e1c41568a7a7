"""Gradients are averaged in each backward pass. `gradients` is the configuration, `rounds` what happens in a pass."""
