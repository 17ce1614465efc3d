"""One process of PyTorch: python -m benchmarks.lab_pytorch MODE RUN RANK ADDRESS

    ddp                 DistributedDataParallel over all nodes
    1f1b                two stages of half the layers, each on two nodes in the order of ranks, so
                        that stages are clusters; DistributedDataParallel inside a stage
    1f1b-data-across    the same, each stage on every second node: data parallelism crosses clusters

GLOO_SOCKET_IFNAME chooses the NIC.
"""

import sys
from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lab_steps import tell_step
from benchmarks.pytorch_loop import GPT, make_gpt, make_optimizer
from holmesjax import config as configs
from holmesjax.config import Config
from holmesjax.data.batches import model_inputs
from holmesjax.models.layer import init_params
from holmesjax.training_setup import read_batches

NUM_NODES, NUM_STAGES = 4, 2
Step = Callable[[torch.Tensor, torch.Tensor], float | None]  # (token_BL, target_BL) -> loss


class StageModule(nn.Module):
    """Half of the blocks, with the tables or the head."""

    def __init__(self, whole: GPT, stage: int):
        super().__init__()
        half = len(whole.blocks) // NUM_STAGES
        self.blocks = nn.ModuleList(list(whole.blocks)[stage * half : (stage + 1) * half])
        self.is_first = stage == 0
        if self.is_first:
            self.token, self.position = whole.token, whole.position
        else:
            self.norm, self.output = whole.norm, whole.output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            x = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x if self.is_first else self.output(self.norm(x))


def data_parallel(config: Config, whole: GPT) -> Step:
    model, c = DistributedDataParallel(whole), config.optimizer
    optimizer = make_optimizer(whole, c)

    def step(token_BL: torch.Tensor, target_BL: torch.Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(token_BL, target_BL)
        loss.backward()
        nn.utils.clip_grad_norm_(whole.parameters(), cast(float, c.clip_norm))
        optimizer.step()
        return float(loss)

    return step


def pipeline(config: Config, whole: GPT, stage: int, replica: int, groups: list) -> Step:
    """Returns a step of PyTorch's 1F1B with replicas of each stage.

    Args:
      config: of the run.
      whole: the model, of which a stage takes its half.
      stage: the stage of this process.
      replica: the replica of this process.
      groups: of ranks, those of each stage, then those of each replica's pipeline.
    """
    part, c = StageModule(whole, stage), config.optimizer
    model = DistributedDataParallel(part, process_group=groups[stage])
    chain = groups[NUM_STAGES + replica]
    pipe = PipelineStage(model, stage, NUM_STAGES, torch.device("cpu"), group=chain)
    cross_entropy = lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten())
    microbatches = config.parallel.microbatches
    assert microbatches is not None, "the rows say how many"
    schedule = Schedule1F1B(pipe, microbatches, loss_fn=cross_entropy)
    optimizer = make_optimizer(part, c)

    def step(token_BL: torch.Tensor, target_BL: torch.Tensor) -> float | None:
        optimizer.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        if part.is_first:
            schedule.step(token_BL, return_outputs=False)
        else:
            schedule.step(target=target_BL, losses=losses, return_outputs=False)
        gradients = [x.grad for x in part.parameters() if x.grad is not None]
        square_norm = torch.stack([g.square().sum() for g in gradients]).sum()
        dist.all_reduce(square_norm, group=chain)
        scale = float(cast(float, c.clip_norm) / square_norm.sqrt().clamp(min=c.clip_norm))
        torch._foreach_mul_(gradients, scale)
        optimizer.step()
        return float(torch.stack(losses).mean()) if losses else None

    return step


def main() -> None:
    mode, run_file, rank_text, address = sys.argv[1:]
    rank, config = int(rank_text), configs.load(run_file)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=NUM_NODES)
    whole = make_gpt(config.model, init_params(config.model, config.train.seed))
    if mode == "ddp":
        replica, num_replicas, step = rank, NUM_NODES, data_parallel(config, whole)
    else:
        place = lambda r: divmod(r, 2) if mode == "1f1b" else divmod(r, 2)[::-1]
        stage, replica = place(rank)
        num_replicas = NUM_NODES // NUM_STAGES
        members = [[r for r in range(NUM_NODES) if place(r)[0] == s] for s in range(NUM_STAGES)]
        members += [[r for r in range(NUM_NODES) if place(r)[1] == d] for d in range(num_replicas)]
        groups = [dist.new_group(ranks) for ranks in members]
        step = pipeline(config, whole, stage, replica, groups)

    batches, each = read_batches(config), config.train.global_batch // num_replicas
    for i in range(config.train.steps):
        inputs = model_inputs(batches.train(i * batches.global_batch))
        own = (inputs[n][replica * each :][:each] for n in ("token_BL", "target_BL"))
        loss = step(*(torch.from_numpy(x).long() for x in own))
        tell_step(loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
