"""The process that owns a run, and the processes and threads that it waits for."""
