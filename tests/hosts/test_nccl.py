"""The variables of NCCL on recorded hosts, and in a worker."""

import dataclasses
import json
import os
import re
from ipaddress import IPv6Address
from pathlib import Path

import pytest
import yaml
from hypothesis import given, strategies as st

from holmesjax import job as jobs
from holmesjax.errors import HolmesError
from holmesjax.hosts import nccl, nics as discovery
from holmesjax.hosts.process_environment import ProcessEnvironment
from holmesjax.plan.processes import make_processes
from holmesjax.runtime import domain
from holmesjax.topology import fabrics
from launch.verbs import nics
from tests.cases import cases
from tests.host_files import materialise
from tests.jobs import ROOT, RunningJob, free_listen, run_launch, run_launch_here
from tests.recorded_hosts import HOSTS, LO

TOPOLOGY = """
name: gpus
clusters:
  - name: ib
    fabric: infiniband
    nodes: 2
    devices: {kind: h100, count: 1}
    nics: [{kind: infiniband_400}, {kind: ethernet_25}]
  - name: roce
    fabric: roce
    nodes: 2
    devices: {kind: h100, count: 1}
    nics: [{kind: roce_400}, {kind: ethernet_25}]
links:
  - {between: [ib, roce], fabric: ethernet, bandwidth: 25 Gb/s, latency: 50 us}
"""
RUN = """
topology: topology.yaml
run: {dir: unset}
model: {num_layers: 3, width: 32, num_heads: 4, context_length: 32}
data: {corpus: python-stdlib}
train: {steps: 8, global_batch: 8, eval_batches: 1}
optimizer: {learning_rate: 3.0e-3, warmup_steps: 2}
parallel:
  clusters: [ib, roce]
  data: 2
  tensor: 1
  microbatches: 2
  fsdp: 1
  schedule: 1f1b
  activation_checkpointing: none
"""


def find(name, root):
    recorded = HOSTS[name]
    materialise(recorded.tree, root)
    return discovery.discover(root, addresses=recorded.ips, gpus=recorded.gpus)


def values(environment):
    return {variable.name: variable.value for variable in environment.variables}


@cases("name", HOSTS)
def test_variables_of_each_fabric(name, tmp_path):
    host, recorded = find(name, tmp_path), HOSTS[name]
    for fabric in ("infiniband", "roce"):
        if fabric not in recorded.variables:
            with pytest.raises(
                HolmesError, match=f"has no usable {fabrics.FABRICS[fabric].title} port"
            ):
                nics.environment(host, fabric, {})
    problems = 0
    for fabric, expected in recorded.variables.items():
        found = nics.environment(host, fabric, {})
        assert values(found) == expected == found.added
        assert all(variable.reason for variable in found.variables)
        problems += len(found.problems)
    assert problems == recorded.problems


def test_reasons_name_what_was_left_out_and_what_differs(tmp_path):
    dgx = nics.environment(find("dgx_infiniband", tmp_path / "a"), "infiniband", {})
    [ports] = [v for v in dgx.variables if v.name == "NCCL_IB_HCA"]
    assert ports.reason == (
        "the active InfiniBand ports; not mlx5_1 port 1, mlx5_5 port 1: no PCIe switch with a GPU, "
        "unlike others"
    )
    differing = nics.environment(find("gid_indexes_differ", tmp_path / "b"), "roce", {})
    [problem] = differing.problems
    assert "mlx5_0 port 1 has it at 3, mlx5_1 port 1 has it at 5" in problem


def test_of_several_good_gids_the_first_is_taken(tmp_path):
    host = find("gid_index_in_common", tmp_path)
    alone = dataclasses.replace(host, nics=host.nics[:1])
    assert values(nics.environment(alone, "roce", {}))["NCCL_IB_GID_INDEX"] == "3"


def test_a_host_that_is_down_is_refused_with_the_state_of_its_ports(tmp_path):
    with pytest.raises(HolmesError) as error:
        nics.environment(find("down_ports", tmp_path), "infiniband", {})
    assert "mlx5_0 port 1: link layer InfiniBand, but no subnet manager" in error.value.found
    assert "NCCL_NET=Socket" in error.value.fix


# ---- what the user has set -----------------------------------------------------------------------

NAMES = ["NCCL_NET", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG"]
OWN = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["IB", "=mlx5_1:1", "3", "x"]))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    return find("mixed_infiniband_and_roce", tmp_path_factory.mktemp("mixed"))


@given(OWN, st.sampled_from(["infiniband", "roce", "ethernet"]))
def test_what_the_user_has_set_stays_and_a_difference_is_named(mixed, own, fabric):
    found = nics.environment(mixed, fabric, own)
    assert found.added.keys().isdisjoint(own)
    for name, value in values(found).items():
        told = [text for text in found.warnings if text.startswith(f"{name} stays")]
        assert len(told) == (name in own and own[name] != value)
        assert all(repr(own[name]) in text and repr(value) in text for text in told)


