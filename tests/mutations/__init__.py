"""Bugs planted on purpose: a measure of what the test suite notices."""
