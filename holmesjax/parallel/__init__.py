"""A plan's mesh axes over JAX devices: meshes, shardings and collectives. No model."""
