"""The command line: its verbs, and the supervisor that keeps a job running."""
