"""Array functions that models and optimizers are made of.

Only `holmesjax.models.ops` imports them. `attention.choice` and `adamw_choice` have no arrays and
need no JAX: plans are priced and told by them.

A file has the name of its function; attention is a package. Functions are plain JAX, written the
way XLA compiles well on a CPU. Attention and AdamW's step have GPU kernels besides. Two rules
explain the shape of plain JAX; `docs/measurements.md` has the measurements.

1. A value with several readers goes through `lax.optimization_barrier`. XLA:CPU fuses elementwise
   producers into every consumer: without the barrier the gradient of the residual stream, a sum
   that grows by two terms a layer, is computed again inside each product that reads it.
2. A weight's gradient is a product of two matrices, the wider one on the right.
"""
