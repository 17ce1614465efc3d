"""The launcher `kubernetes`: its manifest against JobSet's own schema, and what its pods run.

There is no Kubernetes here. The pods of the manifest are run as processes of this machine.
"""

import contextlib
import copy
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import yaml

from holmesjax import job as jobs
from holmesjax.errors import HolmesError
from holmesjax.report import metrics
from holmesjax.transport import connections
from launch.launchers import kubernetes
from tests.distributed.test_whole_jobs import plain_losses
from tests.jobs import ROOT, compiling_once, write_run
from tests.launch.test_slurm import gpu_job
from tests.one_device import RTOL

CLUSTERS = {"a": (1, 1), "b_2": (1,)}
SETTINGS = ["model.num_layers=2", "model.width=16", "train.steps=6"]
OPTIONS = """
image: registry.example.com/holmes:1
claim: runs
mount: {mount}
namespace: team
port: {port}
clusters:
  - {{name: {cluster}, node_selector: {{gpu: h100}}, limits: {{rdma/hca: "1"}}}}
"""


def schema() -> dict:
    """The schema of a JobSet, from its custom resource definition; unknown keys are mistakes."""
    path = Path(os.environ.get("JOBSET_CRD", ROOT.parent / "shared/data/jobset-crd.yaml"))
    if not path.is_file():
        pytest.skip(f"needs JobSet's custom resource definition: set JOBSET_CRD; not at {path}")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    definition = yaml.load(path.read_text(), Loader=loader)
    [version] = [v for v in definition["spec"]["versions"] if v["name"] == "v1alpha2"]
    found = version["schema"]["openAPIV3Schema"]
    close(found)
    return found


def close(node):
    """Refuses keys that the schema does not list, as the API server does with strict fields."""
    if isinstance(node, list):
        for item in node:
            close(item)
    if isinstance(node, dict):
        if isinstance(node.get("properties"), dict) and "additionalProperties" not in node:
            node["additionalProperties"] = False
        for value in node.values():
            close(value)


def write(tmp_path, job, capsys, *, port=7000, max_restarts=3):
    options = tmp_path / "options.yaml"
    cluster = job.topology.clusters[0].name
    options.write_text(OPTIONS.format(mount=tmp_path / "volume", port=port, cluster=cluster))
    assert kubernetes.write(job, str(options), max_restarts=max_restarts) == 0
    objects = list(yaml.safe_load_all((job.run_dir / "jobset.yaml").read_text()))
    return objects, capsys.readouterr().out


def replicated(jobset) -> dict[str, dict]:
    return {entry["name"]: entry for entry in jobset["spec"]["replicatedJobs"]}


def pod_of(entry) -> dict:
    return entry["template"]["spec"]["template"]["spec"]


def variables_of(entry) -> dict[str, str]:
    [container] = pod_of(entry)["containers"]
    return {variable["name"]: variable.get("value") for variable in container["env"]}


def test_the_manifest_is_a_jobset(tmp_path, capsys):
    validator = jsonschema.Draft202012Validator(schema())
    _, jobset = write(tmp_path, gpu_job(tmp_path), capsys)[0]
    assert [error.message for error in validator.iter_errors(jobset)] == []
    for change in WRONG:
        wrong = copy.deepcopy(jobset)
        change(wrong["spec"])
        assert list(validator.iter_errors(wrong)), "a wrong manifest passes"


def _of_second(spec):
    return pod_of(spec["replicatedJobs"][1])


WRONG = [
    lambda spec: spec["failurePolicy"].update(maxRestarts="3"),
    lambda spec: spec["failurePolicy"]["rules"][0].update(action="FailJob"),
    lambda spec: spec["successPolicy"].pop("operator"),
    lambda spec: spec["replicatedJobs"][1]["dependsOn"][0].update(status="Running"),
    lambda spec: spec["replicatedJobs"][0].pop("name"),
    lambda spec: spec["network"].update(enableDnsHostnames=True),
    lambda spec: _of_second(spec)["containers"][0].update(env={"A": "b"}),
    lambda spec: _of_second(spec)["volumes"][0].update(claim="runs"),
]


