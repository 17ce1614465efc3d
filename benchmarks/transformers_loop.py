"""A Llama of `transformers` and its training loop; one thread."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.pytorch_loop import clipped_step, make_optimizer
from holmesjax.config import ModelConfig, OptimizerConfig
from holmesjax.hugging_face import config_json_export
from holmesjax.hugging_face.tensors import places

FAMILY = "llama"


def make_llama(model: ModelConfig, params: Any) -> transformers.LlamaForCausalLM:
    """With the parameters of `layer.init_params`."""
    settings = config_json_export.write(model, FAMILY, "float32")
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    arrays = {}
    for layer, by_parameter in places(model, FAMILY).items():
        for [place] in by_parameter.values():
            value = params[layer]
            for name in place.parameter.path:
                value = value[name]
            arrays[place.tensor] = torch.from_numpy(place.to_box(np.asarray(value)).copy())
    llama.load_state_dict(arrays)
    return llama


def make_step(
    model: ModelConfig, c: OptimizerConfig, params: Any, inputs: dict[str, np.ndarray]
) -> Callable[[], tuple[torch.Tensor]]:
    torch.set_num_threads(1)
    llama = make_llama(model, params)
    token_BL, target_BL = (torch.from_numpy(inputs[n]).long() for n in ("token_BL", "target_BL"))

    def loss() -> torch.Tensor:
        # Targets are shifted already.
        return llama(
            input_ids=token_BL, shift_labels=target_BL, labels=target_BL, use_cache=False
        ).loss

    return clipped_step(llama, make_optimizer(llama, c), c, loss)
