"""The details in which training systems differ."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """The details in which training systems differ; the defaults are the details of HolmesJAX.

    Other values serve to predict published results of other systems.
    """

    # Share of the pairs of tokens whose scores are computed: queries go in 8 blocks, each without
    # the keys after its end.
    attention_pairs: float = 0.5625
    attention_backward: float = 2.5  # its products, to the two of the forward: scores come again
    recomputes_attention: bool = False  # also where nothing else is computed again
    score_bytes: float = 0.0  # moved per pair and query head in a forward; 0: they stay on the chip
    sequence_parallel: bool = False  # whether `tensor` cuts the residual stream, too
    layer_call_s: float = 0.0  # of the host, for a layer's forward; a backward takes it twice
    gradient_bytes: float = 4.0  # of each number that is summed over `data` or `fsdp`
    overlaps: bool = True  # collectives over `data` with the last backward and the first forward
    tensor_overlaps: bool = False  # collectives over `tensor` with products, in as many parts
    accumulate_bytes: float = 12.0  # moved per parameter to add a microbatch's float32 gradient
    shards_optimizer: bool = True  # over `data`: ZeRO-1
    # Kept by a layer for its backward besides the operands of its products, for each token.
    kept_score_bytes: float = 0.0  # per key and query head
    kept_mask_bytes: float = 0.0  # per number of the residual stream: where dropout hit
    kept_products: float = 1.0  # share of products whose results `dots` keeps
    keeps_activation: bool = False  # the result of the activation function beside its operand
    # Bytes of each logit in the backward, with none kept before; None: as `memory` says.
    logit_bytes: float | None = None
    loss_bytes: float = 0.0  # moved per logit beside its product, where the loss is not one kernel

    def pairs(self, context: int) -> float:
        """Share of the pairs that are computed where `context` devices share a sequence.

        A device computes all pairs with its own keys, and half of the pairs with the keys of each
        other device.

        >>> HOLMESJAX.pairs(1), HOLMESJAX.pairs(4)
        (0.5625, 0.515625)
        """
        return (self.attention_pairs + (context - 1) / 2) / context


HOLMESJAX = Implementation()
