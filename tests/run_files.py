"""A run file, and the mistakes that `load` reports of one."""

import pytest

from holmesjax import config as configs
from holmesjax.errors import ConfigError, Mistakes

RUN = """\
topology: configs/topologies/ib_roce.yaml
run:
  dir: runs/test
train:
  steps: 100
  global_batch: 32
model:
  num_layers: 6
  width: 64
  num_heads: 4
  context_length: 128
data:
  corpus: python-stdlib
optimizer:
  learning_rate: 3e-4
parallel:
  microbatches: 4
"""


def refused(path, overrides=()):
    """The mistakes that `load` reports, as (where, problem, found, fix)."""
    with pytest.raises(Mistakes) as error:
        configs.load(path, overrides)
    mistakes = error.value.mistakes
    assert all(type(mistake) is ConfigError for mistake in mistakes)
    for mistake in mistakes:
        text = str(mistake)
        assert text in str(error.value)
        assert not any(
            jargon in text for jargon in ("pydantic", "Input should", "<class", "[type=")
        )
    return [(m.where, m.problem, str(m.found), m.fix) for m in mistakes]
