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
    own            numbers of the user's callbacks by name, where there are any
    auxiliary      auxiliary losses and metrics of the model's layers by name, where there are any
"""

from typing import Any

ProcessStep = dict[str, Any]
