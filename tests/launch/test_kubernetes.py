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
from holmesjax.topology import loading
from holmesjax.transport import key_files
from launch.launchers import kubernetes
from launch.launchers.components import read_options
from launch.launchers.kubernetes_options import KubernetesOptions, mistakes
from tests.jobs import HANG_S, ROOT, compiling_once, free_listen, write_run
from tests.launch.gpu_jobs import GPUS, gpu_job
from tests.launch.schemas import schema
from tests.one_device import RTOL
from tests.plain_losses import plain_losses

EVERYTHING = """
image: registry.example.com/holmes:1
claim: runs
namespace: team
service_account: trainer
image_pull_secrets: [registry]
node_selector: {zone: one}
tolerations: [{key: team, operator: Equal, value: ours, effect: NoExecute, toleration_seconds: 60}]
annotations: {sidecar.istio.io/inject: "false"}
env: {HF_HOME: /data/hf, XLA_FLAGS: --xla_dump_to=/runs/hlo, COST: $(X)}
env_secrets: [{name: WANDB_API_KEY, secret: wandb, key: api-key}]
mounts: [{path: /data, claim: datasets}]
launcher: {requests: {cpu: 2, memory: 8Gi}, limits: {memory: 16Gi}, node_selector: {pool: cpu}}
clusters:
  - name: hopper
    run_dir: s3://runs/hopper
    node_selector: {pool: hopper, zone: two}
    tolerations: [{operator: Exists}]
    annotations: {k8s.v1.cni.cncf.io/networks: "rdma-0,rdma-1"}
    env: {NCCL_IB_HCA: mlx5}
    env_secrets: [{name: HF_HOME, secret: hf, key: home}]
    mounts: [{path: /scratch, host_path: /mnt/nvme, read_only: false}]
    requests: {cpu: "64", memory: 500Gi}
    limits: {cpu: 64.0, memory: 1Ti, rdma/hca: 8}
    capabilities: [IPC_LOCK]
  - {name: ampere, host_network: true}
"""

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


def write(tmp_path, job, capsys, *, port=7000, max_restarts=3, text=OPTIONS):
    options = tmp_path / "options.yaml"
    own = {"mount": tmp_path / "volume", "port": port, "cluster": job.topology.clusters[0].name}
    options.write_text(text.format(**own) if text is OPTIONS else text)
    assert kubernetes.write(job, str(options), max_restarts=max_restarts) == 0
    objects = list(yaml.safe_load_all((job.run_dir / "jobset.yaml").read_text()))
    return objects, capsys.readouterr().out


def replicated(jobset) -> dict[str, dict]:
    return {entry["name"]: entry for entry in jobset["spec"]["replicatedJobs"]}


def pod_of(entry) -> dict:
    return entry["template"]["spec"]["template"]["spec"]


def mounts_of(entry) -> dict[str, tuple[dict, bool]]:
    """Returns what is mounted at each path of a pod, and whether it can only be read."""
    pod = pod_of(entry)
    sources = {v["name"]: {k: s for k, s in v.items() if k != "name"} for v in pod["volumes"]}
    places = pod["containers"][0]["volumeMounts"]
    return {p["mountPath"]: (sources[p["name"]], p.get("readOnly", False)) for p in places}


def variables_of(entry) -> dict[str, str]:
    [container] = pod_of(entry)["containers"]
    return {variable["name"]: variable.get("value") for variable in container["env"]}


def test_the_manifest_is_a_jobset(tmp_path, capsys):
    validator = jsonschema.Draft202012Validator(schema())
    _, jobset = write(tmp_path, gpu_job(tmp_path), capsys, text=EVERYTHING)[0]
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
    lambda spec: _of_second(spec)["tolerations"][0].update(toleration_seconds=60),
    lambda spec: _of_second(spec)["containers"][0]["resources"]["limits"].update(cpu="many"),
    lambda spec: _of_second(spec)["containers"][0]["securityContext"].update(capabilities=["X"]),
    lambda spec: _of_second(spec).update(imagePullSecrets=["registry"]),
]


