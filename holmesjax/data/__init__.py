"""Files to batches of tokens, as a function of seed and position. No devices, no plan."""
