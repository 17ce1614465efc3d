"""A fabric is added by one row of the table: here, one that goes from a topology file to a plan."""

import pytest

from holmesjax.topology import fabrics, loading
from holmesjax.topology.fabrics import FabricFacts
from launch.__main__ import main
from launch.launchers import hosts

TOPOLOGY = """
name: toy
clusters:
  - name: a
    fabric: slingshot
    nodes: 2
    devices: {kind: a100_80gb, count: 2}
    nics: [{kind: roce_200, fabric: slingshot}, {kind: ethernet_25}]
"""
HOSTS = """
hosts: [{node: a-0, addresses: {slingshot: [10.0.0.1]}}, {node: a-1}]
"""
RUN = """
topology: {topology}
run: {{dir: {run_dir}}}
model: {{num_layers: 2, width: 256, num_heads: 4, context_length: 128}}
data: {{corpus: python-stdlib}}
train: {{steps: 1, global_batch: 16}}
optimizer: {{learning_rate: 1.0e-3}}
parallel: {{clusters: [a], data: 4, fsdp: 1, tensor: 1}}
"""


@pytest.fixture
def topology_file(monkeypatch, tmp_path):
    slingshot = FabricFacts(title="Slingshot", joins="nodes", reached=0.9, is_rdma=True)
    monkeypatch.setitem(fabrics.FABRICS, "slingshot", slingshot)
    path = tmp_path / "toy.yaml"
    path.write_text(TOPOLOGY)
    return path


def test_a_fabric_of_a_table_row_goes_through_topology_hosts_plan_and_explain(
    topology_file, tmp_path, capsys
):
    topology = loading.load(topology_file)
    nominal = topology.nominal_link("a-0", "a-1")
    assert nominal.fabric == "slingshot"
    reached = topology.effective_link("a-0", "a-1").bandwidth_bytes_per_s
    assert reached == pytest.approx(0.9 * nominal.bandwidth_bytes_per_s)
    hosts_file = tmp_path / "hosts.yaml"
    hosts_file.write_text(HOSTS)
    assert hosts.read(hosts_file, topology)["a-0"].addresses == {"slingshot": ["10.0.0.1"]}
    run_file = tmp_path / "run.yaml"
    run_file.write_text(RUN.format(topology=topology_file, run_dir=tmp_path))
    assert main(["plan", str(run_file), "--explain"]) == 0
    assert "data 4 (slingshot)" in capsys.readouterr().out


def test_a_name_that_is_in_no_row_is_refused_with_all_that_are(topology_file, capsys):
    topology_file.write_text(TOPOLOGY.replace("fabric: slingshot\n", "fabric: slingshott\n"))
    assert main(["probe", str(topology_file)]) == 2
    told = capsys.readouterr().err
    assert "must be one of local, infiniband, roce, ethernet, slingshot" in told
    assert "did you mean 'slingshot'?" in told
