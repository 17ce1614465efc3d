"""A topology rebuilt in small on one Linux machine, as data and shell lines. Nothing is run."""
