"""Machines: their description, catalogue and measurements. How a run uses them is in `planner`."""
