"""Checkpoints: when they are written, which of them are whole, and where a run goes on."""
