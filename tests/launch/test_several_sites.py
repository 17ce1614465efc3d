"""The scripts of docs/several_sites.md train a run; its Job fits the schema of Jobs."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import jsonschema
import numpy as np
import pytest
import yaml

from holmesjax.config import CHECKOUT
from holmesjax.report import metrics
from tests.jobs import HANG_S, ROOT, compiling_once, free_listen, write_run
from tests.launch.schemas import schema
from tests.one_device import RTOL
from tests.plain_losses import plain_losses

PAGE = (CHECKOUT / "docs/several_sites.md").read_text()
LAUNCHER, RELAY, SITE = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
CLUSTERS = {"a": (1, 1), "b": (1,)}
NUMBERS = {"a": "0,1", "b": "2"}
SETTINGS = ["model.num_layers=2", "model.width=16", "train.steps=6"]
# Stands for Slurm's. Its first tasks are lost, so the site starts them again.
SRUN = """\
#!{python}
import json, os, subprocess, sys
words = sys.argv[1:]
assert words[:2] == ["--kill-on-bad-exit=0", "--mpi=none"], words
if not os.path.exists(lost := os.environ["LOST"]):
    open(lost, "w").close()
    sys.exit(137)
tasks = []
for i, number in enumerate(os.environ["HOLMES_PROCESSES"].split(",")):
    address = {{fabric: [f"127.0.9.{{number}}"] for fabric in ("infiniband", "roce", "ethernet")}}
    own = {{"SLURM_PROCID": str(i), "HOLMES_ADDRESSES": json.dumps(address)}}
    tasks.append(subprocess.Popen(words[2:], env={{**os.environ, **own}}))
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture
def start(tmp_path):
    """Starts a script of the page with the names of this machine; all that it starts ends."""
    srun = tmp_path / "bin/srun"
    srun.parent.mkdir()
    srun.write_text(SRUN.format(python=sys.executable))
    srun.chmod(0o755)
    listen, relay = free_listen(), free_listen()
    here = {
        "/shared/runs/llama.key": str(tmp_path / "llama.key"),
        "/shared/runs/llama": str(tmp_path / "run"),
        "RUN.yaml": " ".join([str(write_run(tmp_path, CLUSTERS)), *SETTINGS]),
        "relay.example.org:7443": relay,
        "0.0.0.0:7443": relay,
        "relay.key": str(tmp_path / "relay.key"),
        ".venv/bin/python": sys.executable,
        "10.0.0.1:7000": listen,
        "sleep 5": "sleep 0.1",
    }
    started = []

    def begin(text: str, **env: str) -> subprocess.Popen:
        for there, place in here.items():
            text = text.replace(there, place)
        with (tmp_path / f"{len(started)}.out").open("w") as output:
            env = {**os.environ, **compiling_once(tmp_path), **env}
            env |= {"PATH": f"{srun.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
            how = {"cwd": ROOT, "env": env, "stdout": output, "stderr": output}
            started.append(subprocess.Popen(["bash", "-c", text], start_new_session=True, **how))
        return started[-1]

    yield begin
    for script in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()


def test_each_site_starts_its_part_of_a_run(tmp_path, start):
    """Nobody can be called: what the sites and the launcher say goes through a relay."""
    apart = "distributed.calls_out=[a,b] distributed.relay=relay.example.org:7443"
    launcher = start(LAUNCHER.replace("RUN.yaml", f"RUN.yaml {apart}"))
    key_at, deadline_s = tmp_path / "llama.key", time.monotonic() + HANG_S
    while not key_at.exists() or not key_at.stat().st_size:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    start(RELAY, HOLMES_KEY_FILE=str(key_at))
    site = SITE.replace("10.0.0.1:7000", "launcher@relay.example.org:7443")
    sites = [
        start(site.replace("4,5,6,7,8,9", numbers), LOST=str(tmp_path / f"{name}.lost"))
        for name, numbers in NUMBERS.items()
    ]
    output = lambda: "".join(path.read_text() for path in sorted(tmp_path.glob("*.out")))
    try:
        assert launcher.wait(HANG_S) == 0
        assert [site.wait(HANG_S) for site in sites] == [0, 0]
    except (AssertionError, subprocess.TimeoutExpired) as error:
        raise AssertionError(output()) from error
    assert "processes   3: a/a-0, a/a-1, b/b-0" in output()
    assert sorted(path.name for path in tmp_path.glob("*.lost")) == ["a.lost", "b.lost"]
    assert (tmp_path / "llama.key").stat().st_mode & 0o777 == 0o600
    losses = [record["loss"] for record in metrics.read(tmp_path / "run")]
    np.testing.assert_allclose(losses, plain_losses(*SETTINGS), rtol=RTOL)


@pytest.mark.parametrize(
    "script, statuses",
    [(LAUNCHER, (75, 0)), (LAUNCHER, (75, 75, 1)), (SITE, (1, 75, 0)), (SITE, (75, 137, 2))],
)
def test_a_loop_ends_where_another_start_would_end_alike(tmp_path, start, script, statuses):
    """A launcher's 1 is final. A worker's may be the loss of another process."""
    (tmp_path / "statuses").write_text("".join(f"{status}\n" for status in (*statuses, 99)))
    python = tmp_path / "python"
    lines = f"cd {tmp_path}; s=$(head -1 statuses); sed -i 1d statuses; exit $s"
    python.write_text(f"#!/bin/sh\n{lines}\n")
    python.chmod(0o755)
    (tmp_path / "lost").touch()
    text = script.replace(".venv/bin/python", str(python)).replace("4,5,6,7,8,9", "0")
    start(text, LOST=str(tmp_path / "lost")).wait(HANG_S)
    assert (tmp_path / "statuses").read_text() == "99\n"


def test_the_job_of_a_site_fits_the_schema_of_jobs():
    """A JobSet has Jobs in it, whose metadata and spec have the same schema."""
    jobs = schema()["properties"]["spec"]["properties"]["replicatedJobs"]["items"]
    validator = jsonschema.Draft202012Validator(jobs["properties"]["template"])
    [text] = re.findall(r"```yaml\n(apiVersion.*?)```", PAGE, re.DOTALL)
    job = yaml.safe_load(text)
    assert [error.message for error in validator.iter_errors({"spec": job["spec"]})] == []
    [container] = job["spec"]["template"]["spec"]["containers"]
    names = {mount["name"] for mount in container["volumeMounts"]}
    assert names == {volume["name"] for volume in job["spec"]["template"]["spec"]["volumes"]}
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert len(variables["HOLMES_PROCESSES"].split(",")) == job["spec"]["completions"]
