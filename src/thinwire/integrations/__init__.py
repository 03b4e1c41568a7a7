"""Thin adapters for the trainers people use. Each module needs its trainer's package, and nothing else does.

    lightning       a Lightning callback
    transformers    a callback for the Trainer of Transformers
    accelerate      a call after `Accelerator.prepare`
    state           the state of all workers as one object, for trainers that save on one worker alone

An adapter attaches `thinwire.compress_gradients` when the trainer has wrapped its model in DDP, saves the memory of all
workers in the trainer's checkpoints, and shows bytes and waiting time in the trainer's own log.
"""
