"""The quickstart, so small that a test can train it again and again."""

RUN = "configs/runs/quickstart.yaml"
SMALL = {
    "topology": "configs/topologies/two_cpus.yaml",
    "train.steps": 5,
    "train.eval_every": 0,
    "model.num_layers": 2,
    "model.width": 16,
    "model.context_length": 32,
    "parallel": None,
    "parallel.microbatches": 1,
    "log.report": False,
    "log.tensorboard": False,
    "checkpoint.every": None,
}