def test_every_option_has_its_place_in_the_pods(tmp_path, capsys, monkeypatch):
    """The top of the file is for all pods; what a cluster or the launcher adds wins."""
    (_, jobset), _ = write(tmp_path, gpu_job(tmp_path), capsys, text=EVERYTHING)
    found = replicated(jobset)
    everywhere = {"key": "team", "operator": "Equal", "value": "ours", "effect": "NoExecute"}
    for entry in found.values():
        pod = pod_of(entry)
        assert pod["serviceAccountName"] == "trainer"
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert pod["tolerations"][0] == {**everywhere, "tolerationSeconds": 60}
        [container] = pod["containers"]
        [wandb] = [v for v in container["env"] if v["name"] == "WANDB_API_KEY"]
        assert wandb["valueFrom"] == {"secretKeyRef": {"name": "wandb", "key": "api-key"}}
        [cost] = [v for v in container["env"] if v["name"] == "COST"]
        assert cost["value"] == "$$(X)"  # as it stands in the file
        assert mounts_of(entry)["/data"] == (
            {"persistentVolumeClaim": {"claimName": "datasets"}},
            True,
        )
        names = [v["name"] for v in container["env"]]
        assert len(names) == len({*names})
    launcher, hopper, ampere = found.values()
    [container] = pod_of(launcher)["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "2", "memory": "8Gi"},
        "limits": {"memory": "16Gi"},
    }
    assert pod_of(launcher)["nodeSelector"] == {"zone": "one", "pool": "cpu"}
    assert pod_of(launcher)["tolerations"][1:] == []
    assert "securityContext" not in container
    [container] = pod_of(hopper)["containers"]
    assert container["resources"]["requests"] == {"cpu": "64", "memory": "500Gi"}
    limits = {"nvidia.com/gpu": "8", "cpu": "64.0", "memory": "1Ti", "rdma/hca": "8"}
    assert container["resources"]["limits"] == limits
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert pod_of(hopper)["nodeSelector"] == {"zone": "two", "pool": "hopper"}
    assert pod_of(hopper)["tolerations"][1:] == [{"operator": "Exists"}]
    assert hopper["template"]["spec"]["template"]["metadata"]["annotations"] == {
        "sidecar.istio.io/inject": "false",
        "k8s.v1.cni.cncf.io/networks": "rdma-0,rdma-1",
    }
    assert mounts_of(hopper)["/scratch"] == (
        {"hostPath": {"path": "/mnt/nvme", "type": "Directory"}},
        False,
    )
    [home] = [v for v in container["env"] if v["name"] == "HF_HOME"]
    assert home["valueFrom"] == {"secretKeyRef": {"name": "hf", "key": "home"}}
    assert variables_of(hopper)["NCCL_IB_HCA"] == "mlx5"
    flags = variables_of(hopper)["XLA_FLAGS"]
    assert "--xla_dump_to=/runs/hlo" in flags
    assert "latency_hiding" in flags
    assert (pod_of(ampere)["hostNetwork"], pod_of(ampere)["dnsPolicy"]) == (
        True,
        "ClusterFirstWithHostNet",
    )
    assert "hostNetwork" not in pod_of(hopper)
    assert pod_of(ampere)["nodeSelector"] == {"zone": "one"}
    folders = [pod_of(entry)["containers"][0]["command"][-1] for entry in (hopper, ampere)]
    assert folders == ["s3://runs/hopper", "/runs/run"]
    assert "/scratch" not in mounts_of(ampere)


def test_no_place_of_this_machine_is_in_the_manifest(tmp_path, capsys):
    job = gpu_job(tmp_path)
    assert str(tmp_path) in job.config.run.dir + job.config.topology
    objects, _ = write(tmp_path, job, capsys, text=EVERYTHING)
    text = yaml.safe_dump_all(objects)
    assert str(tmp_path) not in text
    assert str(ROOT) not in text
    assert sys.executable not in text
    settings = yaml.safe_load(objects[0]["data"]["config.yaml"])
    assert settings["run"]["dir"] == "/runs/run"


