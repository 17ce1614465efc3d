"""A process step: the dict in which one process reports one step. No JAX.

Its entries:

    step           optimizer steps done
    intervals      its tasks, as `timeline.Interval`
    link_bytes     what it received, by link
    link_losses    connections of each link that were lost and made anew, where there were any
    link_lost_s    for which one of them was lost, at most
    step_time_s    since the step before; the mean of steps whose ends were seen at once
    input_wait_s   until its batch was there
    validation_s   of the validation behind the step, where there is one
    memory_bytes   of its devices whose peak has risen, the most that was in use
    checkpoint_s   for which steps waited for a checkpoint since the last report, where one was
    compile_s      of its programs, in its first process step
    validation_bytes    the same, for the validation behind the step, where there is one
    loss, grad_norm, learning_rate, skipped, val_loss     where it knows them
    val_losses     the validation loss of each set, where sets have names
    spike          whether it is one, where the run looks for spikes
    square_spread  of islands that meet in pairs, of the parameters that are owned here: the mean
                   over all parameters of the variance over islands; from leaders of stages only
    island         whose numbers these are, where each process has a stage of one
    round          the newest that has landed on an island that is a job of its own
    own            numbers of the user's callbacks by name, where there are any
    auxiliary      auxiliary losses and metrics of the model's layers by name, where there are any
    expert_peaks   by layer, the load of the fullest device over the mean: if experts lay by number,
                   and as they were placed before this step, where they were
    expert_loads   the choices of each expert by layer, in `expert_load_steps` steps, where it tells
"""

import math
from collections.abc import Sequence
from typing import Any

ProcessStep = dict[str, Any]
MEANS = ("loss", "grad_norm", "learning_rate")  # over islands


def known_of(reports: Sequence[ProcessStep], shares: Sequence[int] = ()) -> ProcessStep:
    """All that processes know of a step: of islands the means, as one process has them.

    `shares` are those of the batch that each island takes; empty: equal ones.

    >>> known_of([{"loss": 2.0, "skipped": False, "island": 0}, {"val_loss": 5.0, "island": 0},
    ...           {"loss": 4.0, "skipped": True, "island": 1}])
    {'loss': 3.0, 'skipped': True, 'island': 1, 'val_loss': 5.0}
    >>> known_of([{"loss": 2.0, "skipped": False, "island": 0},
    ...           {"loss": 4.0, "skipped": False, "island": 1}], shares=(3, 1))["loss"]
    2.5
    """
    islands: dict[int, ProcessStep] = {}
    for report in reports:
        known_here = islands.setdefault(report.get("island", 0), {})
        by_layer: ProcessStep = {
            name: {**known_here.get(name, {}), **report[name]}
            for name in ("expert_loads", "expert_peaks")
            if name in report
        }
        known_here.update({**report, **by_layer})
    own = [islands[k] for k in sorted(islands)]
    squares = [report["square_spread"] for report in reports if "square_spread" in report]
    spread = {"island_spread": math.sqrt(math.fsum(squares))} if squares else {}
    known: ProcessStep = {}
    for island in own:
        known = {**known, **island}
    known |= spread
    if len(own) == 1:
        return known
    weights = [shares[k] if shares else 1 for k in sorted(islands)]
    pairs = lambda values: zip(weights, values, strict=True)
    mean = lambda values: math.fsum(w * value for w, value in pairs(values)) / sum(weights)
    known |= {name: mean(island[name] for island in own) for name in MEANS if name in known}
    known["skipped"] = any(island["skipped"] for island in own)
    if "auxiliary" in known:
        known["auxiliary"] = {
            name: mean(island["auxiliary"][name] for island in own) for name in known["auxiliary"]
        }
    return known
