"""Optimizers, their sharded state and their learning rates."""
