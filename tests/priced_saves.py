"""The bytes of a checkpoint on disk beside those that the plan states."""

import math
from collections import Counter

import numpy as np

from holmesjax import job as jobs
from holmesjax.checkpoints import manifest
from holmesjax.plan import save_costs


def assert_priced_as_written(run_dir):
    """The bytes of each part in the plan are those of its arrays, but for a few scalars."""
    job = jobs.load_saved(run_dir)
    written = Counter()
    for array in manifest.find(run_dir)[0].manifest["arrays"].values():
        written[array["part"]] += np.dtype(array["dtype"]).itemsize * math.prod(array["shape"])
    priced = save_costs.part_bytes(job.config, job.plan)
    for number, num_bytes in enumerate(priced):
        assert 0 <= written[manifest.part_name(number)] - num_bytes < 64
