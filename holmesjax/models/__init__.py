"""Models and the array functions that they are made of. How they are cut is in `parallel`."""
