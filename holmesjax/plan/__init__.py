"""A plan as data: its stages, its schedule and its processes. `planner` is what chooses one."""