def test_a_run_in_a_store_needs_no_volume_for_its_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    job = gpu_job(tmp_path, "run.dir=s3://runs/a")
    objects, _ = write(tmp_path, job, capsys, text=EVERYTHING)
    assert yaml.safe_load(objects[0]["data"]["config.yaml"])["run"]["dir"] == "s3://runs/a"
    command = pod_of(replicated(objects[1])["ampere"])["containers"][0]["command"]
    assert command[-2:] == ["worker", "s3://runs/a"]


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
    key = key_files.read_key_file(job.run_dir / "kubernetes.key").hex()
    assert key not in printed + (job.run_dir / "jobset.yaml").read_text()
    assert "kubectl --namespace team create secret generic run-key --from-file=job.key=" in printed
    assert all(pod_of(entry)["restartPolicy"] == "Never" for entry in found.values())
    for entry in found.values():
        rules = entry["template"]["spec"]["podFailurePolicy"]["rules"]
        found_rules = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules}
        # A worker's 1 starts all pods again: it may be the loss of another. Its 75 may be a stop,
        # so it starts that pod alone, and the launcher's 75 starts all.
        is_launcher = entry["name"] == "launcher"
        assert found_rules == (
            {"FailJob": [1, 2]} if is_launcher else {"FailJob": [2], "Ignore": [75]}
        )


def test_pods_for_each_device_of_a_node_are_refused(tmp_path, capsys):
    """NCCL takes pods for hosts of their own, and Kubernetes may place them so."""
    job = gpu_job(tmp_path, "distributed.processes=device")
    with pytest.raises(HolmesError, match="processes: must be node on Kubernetes"):
        write(tmp_path, job, capsys)
    assert not (job.run_dir / "jobset.yaml").exists()


@pytest.mark.parametrize("names", [("a_b", "a-b"), ("a", "launcher")])
def test_two_replicated_jobs_of_one_name_are_refused(tmp_path, capsys, names):
    job = jobs.load(write_run(tmp_path, dict.fromkeys(names, (1,))))
    with pytest.raises(HolmesError, match="two replicated jobs that Kubernetes would call"):
        write(tmp_path, job, capsys)


@contextlib.contextmanager
def pods(objects, folder: Path, key_file: Path, host: str):
    """Starts a pod's command here, with its variables, once its `dependsOn` allows it.

    The launcher's address is `host`.
    """
    settings, _ = objects
    here = {
        kubernetes.SETTINGS_DIR: str(folder),
        f"{kubernetes.KEY_DIR}/job.key": str(key_file),
        "$(HOLMES_POD_IP)": host,
        "run-launcher-0-0.run": host,
    }

    def local(text: str) -> str:
        for there, place in here.items():
            text = text.replace(there, place)
        return text

    for name, text in settings["data"].items():
        (folder / name).write_text(local(text))
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
    host, port = free_listen().split(":")
    job = jobs.load(write_run(tmp_path, CLUSTERS), SETTINGS)
    objects, _ = write(tmp_path, job, capsys, port=port)
    found = replicated(objects[1])
    assert list(found) == ["launcher", "a", "b-2"]
    with pods(objects, tmp_path, job.run_dir / "kubernetes.key", host) as start:
        launcher = start(found["launcher"], 0)
        deadline_s = time.monotonic() + HANG_S
        while not is_ready(host, int(port)):
            assert launcher.poll() is None, launcher.stdout.read()
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        workers = [
            start(entry, index)
            for entry in list(found.values())[1:]
            for index in range(entry["template"]["spec"]["completions"])
        ]
        output, _ = launcher.communicate(timeout=HANG_S)
        assert launcher.returncode == 0, output
        assert [worker.wait(HANG_S) for worker in workers] == [0, 0, 0]
    records = metrics.read(tmp_path / "volume/run")
    assert [record["step"] for record in records] == list(range(1, 7))
    losses = [record["loss"] for record in records]
    np.testing.assert_allclose(losses, plain_losses(*SETTINGS), rtol=RTOL)