def test_a_replicated_job_for_each_cluster_and_one_for_the_launcher(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.8")
    job = gpu_job(tmp_path)
    (_, jobset), printed = write(tmp_path, job, capsys)
    found = replicated(jobset)
    assert list(found) == ["launcher", "hopper", "ampere"]
    for entry in found.values():  # the launcher plans with the memory that the others have
        assert variables_of(entry)["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.8"
        [key] = [v["secret"] for v in pod_of(entry)["volumes"] if "secret" in v]
        assert not key["defaultMode"] & 0o077, "the key of a job is for its owner only"
    for name, gpus, numbers in (("hopper", "8", "0,1"), ("ampere", "4", "2,3")):
        spec = found[name]["template"]["spec"]
        assert (spec["completions"], spec["parallelism"]) == (2, 2)
        assert spec["completionMode"] == "Indexed"
        limits = pod_of(found[name])["containers"][0]["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == gpus
        variables = variables_of(found[name])
        assert variables["HOLMES_PROCESSES"] == numbers
        assert variables["HOLMES_CONTROLLER"] == "run-launcher-0-0.run:7000"
        assert "xla_gpu" in variables["XLA_FLAGS"]
    assert pod_of(found["hopper"])["nodeSelector"] == {"gpu": "h100"}
    assert "nodeSelector" not in pod_of(found["ampere"])
    assert found["launcher"]["template"]["spec"]["completions"] == 1
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == kubernetes.MAX_RESTARTS
    [container] = pod_of(found["launcher"])["containers"]
    assert "--max-restarts=3" in container["args"]  # it counts those without a new step
    key = connections.read_key_file(job.run_dir / "kubernetes.key").hex()
    assert key not in printed + (job.run_dir / "jobset.yaml").read_text()
    assert "kubectl --namespace team create secret generic run-key --from-file=job.key=" in printed
    assert all(pod_of(entry)["restartPolicy"] == "Never" for entry in found.values())
    for entry in found.values():
        [rule] = entry["template"]["spec"]["podFailurePolicy"]["rules"]
        # 75 starts all pods again, and so does a worker's 1, which may be the loss of another.
        assert rule["onExitCodes"]["values"] == ([1, 2] if entry["name"] == "launcher" else [2])


@contextlib.contextmanager
def pods(objects, folder: Path, key_file: Path):
    """Starts a pod's command here, with its variables, once its `dependsOn` allows it."""
    settings, _ = objects
    for name, text in settings["data"].items():
        (folder / name).write_text(text)
    here = {
        kubernetes.SETTINGS_DIR: str(folder),
        f"{kubernetes.KEY_DIR}/job.key": str(key_file),
        "$(POD_IP)": "127.0.0.1",
        "run-launcher-0-0.run": "127.0.0.1",
    }

    def local(text: str) -> str:
        for there, place in here.items():
            text = text.replace(there, place)
        return text

    with contextlib.ExitStack() as started:

        def start(entry, index: int) -> subprocess.Popen:
            [container] = pod_of(entry)["containers"]
            argv = [*container["command"], *container.get("args", [])]
            own = {name: local(v) for name, v in variables_of(entry).items() if v is not None}
            address = {fabric: ["127.0.0.1"] for fabric in ("infiniband", "roce", "ethernet")}
            own |= {"JOB_COMPLETION_INDEX": str(index), "HOLMES_ADDRESSES": json.dumps(address)}
            process = subprocess.Popen(
                [sys.executable, *map(local, argv[1:])],
                cwd=ROOT,
                env={**os.environ, **own},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            started.callback(process.communicate)
            started.callback(process.kill)
            return process

        yield start


def test_the_pods_of_a_manifest_train(tmp_path, capsys, monkeypatch):
    for name, value in compiling_once(tmp_path).items():
        monkeypatch.setenv(name, value)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = jobs.load(write_run(tmp_path, CLUSTERS), SETTINGS)
    objects, _ = write(tmp_path, job, capsys, port=port)
    found = replicated(objects[1])
    assert list(found) == ["launcher", "a", "b-2"]
    with pods(objects, tmp_path, job.run_dir / "kubernetes.key") as start:
        launcher = start(found["launcher"], 0)
        deadline_s = time.monotonic() + 120  # a hang guard
        while not is_ready(port):
            assert launcher.poll() is None, launcher.stdout.read()
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        workers = [
            start(entry, index)
            for entry in list(found.values())[1:]
            for index in range(entry["template"]["spec"]["completions"])
        ]
        output, _ = launcher.communicate(timeout=120)
        assert launcher.returncode == 0, output
        assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    records = metrics.read(tmp_path / "volume/run")
    assert [record["step"] for record in records] == list(range(1, 7))
    losses = [record["loss"] for record in records]
    np.testing.assert_allclose(losses, plain_losses(*SETTINGS), rtol=RTOL)


def is_ready(port: int) -> bool:
    """The readiness probe asks so."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "text, words",
    [
        ("{image: x}", "claim: is missing"),
        ("{image: x, claim: y, mount: runs}", "must be a path from the root"),
        ("{image: x, claim: y, clusters: [{name: hoper}]}", "did you mean 'hopper'?"),
        ("{image: x, claim: y, imagine: z}", "did you mean 'image'?"),
    ],
)
def test_mistakes_in_the_options_have_a_place(tmp_path, text, words):
    (tmp_path / "options.yaml").write_text(text)
    with pytest.raises(HolmesError) as caught:
        kubernetes.write(gpu_job(tmp_path), str(tmp_path / "options.yaml"), max_restarts=0)
    assert words in str(caught.value)
    assert not (tmp_path / "run").exists()
