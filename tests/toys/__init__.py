"""Toys that are added through a seam each, one file for each: `add` is all that a table needs."""