def is_ready(host: str, port: int) -> bool:
    """The readiness probe asks so."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


TOP = "image: x\nclaim: y\n"
HOPPER = f"{TOP}clusters:\n  - name: hopper\n    "


@pytest.mark.parametrize(
    "text, line, words",
    [
        ("image: x", 1, "claim: is missing"),
        (TOP + "mount: runs", 3, "must be a path from the root of the image"),
        (TOP + "imagine: z", 3, "did you mean 'image'?"),
        (TOP + "limits: {cpu: 1}", 3, "write it in section 'launcher' or 'clusters'"),
        (TOP + "service_account: Me", 3, "is no name of an object of Kubernetes"),
        (TOP + "env: {HOLMES_PROCESS: '1'}", 3, "cannot be the name of a variable"),
        (TOP + "env_secrets: [{name: A B, secret: s, key: k}]", 3, "cannot be the name"),
        (TOP + "env: {A: b}\nenv_secrets: [{name: A, secret: s, key: k}]", 4, "is in `env` too"),
        (TOP + "env_secrets: [{name: A, secret: s}]", 3, "env_secrets[0].key: is missing"),
        (TOP + "annotations: {a b: c}", 3, "is no key of Kubernetes"),
        (TOP + "tolerations: [{operator: Exist}]", 3, "did you mean 'Exists'?"),
        (TOP + "tolerations: [{value: a}]", 3, "needs the key of a taint"),
        (TOP + "tolerations: [{key: a, operator: Exists, value: b}]", 3, "has no use beside"),
        (
            TOP + "tolerations: [{key: a, toleration_seconds: 1}]",
            3,
            "only for the effect NoExecute",
        ),
        (TOP + "tolerations: [{key: a, tolerationSeconds: 1}]", 3, "'toleration_seconds'"),
        (TOP + "mounts: [{path: /data}]", 3, "needs one of `claim` and `host_path`"),
        (TOP + "mounts: [{path: /a, claim: b, host_path: /c}]", 3, "needs one of"),
        (TOP + "mounts: [{path: /runs/, claim: b}]", 3, "has another volume of the pod"),
        (
            TOP + "mounts: [{path: /a, claim: b}]\nlauncher: {mounts: [{path: /a, claim: c}]}",
            4,
            "has another volume of the pod",
        ),
        (TOP + "mounts: [{path: /a, host_path: b}]", 3, "must be a path from the root of the node"),
        (TOP + "launcher: {name: a}", 3, "launcher.name: no such setting"),
        (TOP + "launcher: {requests: {memory: 64 GiB}}", 3, "is no amount of a resource"),
        (TOP + "clusters: [{name: hoper}]", 3, "did you mean 'hopper'?"),
        (HOPPER + "limits: {nvidia.com/gpu: 4}", 5, "the plan says how many"),
        (HOPPER + "run_dir: runs/a", 5, "must be a whole path"),
        (
            HOPPER + "requests: {cpu: 2}\n    limits: {cpu: 1500m}",
            5,
            "is more than its limit, 1500m",
        ),
        (HOPPER + "requests: {rdma/hca: 1}", 5, "is requested by its limit alone"),
        (HOPPER + "capabilities: [CAP_IPC_LOCK]", 5, "write it as IPC_LOCK"),
        (HOPPER + "capabilities: [ipc lock]", 5, "write it as IPC_LOCK"),
        (HOPPER + "host_network: maybe", 5, "must be true or false"),
        (HOPPER + "limits: {}\n  - name: hopper", 6, "is described twice"),
    ],
)
def test_mistakes_in_the_options_have_a_place(tmp_path, text, line, words):
    (tmp_path / "options.yaml").write_text(text)
    (tmp_path / "gpus.yaml").write_text(GPUS)
    topology = loading.load(tmp_path / "gpus.yaml")
    with pytest.raises(HolmesError) as caught:
        read_options(KubernetesOptions, tmp_path / "options.yaml", topology, mistakes)
    assert words in str(caught.value)
    assert f"{tmp_path}/options.yaml:{line}: " in str(caught.value)


def test_nothing_is_written_where_the_options_are_wrong(tmp_path):
    (tmp_path / "options.yaml").write_text("{image: x}")
    with pytest.raises(HolmesError, match="claim: is missing"):
        kubernetes.write(gpu_job(tmp_path), str(tmp_path / "options.yaml"), max_restarts=0)
    assert not (tmp_path / "run").exists()
