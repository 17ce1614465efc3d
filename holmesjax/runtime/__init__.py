"""The programs of a stage, and the loop that runs them: one step of one process."""
