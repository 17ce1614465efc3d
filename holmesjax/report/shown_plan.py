"""The plan of a run as `launch plan` prints it, and drawn where a notebook shows it."""

import base64
import html
import io
import os
from dataclasses import dataclass

from holmesjax import job_description
from holmesjax.job import Job
from holmesjax.report.mesh_picture import mesh_picture


@dataclass(frozen=True, repr=False)
class ShownPlan:
    """The machines, the plan and what it predicts; `print` shows it.

    Args:
      job: of the run. `job.plan` has the plan itself, with its numbers.
    """

    job: Job

    def __str__(self) -> str:
        return "\n".join(job_description.describe(self.job, self.job.pool(os.environ)))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The machines with the stages on them, and the text below."""
        file = io.BytesIO()
        mesh_picture(self.job.plan, self.job.topology).savefig(file, format="png", dpi=110)
        picture = base64.b64encode(file.getvalue()).decode()
        return (
            f'<img alt="the devices of each stage" src="data:image/png;base64,{picture}">'
            f"<pre>{html.escape(str(self))}</pre>"
        )
