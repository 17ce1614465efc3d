"""Arrays and messages between processes: who sends what to whom, over which connection."""
