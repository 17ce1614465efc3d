"""The layers of a model as data: what each kind of layer states, without JAX."""
