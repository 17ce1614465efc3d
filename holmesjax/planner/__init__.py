"""From machines and a config to the fastest plan that fits, and why. Nothing is run."""