def test_a_user_who_turned_rdma_off_needs_no_ports(tmp_path):
    host = find("cloud_vm", tmp_path)
    found = nccl.environment(host, "infiniband", ["192.0.2.2"], {"NCCL_NET": "Socket"})
    assert found.added == {"NCCL_SOCKET_IFNAME": "=eth0"}
    assert len(found.warnings) == 1


def test_variables_that_undo_it_are_named(mixed):
    own = {"NCCL_IB_DISABLE": "1", "NCCL_IGNORE_NET_MISMATCH": "0"}
    [problem] = nics.environment(mixed, "infiniband", own).problems
    assert problem.startswith("NCCL_IB_DISABLE is '1'")
    assert nics.environment(mixed, "ethernet", own).problems == ()


def test_an_address_of_no_interface_is_a_problem(mixed):
    found = nccl.environment(mixed, "ethernet", ["10.99.0.1"], {})
    assert "NCCL_SOCKET_IFNAME" not in values(found)
    assert "10.99.0.1" in found.problems[0]


def test_ncclls_own_files_count_as_set_in_its_order(tmp_path):
    home, etc = tmp_path / "home", tmp_path / "etc"
    home.mkdir()
    etc.mkdir()
    (home / ".nccl.conf").write_text("# NCCL_DEBUG=WARN\nNCCL_IB_HCA=b\nNCCL_NET=b\n")
    (etc / "nccl.conf").write_text("NCCL_NET=c\nNCCL_IB_TC=106\n\nnonsense\n")
    env = {"HOME": str(home), "NCCL_IB_HCA": "a", "PATH": "/bin"}
    expected = {"NCCL_IB_HCA": "a", "NCCL_NET": "b", "NCCL_IB_TC": "106"}
    assert nccl.user_settings(env, tmp_path) == expected
    env["NCCL_CONF_FILE"] = str(tmp_path / "none")  # then that of the home is not read
    assert nccl.user_settings(env, tmp_path)["NCCL_NET"] == "c"


# ---- a worker ------------------------------------------------------------------------------------


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_text("00" * 32)
    path.chmod(0o600)
    return path


def test_a_worker_finds_its_addresses_and_what_is_set_wins(tmp_path, key_file, mixed):
    env = {
        "HOLMES_PROCESS": "0",
        "HOLMES_CONTROLLER": "10.0.0.1:7000",
        "HOLMES_KEY_FILE": str(key_file),
    }
    recorded = HOSTS["mixed_infiniband_and_roce"]
    place = ProcessEnvironment.read(env, lambda: mixed)
    assert place.addresses == {"local": ["127.0.0.1"], **recorded.addresses}
    env["HOLMES_ADDRESSES"] = '{"ethernet": ["10.7.0.1"]}'
    place = ProcessEnvironment.read(env, lambda: pytest.fail("nobody asked"))
    assert place.addresses == {"ethernet": ["10.7.0.1"]}
    for name, wrong in (
        ("HOLMES_PROCESS", "x"),
        ("HOLMES_PROCESS", "-1"),
        ("HOLMES_CONTROLLER", "7000"),
        ("HOLMES_CONTROLLER", "10.0.0.1:99999"),
        ("HOLMES_RESTART", "one"),
        ("HOLMES_ADDRESSES", "{"),
        ("HOLMES_ADDRESSES", '{"ethernet": "10.7.0.1"}'),  # a list of characters, once
    ):
        with pytest.raises(HolmesError, match=f"^{name}: makes no sense\n  found: '{wrong}'"):
            ProcessEnvironment.read(env | {name: wrong}, lambda: mixed)
    del env["HOLMES_ADDRESSES"]
    without = find("no_nic", tmp_path)
    with pytest.raises(HolmesError) as error:
        ProcessEnvironment.read(env, lambda: without)
    assert error.value.where == "HOLMES_ADDRESSES"
    assert "docker0: virtual (bridge)" in error.value.found


@pytest.fixture
def run_file(tmp_path):
    (tmp_path / "topology.yaml").write_text(TOPOLOGY)
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def load(run_file, *overrides):
    run_dir = run_file.parent / "run"
    run_dir.mkdir(exist_ok=True)
    job = jobs.load(run_file, [f"run.dir={run_dir}", *overrides])
    return job, make_processes(job.plan, job.topology, job.config.distributed.processes)


def choose(job, processes, me, addresses, env, host):
    members = [process for process in processes if process.stage == me.stage]
    return domain.choose_nics(job, members, me, addresses, env, lambda: host)


def test_each_process_is_told_the_nics_of_its_cluster(run_file, mixed):
    job, processes = load(run_file)
    for me, fabric in zip(processes, ["infiniband"] * 2 + ["roce"] * 2, strict=True):
        env = {"NCCL_IB_HCA": "mlx5_7", "OTHER": "1"}
        [warning] = choose(job, processes, me, discovery.addresses(mixed), env, mixed)
        expected = HOSTS["mixed_infiniband_and_roce"].variables[fabric]
        assert env == {**expected, "NCCL_IB_HCA": "mlx5_7", "OTHER": "1"}
        assert "mlx5_7" in warning
        report = yaml.safe_load((job.run_dir / "nics" / f"{me.file_name}.yaml").read_text())
        assert {name: v["value"] for name, v in report["variables"].items()} == expected
        assert report["variables"]["NCCL_IB_HCA"]["kept"] == "mlx5_7"
        assert str(mixed.nics[0]) in report["nics"]


