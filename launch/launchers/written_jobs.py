"""Saves a job that a scheduler starts later, from files that are written now."""

import contextlib
from collections.abc import Iterator, Sequence

from holmesjax import job_files
from holmesjax.checkpoints import resume
from holmesjax.hosts import computing
from holmesjax.job import Job
from holmesjax.liveness.lease import Lease


@contextlib.contextmanager
def saved_for_later(job: Job, allow: Sequence[str]) -> Iterator[None]:
    """Owns the run folder and saves the job in it; says where it would resume.

    Args:
      job: the run and its folder.
      allow: changes since the checkpoint that are permitted, as in `resume.find`. They are kept in
        the run folder, since the job starts more than once.

    Raises HolmesError as `resume.find` does.
    """
    with Lease(job.run_dir) as held:  # not longer: the job wants it
        names = resume.names_of(allow)
        computing.permitted(job.run_dir, names)
        settings = [name for name in names if not computing.is_fact(name)]
        say = lambda text: print(text, flush=True)
        start = resume.find(job, settings, say, owner=held, fetches=True)
        for line in start.describe():
            print(line, flush=True)
        job_files.save(job, start.step)
        yield
