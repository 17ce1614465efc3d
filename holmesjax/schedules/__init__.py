"""Orders of forwards and backwards in a pipeline, as data, and how long they take."""