@pytest.mark.parametrize(
    "overrides, address",
    [
        (["run.rehearse=true"], "10.1.0.4"),  # gloo, on CPUs
        ([], "127.0.0.1"),  # all on one machine
    ],
)
def test_nothing_is_told_where_nccl_needs_no_nic(run_file, mixed, overrides, address):
    job, processes = load(run_file, *overrides)
    env: dict[str, str] = {}
    assert choose(job, processes, processes[0], {"infiniband": [address]}, env, mixed) == []
    assert env == {}
    assert not (job.run_dir / "nics").exists()
    me = processes[0]  # alone: a domain of one node
    here = {"infiniband": ["10.1.0.4"]}
    assert choose(job, [me], me, here, env, mixed) == []
    assert env == {}


@pytest.mark.skipif(
    Path("/sys/class/infiniband").is_dir() or not Path("/sys/class/net").is_dir(),
    reason="needs a Linux machine without RDMA",
)
def test_a_host_without_the_fabric_ends_the_start_with_one_sentence(run_file):
    """Before JAX looks for a GPU, and without waiting for the other hosts."""
    here = f"run.dir={run_file.parent / 'run'}"
    with RunningJob(run_file, here, "--launcher", "external", "--listen", free_listen()) as job:
        printed = [job.until(f"  {name}=") for name in ("HOLMES_CONTROLLER", "HOLMES_KEY_FILE")]
        variables = dict(line.strip().split("=", 1) for line in printed)
        env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("NCCL_")},
            **variables,
            "HOLMES_PROCESS": "1",
            "HOLMES_ADDRESSES": '{"infiniband": ["10.1.0.4"]}',
        }
        assert run_launch("worker", run_file.parent / "run", env=env).returncode == 2
        assert job.end() == 2
    assert "has no usable InfiniBand port, and its cluster is on InfiniBand" in job.output
    assert "no RDMA device" in job.output
    assert "ib/ib-1" in job.output


# ---- launch nics ---------------------------------------------------------------------------------


def test_the_table_has_every_nic_with_its_reason(tmp_path):
    host = find("dgx_infiniband", tmp_path)
    lines = nics.describe(host)
    for nic in host.nics:
        [row] = [line for line in lines if line.startswith(f"  {nic.name} ")]
        assert row.endswith(nic.reason)
    [gpu] = [line for line in lines if line.startswith("  GPU 4 ")]
    expected = "GPU 4 NVIDIA H100 80GB HBM3 80 GiB 0000:86:05.0 NUMA 1 driver 570.86.15"
    assert " ".join(gpu.split()) == expected
    assert "  not for collectives: mlx5_1 port 1, no PCIe switch with a GPU, unlike others" in lines
    lines = nics.describe_environment("infiniband", nics.environment(host, "infiniband", {}))
    assert lines[0] == "environment on InfiniBand"
    assert any(line.startswith("  NCCL_SOCKET_IFNAME==eno1 ") for line in lines)


def test_the_document_shows_what_is_printed(tmp_path):
    [shown] = re.findall(r"```text\n(.*?)```", (ROOT / "docs/nics.md").read_text(), re.DOTALL)
    printed = nics.describe(find("dgx_infiniband", tmp_path))
    assert set(shown.splitlines()) <= set(printed)


def test_json_is_json(mixed):
    environments = {"roce": nics.environment(mixed, "roce", {"NCCL_NET": "Socket"})}
    read = json.loads(nics.to_json(mixed, environments))
    assert read["addresses"]["roce"] == ["10.2.0.4"]
    address = IPv6Address(read["nics"][1]["gids"][0]["address"])
    assert str(address.ipv4_mapped) == "10.2.0.4"
    assert read["environments"]["roce"]["warnings"]


@pytest.mark.skipif(not Path("/sys/class/net").is_dir(), reason="needs Linux")
def test_the_verb_on_this_machine(capsys, monkeypatch):
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    show = lambda *arguments: run_launch_here(capsys, "nics", *arguments)
    shown = show()
    assert shown.returncode == 0, shown.stderr
    assert "loopback" in shown.stdout
    assert "lo" in {nic["name"] for nic in json.loads(show("--json").stdout)["nics"]}
    refused = show("--fabric", "token-ring")
    assert refused.returncode == 2
    assert "--fabric: has no such choice\n  found: token-ring" in refused.stderr


def test_no_addresses_at_all(tmp_path):
    materialise(dict(LO), tmp_path)
    host = discovery.discover(tmp_path, addresses={}, gpus=())
    assert nics.fabrics(host, None) == []
    assert nics.fabrics(host, "roce") == ["roce"]
