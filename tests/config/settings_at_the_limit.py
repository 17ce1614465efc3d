"""Settings with the least and the greatest values that are allowed."""

EXPERTS = "model.pattern=[expert_block]"
AT_THE_LIMIT = [
    ["model.head_dim=6", "model.width=66"],
    ["model.width=12", "model.positions=learned"],
    ["parallel.layers=[1,2,3]", "parallel.stages=3"],
    ["parallel.stages=6"],
    ["parallel.schedule=interleaved_1f1b", "parallel.chunks=3", "parallel.stages=2"],
    ["parallel.schedule=interleaved_1f1b", "parallel.chunks=2", "parallel.layers=[4,2]"],
    ["parallel.schedule=zero_bubble", "parallel.activation_checkpointing=none"],
    ["parallel.schedule=eager_1f1b", "parallel.activation_checkpointing=full"],
    ["parallel.tensor=4"],
    ["train.global_batch=8", "parallel.data=2"],
    ["train.global_batch=16", "parallel.data=2", "parallel.fsdp=2"],
    ["optimizer.warmup_steps=101"],
    ["model.rotary_fraction=0.5", "model.rotary_scaling={type: linear, factor: 2.0}"],
    ["optimizer.schedule=wsd", "optimizer.warmup_steps=10", "optimizer.decay_steps=90"],
    [
        "optimizer.schedule=wsd",
        "optimizer.schedule_by=tokens",
        "optimizer.warmup_tokens=9",
        "optimizer.decay_tokens=307191",
        "train.rampup=[{steps: 50, global_batch: 16}]",
    ],
    ["data.validation_fraction=0"],
    ["parallel.expert=1", "parallel.expert_chunks=1", "model.experts={}", EXPERTS],
    ["model.experts={count: 4, active: 4}", EXPERTS],
    ["model.experts={groups: 4, active_groups: 2, active: 4}", EXPERTS],
    ["optimizer.name=sgd", "optimizer.beta1=0", "optimizer.beta2=0.95"],
    ["data.source=tokens", "data.dtype=uint16"],
]
