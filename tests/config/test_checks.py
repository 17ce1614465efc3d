"""Settings that do not fit each other, and settings that just do."""

import pytest

from holmesjax import config as configs
from tests.cases import cases
from tests.config.settings_at_the_limit import AT_THE_LIMIT
from tests.run_files import refused

# Overrides, then what is printed, less the line.
BAD_COMBINATIONS = """\
model.width=66
model.width: must be a multiple of model.num_heads = 4
  found: 66
  fix: use 64 or 68, or set model.head_dim

distributed.relay=relay.example.org
distributed.relay: must be a host and a port
  found: relay.example.org
  fix: write relay.example.org:7443, or [fd00::1]:7443, say

distributed.relay=relay.example.org:7443 distributed.encrypt=never
distributed.relay: needs encryption, so that the relay cannot read what it passes on
  found: relay.example.org:7443
  fix: leave distributed.encrypt = never out

model.num_kv_heads=3
model.num_kv_heads: must divide model.num_heads = 4: 4 / 3 is not whole
  found: 3
  fix: use 1, or change model.num_heads

model.width=12
model.width: the width of a head must be even for rotary positions, which turn pairs of numbers
  found: width / num_heads = 12 / 4 = 3
  fix: use model.width = 16, or positions: learned

model.head_dim=7
model.head_dim: must be even for rotary positions, which turn pairs of numbers
  found: 7
  fix: use 8

model.rotary_scaling.type=linear
model.rotary_scaling.factor: is missing: type linear needs it
  found: nothing
  fix: copy it from config.json

model.rotary_scaling.type=linear model.rotary_scaling.factor=2.0 model.rotary_scaling.beta_fast=3.0
model.rotary_scaling.beta_fast: is only for type yarn, not for linear
  found: 3.0
  fix: remove it

model.rotary_scaling.type=dynamic
model.rotary_scaling.type: changes frequencies with the length of each text, so keys that are \
cached would turn otherwise than new ones
  found: dynamic
  fix: use one of linear, llama3, yarn, longrope

model.rotary_scaling.type=llama3 model.rotary_scaling.factor=8.0 \
model.rotary_scaling.low_freq_factor=4.0 model.rotary_scaling.high_freq_factor=1.0 \
model.rotary_scaling.original_max_position_embeddings=64
model.rotary_scaling.high_freq_factor: must be more than low_freq_factor = 4.0
  found: 1.0
  fix: use 1.0 and 4.0, as Llama 3.1

model.rotary_scaling.type=yarn model.rotary_scaling.factor=2.0 \
model.rotary_scaling.original_max_position_embeddings=64 model.rotary_scaling.beta_slow=40.0
model.rotary_scaling.beta_fast: must be more than beta_slow = 40.0
  found: 32.0
  fix: use 32.0 and 1.0, or leave both out

model.rotary_scaling.type=yarn model.rotary_scaling.factor=2.0 \
model.rotary_scaling.original_max_position_embeddings=64 model.rotary_scaling.mscale=1.0
model.rotary_scaling.mscale: counts only beside mscale_all_dim
  found: 1.0
  fix: add mscale_all_dim, or remove mscale

model.rotary_scaling.type=longrope model.rotary_scaling.factor=2.0 \
model.rotary_scaling.original_max_position_embeddings=64 model.rotary_scaling.short_factor=[1.0] \
model.rotary_scaling.long_factor=[1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0]
model.rotary_scaling.short_factor: must have one number for each of the 8 pairs of a head that turn
  found: 1 numbers
  fix: give 8 numbers

model.rotary_fraction=0.2
model.rotary_fraction: must leave an even number of a head's 16 numbers to turn
  found: 0.2: 3 of 16
  fix: use 0.25

model.positions=learned model.rotary_fraction=0.5
model.rotary_fraction: is only for rotary positions, not for learned ones
  found: 0.5
  fix: remove it, or set model.positions to rotary

model.latent_attention.rank=8
model.head_dim: is missing: model.latent_attention needs the width of queries and keys
  found: nothing
  fix: add it, its part that turns included

model.latent_attention.rotary_width=16 model.head_dim=16
model.latent_attention.rotary_width: must be even and below model.head_dim = 16
  found: 16
  fix: use 8

model.latent_attention.rotary_width=4 model.latent_attention.value_width=20 model.head_dim=16
model.latent_attention.value_width: must be at most model.head_dim = 16
  found: 20
  fix: use 16

model.latent_attention.rotary_width=4 model.head_dim=16 model.num_kv_heads=2
model.num_kv_heads: must be 4 with model.latent_attention
  found: 2
  fix: use 4

model.latent_attention.rotary_width=4 model.head_dim=16 model.fp8={}
model.fp8: cannot be set beside model.latent_attention, whose products have neither adapters \
nor fp8
  found: both
  fix: leave one of the two out

model.window_rotary_base=10.0
model.window_rotary_base: is only for layers of the kind window_block
  found: 10.0
  fix: remove it, or add window_block to model.pattern

model.lora.targets=[c_attn,query]
model.lora.targets: must name each weight once: query would have two adapters
  found: ['c_attn', 'query']
  fix: leave one of the two names out

model.lora.targets=[gate_up_proj]
model.lora.targets: must be weights of the model: a gelu has no gate
  found: ['gate_up_proj']
  fix: leave the gate out, or use swiglu or geglu

optimizer.weight_decay=1e4
optimizer.weight_decay: times the learning rate 0.0003 must be at most 1: a step takes that share \
of a parameter away
  found: 10000.0
  fix: use 3333.33 or less

optimizer.groups=[{"pattern":"a","learning_rate":20.0}]
optimizer.groups[0].weight_decay: times the learning rate 20 must be at most 1: a step takes that \
share of a parameter away
  found: 0.1
  fix: use 0.05 or less

train.steps=9 train.profile_steps=[2,10]
train.profile_steps: must each be at most train.steps = 9
  found: [2, 10]
  fix: use earlier steps, or more train.steps

train.profile_steps=[a]
train.profile_steps[0]: must be a whole number
  found: the text 'a'
  fix: write a number such as 8

model.module=m:f model.fp8={}
model.fp8: is for the built-in layers, not for the layers of model.module = m:f
  found: a section
  fix: leave it out

model.fp8={} model.lora={}
model.fp8: cannot be set beside model.lora: frozen weights have no products in fp8
  found: both
  fix: leave one of the two out

model.fp8.scaling=current model.fp8.history=4
model.fp8.history: is only for scaling delayed: a current scale reads no earlier step
  found: 4
  fix: remove it, or set model.fp8.scaling to delayed

model.num_layers=4 model.fp8.exclude_first=1 model.fp8.exclude_last=3
model.fp8.exclude_first: leaves none of model.num_layers = 4 blocks in fp8, with exclude_last = 3
  found: 1
  fix: exclude fewer, or leave model.fp8 out

model.fp8.exclude_last=-1
model.fp8.exclude_last: must be at least 0
  found: -1
  fix: use 0 or more

model.fp8.exclude_down=1
model.fp8.exclude_down: must be true or false
  found: 1
  fix: write true or false

model.preset=qwen3_06b
model.preset: no such model
  found: the text 'qwen3_06b'
  fix: did you mean 'qwen3_0b6'? (in configs/models/)

model.vocab_size=255
model.vocab_size: must be at least 256: the tokens of the corpus are bytes
  found: 255
  fix: use 256, or a padded size

run.dir=ftp://b/x
run.dir: is a URL that names no run folder: its store is ftp
  found: ftp://b/x
  fix: write s3://BUCKET/NAME or gs://BUCKET/NAME

run.dir=~/runs/a
run.dir: must be a path without ~, which only a shell replaces at the start of a word
  found: ~/runs/a
  fix: write it out, as /home/NAME/runs/a

data.corpus=~/text
data.corpus: must be a path without ~, which only a shell replaces at the start of a word
  found: ~/text
  fix: write it out, as /home/NAME/text

parallel.layers=[4,3]
parallel.layers: must sum to model.num_layers = 6
  found: 4 + 3 = 7
  fix: give numbers with sum 6, or leave the key out: the planner chooses

parallel.layers=[4,2] parallel.stages=3
parallel.layers: must have one for each of parallel.stages = 3 stages
  found: [4, 2]: 2 numbers
  fix: give 3 numbers, or set parallel.stages to 2

parallel.clusters=[a,b] parallel.stages=3
parallel.clusters: must have one for each of parallel.stages = 3 stages
  found: ['a', 'b']: 2 names
  fix: give 3 names, or set parallel.stages to 2

parallel.clusters=[a,b] parallel.layers=[2,2,2]
parallel.clusters: must have one for each of parallel.layers = [2, 2, 2]
  found: ['a', 'b']
  fix: give 3 names, or leave one of the two out

parallel.clusters=[a,b,a]
parallel.clusters: stages of a cluster must be neighbours in the pipeline
  found: ['a', 'b', 'a']
  fix: put those of 'a' beside each other

parallel.stages=7
parallel.stages: must be at most model.num_layers = 6: a layer for each stage
  found: 7
  fix: use 6 or less, or more layers

parallel.schedule=interleaved_1f1b parallel.chunks=1
parallel.chunks: must be at least 2 for schedule interleaved_1f1b
  found: 1
  fix: use 2, or set parallel.schedule to 1f1b

parallel.chunks=2
parallel.chunks: is only for schedule interleaved_1f1b, which must be set
  found: 2
  fix: remove it, or set parallel.schedule to interleaved_1f1b

parallel.schedule=interleaved_1f1b parallel.chunks=4 parallel.stages=2
parallel.chunks: chunks * stages must be at most model.num_layers = 6
  found: 4 * 2 = 8
  fix: use 3 or less, or more layers

parallel.schedule=interleaved_1f1b parallel.chunks=2 parallel.stages=4
parallel.chunks: chunks * stages must be at most model.num_layers = 6
  found: 2 * 4 = 8
  fix: use fewer stages

parallel.schedule=interleaved_1f1b parallel.chunks=2 parallel.layers=[5,1]
parallel.layers: must each be at least parallel.chunks = 2: a layer for each chunk
  found: [5, 1]
  fix: give each stage 2 layers or more, or use fewer chunks

parallel.schedule=zero_bubble parallel.activation_checkpointing=dots
parallel.activation_checkpointing: must be none for schedule zero_bubble: computing layers again \
would tie the gradients of their weights back to B
  found: dots
  fix: use none, or set parallel.schedule to 1f1b

parallel.schedule=zero_bubble parallel.recomputed_layers=[1,0]
parallel.recomputed_layers: must all be 0 for schedule zero_bubble
  found: [1, 0]
  fix: use 0, or set parallel.schedule to 1f1b

parallel.recomputed_layers=[4,3]
parallel.recomputed_layers: must sum to model.num_layers = 6 at most
  found: 4 + 3 = 7
  fix: give smaller numbers

parallel.recomputed_layers=[1,0] parallel.stages=3
parallel.recomputed_layers: must have one for each of parallel.stages = 3 stages
  found: [1, 0]: 2 numbers
  fix: give 3 numbers, or set parallel.stages to 2

parallel.recomputed_layers=[3,0] parallel.layers=[2,4]
parallel.recomputed_layers: must each be at most the number in parallel.layers = [2, 4]
  found: [3, 0]
  fix: give smaller numbers

parallel.recomputed_layers=[3,0] parallel.activation_checkpointing=none
parallel.recomputed_layers: must all be 0 where parallel.activation_checkpointing is none
  found: [3, 0]
  fix: set parallel.activation_checkpointing to dots or full, or leave one of the two out

parallel.recomputed_layers=[1,0] parallel.clusters=[a]
parallel.recomputed_layers: must have one for each of parallel.clusters = ['a']
  found: [1, 0]
  fix: give 1 numbers, or leave one of the two out

parallel.tensor=8
model.num_heads: must be a multiple of parallel.tensor = 8
  found: 4
  fix: use 8, or change parallel.tensor

parallel.tensor=4 model.num_kv_heads=2
model.num_kv_heads: must be a multiple of parallel.tensor = 4
  found: 2
  fix: use 4, or change parallel.tensor

parallel.tensor=4 model.mlp_width=130
model.mlp_width: must be a multiple of parallel.tensor = 4
  found: 130
  fix: use 128 or 132, or change parallel.tensor

parallel.tensor=4 model.vocab_size=257
model.vocab_size: must be a multiple of parallel.tensor = 4
  found: 257
  fix: use 260, or change parallel.tensor

train.global_batch=30
train.global_batch: must be a multiple of parallel.microbatches = 4
  found: 30 = 7 * 4 + 2
  fix: use 28 or 32, or change the number of parts

train.global_batch=3
train.global_batch: must be a multiple of parallel.microbatches = 4
  found: 3 = 0 * 4 + 3
  fix: use 4, or change the number of parts

train.global_batch=36 parallel.data=2
train.global_batch: must be a multiple of parallel.data * parallel.microbatches = 2 * 4 = 8
  found: 36 = 4 * 8 + 4
  fix: use 32 or 40, or change the number of parts

train.global_batch=36 parallel.data=2 parallel.fsdp=2
train.global_batch: must be a multiple of parallel.data * parallel.fsdp * parallel.microbatches = \
2 * 2 * 4 = 16
  found: 36 = 2 * 16 + 4
  fix: use 32 or 48, or change the number of parts

train.global_batch=36 parallel.fsdp=2
train.global_batch: must be a multiple of parallel.fsdp * parallel.microbatches = 2 * 4 = 8
  found: 36 = 4 * 8 + 4
  fix: use 32 or 40, or change the number of parts

parallel.fsdp=3 train.global_batch=36
model.width: must be a multiple of parallel.fsdp = 3
  found: 64
  fix: use 63 or 66, or change parallel.fsdp

parallel.fsdp=4 parallel.context=32
model.width: must be a multiple of parallel.fsdp * parallel.context = 4 * 32 = 128
  found: 64
  fix: use 128, or change parallel.fsdp or parallel.context

parallel.expert=2
parallel.expert: must be 1 for a model without experts
  found: 2
  fix: use 1, or fsdp

parallel.expert_chunks=2
parallel.expert_chunks: is for a model with experts
  found: 2
  fix: leave it out

parallel.expert=1 parallel.expert_chunks=2 model.experts={} model.pattern=[expert_block]
parallel.expert_chunks: is for devices that share experts, and parallel.expert is 1
  found: 2
  fix: leave it out, or leave parallel.expert to the planner

parallel.expert=1 parallel.expert_placement=load model.experts={} model.pattern=[expert_block]
parallel.expert_placement: is for devices that share experts, and parallel.expert is 1
  found: load
  fix: leave it out, or leave parallel.expert to the planner

model.width=50 model.num_heads=16 model.head_dim=8 parallel.tensor=16
model.mlp_width: must be a multiple of parallel.tensor = 16
  found: 200
  fix: use 192 or 208, or change parallel.tensor

optimizer.name=lion optimizer.epsilon=0.001
optimizer.epsilon: is only for optimizer adamw or rmsprop or optax or muon, not for lion
  found: 0.001
  fix: leave it out, or set optimizer.name to adamw or rmsprop or optax or muon

optimizer.name=adafactor optimizer.beta1=0.5
optimizer.beta1: is only for optimizer adamw or lion or sgd or optax or muon, not for adafactor
  found: 0.5
  fix: leave it out, or set optimizer.name to adamw or lion or sgd or optax or muon

optimizer.schedule=constant optimizer.final_fraction=0.5
optimizer.final_fraction: is only for schedule cosine or linear or wsd, not for constant
  found: 0.5
  fix: leave it out, or use another optimizer.schedule

train.spike_sigmas=4.0
train.spike_sigmas: is only for a train.spike_policy, which is none
  found: 4.0
  fix: leave it out, or set train.spike_policy to record

kernels.cross_entropy=reference kernels.loss_chunk_mib=64
kernels.loss_chunk_mib: is for a loss in chunks, which kernels.cross_entropy = reference has not
  found: 64
  fix: leave it out, or set kernels.cross_entropy to auto

data.dtype=uint16
data.dtype: is only for files of tokens
  found: uint16
  fix: leave it out, or set data.source to tokens

kernels.experts=pallas
kernels.experts: is for a model with experts
  found: pallas
  fix: leave it out

train.deterministic=true kernels.deterministic_attention=true parallel.expert_placement=load \
model.experts={} model.pattern=[expert_block]
parallel.expert_placement: must be number for train.deterministic: else the moments of saves \
change sums
  found: load
  fix: use number, or set train.deterministic to false

model.pattern=[expert_block]
model.experts: is missing: expert_block needs it
  found: nothing
  fix: add count and active

model.experts={}
model.experts: is only for layers of the kind expert_block
  found: a section
  fix: remove it, or add expert_block to model.pattern

model.experts.count=4 model.experts.active=5 model.pattern=[expert_block]
model.experts.active: must be at most the 4 experts of model.experts.count
  found: 5
  fix: use 4

model.experts.groups=4 model.experts.active=3 model.pattern=[expert_block]
model.experts.active: must be at most the 2 experts of the groups that a token chooses
  found: 3
  fix: use 2

model.experts.groups=3 model.pattern=[expert_block]
model.experts.groups: must divide model.experts.count = 8
  found: 3
  fix: use 1

model.experts.groups=8 model.experts.active=1 model.pattern=[expert_block]
model.experts.groups: must leave two experts in each group, by which groups are chosen
  found: 8
  fix: use 4 or fewer

model.experts.groups=2 model.experts.active_groups=3 model.pattern=[expert_block]
model.experts.active_groups: must be at most model.experts.groups = 2
  found: 3
  fix: use 2

parallel.expert=4 model.experts.count=6 model.pattern=[expert_block] train.global_batch=32
parallel.expert: must divide model.experts.count = 6
  found: 4
  fix: use 2

parallel.context=64 model.context_length=96
model.context_length: must be a multiple of 2 * parallel.context = 2 * 64 = 128
  found: 96
  fix: use 128, or change parallel.context

optimizer.schedule=wsd
optimizer.decay_steps: is missing: schedule wsd needs it
  found: nothing
  fix: add the number of steps at the end in which the learning rate falls

train.deterministic=true
kernels.deterministic_attention: must be true for train.deterministic: without it two runs differ
  found: False
  fix: set it to true, or train.deterministic to false

kernels.optimizer=pallas optimizer.name=lion
kernels.optimizer: has only the kernel of AdamW's step, which lion does not take
  found: pallas
  fix: use auto, or the optimizer adamw or muon

kernels.attention=cudnn
kernels.attention: cudnn has no float32, which train.compute_dtype asks for
  found: cudnn
  fix: use auto, or set train.compute_dtype to bfloat16

kernels.attention=cudnn model.context_length=65 train.compute_dtype=bfloat16
kernels.attention: cudnn has no gradients for an odd model.context_length, 65: JAX takes the bias \
that attention does not have for one
  found: cudnn
  fix: use auto, which adds a token, or 66 tokens

kernels.attention=cudnn data.documents=mask train.compute_dtype=bfloat16
kernels.attention: cudnn has no documents, which data.documents asks for
  found: cudnn
  fix: use auto, or set data.documents to concatenate

kernels.attention=cudnn kernels.deterministic_attention=true train.compute_dtype=bfloat16
kernels.attention: cudnn has no gradients of the same bits each time, which \
kernels.deterministic_attention asks for
  found: cudnn
  fix: use auto, or set kernels.deterministic_attention to false

kernels.attention=cudnn model.attention_soft_cap=30 train.compute_dtype=bfloat16
kernels.attention: cudnn has no soft cap of scores, which model.attention_soft_cap asks for
  found: cudnn
  fix: use auto, or leave model.attention_soft_cap out

train.rampup=[{"steps":5,"global_batch":32}]
train.rampup[0].global_batch: must be below the next batch, of 32
  found: 32
  fix: use 31 or less

train.reduction_dtype=bfloat16
train.reduction_dtype: must not round gradients more than train.compute_dtype rounds products, \
float32
  found: bfloat16
  fix: use float32, or set train.compute_dtype to bfloat16

train.reduction_dtype=bfloat16 train.compute_dtype=bfloat16 parallel.data=1
train.reduction_dtype: is of gradients that cross `data`, and parallel.data is 1: none do
  found: bfloat16
  fix: use float32, or more replicas, or leave parallel.data to the planner

train.eval_ema=true
train.eval_ema: needs optimizer.ema_decay: without it there is no average of the weights
  found: True
  fix: set optimizer.ema_decay, such as 0.999

optimizer.muon_consistent_rms=0.1
optimizer.muon_consistent_rms: is only for optimizer muon, not for adamw
  found: 0.1
  fix: leave it out, or set optimizer.name to muon

optimizer.decay_steps=9
optimizer.decay_steps: is only for schedule wsd, not for cosine
  found: 9
  fix: remove it, or set optimizer.schedule to wsd

optimizer.schedule=wsd optimizer.decay_steps=91 optimizer.warmup_steps=10
optimizer.decay_steps: warmup_steps + decay_steps must be at most train.steps = 100
  found: 10 + 91 = 101
  fix: use 90 or less, or more steps

optimizer.schedule_by=tokens optimizer.warmup_steps=10
optimizer.warmup_steps: is only for a schedule by steps
  found: 10
  fix: give optimizer.warmup_tokens, or set optimizer.schedule_by to steps

optimizer.warmup_tokens=1000
optimizer.warmup_tokens: is only for a schedule by tokens
  found: 1000
  fix: give optimizer.warmup_steps, or set optimizer.schedule_by to tokens

optimizer.schedule=wsd optimizer.schedule_by=tokens
optimizer.decay_tokens: is missing: schedule wsd needs it
  found: nothing
  fix: add the number of tokens at the end in which the learning rate falls

optimizer.schedule=wsd optimizer.schedule_by=tokens optimizer.warmup_tokens=9 \
optimizer.decay_tokens=307192 train.rampup=[{"steps":50,"global_batch":16}]
optimizer.decay_tokens: warmup_tokens + decay_tokens must be at most the tokens of the run = 307200
  found: 9 + 307192 = 307201
  fix: use 307191 or less, or more steps

train.eval_every=5 data.validation_fraction=0
data.validation_fraction: must be more than 0: train.eval_every = 5 asks for validation
  found: 0.0
  fix: use 0.05, or set train.eval_every to 0

data.chat_template_kwargs={"thinks":true}
data.chat_template_kwargs: is for a chat template, and bytes have none
  found: {'thinks': True}
  fix: leave it out, or name a data.tokenizer that has a template

data.chat_template_kwargs={"tools":[]} data.tokenizer=t
data.chat_template_kwargs.tools: is of each dialogue, and no variable for all
  found: []
  fix: leave it out
"""


@cases("case", BAD_COMBINATIONS.strip().split("\n\n"))
def test_settings_that_do_not_fit_each_other(run_file, case):
    overrides, message = case.split("\n", maxsplit=1)
    key = message.split(":")[0]
    by_override = [f"override {o}" for o in overrides.split() if o.startswith(f"{key}=")]
    [(where, problem, found, fix)] = refused(run_file(), overrides.split())
    assert where in by_override or where.endswith(f": {key}")
    assert f"{key}: {problem}\n  found: {found}\n  fix: {fix}" == message


@pytest.mark.parametrize("overrides", AT_THE_LIMIT)
def test_settings_that_just_fit(run_file, overrides):
    configs.load(run_file(), overrides)
