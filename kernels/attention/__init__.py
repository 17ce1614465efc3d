"""Attention: plain JAX, cuDNN, kernels for GPUs, and who is chosen.

    choice                 which of them computes given arrays
    installed              which of them the JAX at hand has
    reference              plain JAX, forward and backward
    check                  the kernels compared with plain JAX on the device at hand
    cudnn                  cuDNN, through JAX
    triton                 JAX's own Triton kernels as one function with gradients
    pallas                 the Hopper kernels as one function with gradients
    pallas_forward         the kernel of the forward pass
    pallas_backward        the backward pass, and its kernel that holds queries
    pallas_backward_keys   the backward's kernels that hold keys
    warpgroups             copies, barriers and products that these kernels share
    tiles                  which queries see which keys, as tables of tiles
    ring                   sequences that several devices share
    shards                 a function on each device's shards of a mesh

Dims of the arrays:

    B  sequences            H  query heads        K  width of a head
    L  query positions      G  key-value heads    M  key positions
    R  H / G, the query heads that share a key-value head
"""
