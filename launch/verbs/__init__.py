"""One module per verb of `python -m launch`: each turns arguments into calls, and prints."""
