"""All planted bugs, from the modules beside this one.

Each is a mistake that a person could make. They are spread over all packages, and no test was
written for the text of a bug. `python -m tests.mutations` plants them.
"""

from tests.mutations.bugs_in_data import DATA
from tests.mutations.bugs_in_jobs import JOBS
from tests.mutations.bugs_in_plans import PLANS
from tests.mutations.bugs_in_training import TRAINING

BUGS = (*DATA, *PLANS, *TRAINING, *JOBS)
