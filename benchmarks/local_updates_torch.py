"""One process of PyTorch: python -m benchmarks.local_updates_torch MODE RUN RANK ADDRESS EVERY

    ddp      DistributedDataParallel over both nodes, by Gloo
    diloco   torchft's DiLoCo, by Gloo: everything meets every so many steps, and all wait

A process has one replica. Each prints its steps as `lab_steps` does.
"""

import importlib
import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.lab_pytorch import data_parallel
from benchmarks.lab_steps import tell_step
from benchmarks.pytorch_loop import GPT, make_gpt, make_optimizer
from holmesjax import config as configs
from holmesjax.config import Config
from holmesjax.data.batches import model_inputs
from holmesjax.models.layer import init_params
from holmesjax.training_setup import read_batches

NUM_NODES = 2
LIGHTHOUSE = 29510  # its port
TIMEOUT = timedelta(seconds=300)


def main() -> None:
    mode, run_file, rank_text, address, every = sys.argv[1:]
    rank, config = int(rank_text), configs.load(run_file)
    torch.set_num_threads(1)
    whole = make_gpt(config.model, init_params(config.model, config.train.seed))
    if mode == "ddp":
        where = f"tcp://{address}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=NUM_NODES)
        train(config, rank, data_parallel(config, whole))
        dist.destroy_process_group()
    else:
        diloco(config, whole, rank, address.partition(":")[0], int(every))


def train(
    config: Config, rank: int, step: Callable[[torch.Tensor, torch.Tensor], float | None]
) -> None:
    batches, each = read_batches(config), config.train.global_batch // NUM_NODES
    for i in range(config.train.steps):
        inputs = model_inputs(batches.train(i * batches.global_batch))
        own = (inputs[n][rank * each :][:each] for n in ("token_BL", "target_BL"))
        tell_step(step(*(torch.from_numpy(x).long() for x in own)))


def diloco(config: Config, whole: GPT, rank: int, host: str, every: int) -> None:
    # torchft is in an environment of its own, and no dependency.
    torchft = lambda name: importlib.import_module(f"torchft.{name}")
    lighthouse = None
    if rank == 0:
        lighthouse = torchft("coordination").LighthouseServer(
            bind=f"[::]:{LIGHTHOUSE}", min_replicas=NUM_NODES, join_timeout_ms=60_000
        )
    here = os.environ["HOLMES_NODE_ADDRESS"]
    store = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)
    manager = torchft("manager").Manager(
        pg=torchft("process_group").ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=whole.load_state_dict,
        state_dict=whole.state_dict,
        min_replica_size=NUM_NODES,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=here,
        store_port=store.port,
        lighthouse_addr=f"http://{host}:{LIGHTHOUSE}",
        replica_id=f"replica_{rank}",
        hostname=here,
    )
    inner = make_optimizer(whole, config.optimizer)
    outer = torch.optim.SGD(whole.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    clip_norm = config.optimizer.clip_norm
    assert clip_norm is not None, "the settings have it"

    def step(token_BL: torch.Tensor, target_BL: torch.Tensor) -> float:
        inner.zero_grad(set_to_none=True)
        loss = whole(token_BL, target_BL)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), clip_norm)
        inner.step()
        return float(loss)

    with torchft("local_sgd").DiLoCo(manager, [whole], inner, outer, sync_every=every):
        train(config, rank, step)
    manager.shutdown(wait=False)
    if lighthouse is not None:
        lighthouse.shutdown()


if __name__ == "__main__":
    main()
