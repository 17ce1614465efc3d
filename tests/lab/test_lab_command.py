"""The verb `lab`: what it refuses, and the verbs that run in a lab."""

import os
import re
import subprocess

import pytest

from holmesjax.topology import calibration
from tests.jobs import run_launch, run_launch_here, write_run
from tests.labs import CLUSTERS, left_behind, needs_lab


def test_a_dry_run_needs_no_root_and_changes_nothing(tmp_path):
    run_file = write_run(tmp_path, CLUSTERS)
    somebody = ["unshare", "--user", "--map-user=1000"] if os.geteuid() == 0 else []
    if (
        somebody
        and subprocess.run([*somebody, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this user is root and cannot be another one")
    words = (tmp_path / "run_topology.yaml", "--cpu", "20%")
    done = run_launch("lab", *words, "--dry-run", "--", "train", run_file, prefix=somebody)
    assert done.returncode == 0, done.stderr
    assert "# take it away" in done.stdout
    assert not (tmp_path / "run").exists()
    assert left_behind(re.search(r"holmes-(\w+):", done.stdout)[1]) == []
    done = run_launch("lab", *words, "--", "train", run_file, prefix=somebody)
    assert done.returncode == 2
    assert "needs root" in done.stderr
    assert "--dry-run" in done.stderr


@pytest.mark.parametrize(
    "options, command, told",
    [
        ([], [], "needs a command"),
        ([], ["--", "train", "{run}", "--launcher", "local"], "starts the processes itself"),
        ([], ["--", "train", "{run}", "topology=x.yaml"], "the lab has its own topology"),
        ([], ["--", "generate", "runs/x"], "has no topology"),
        (["--cpu", "much"], ["--", "train", "{run}"], "write --cpu 45%"),
        (["--scale", "0"], ["--", "train", "{run}"], "must be above 0"),
        (["--fault", "cut a<->z"], ["--", "train", "{run}"], "no such cluster"),
    ],
)
def test_a_mistake_in_the_command_is_told_in_a_paragraph(tmp_path, capsys, options, command, told):
    run_file = write_run(tmp_path, CLUSTERS)
    words = [word.format(run=run_file) for word in command]
    done = run_launch_here(capsys, "lab", tmp_path / "run_topology.yaml", *options, *words)
    assert done.returncode == 2
    told_lines = [line for line in done.stderr.splitlines() if not line.startswith("planning: ")]
    assert told_lines[0].startswith("error: ")  # a slow search says what it plans before
    assert told in done.stderr


def test_a_plan_is_made_with_the_topology_of_the_lab(tmp_path, capsys):
    run_file = write_run(tmp_path, CLUSTERS)
    lab = ["lab", "configs/topologies/ib_roce.yaml", "--"]
    done = run_launch_here(capsys, *lab, "plan", run_file, "parallel.clusters=null")
    assert done.returncode == 0, done.stderr
    assert "ib_roce: 4 nodes" in done.stdout


@needs_lab
def test_the_doctor_sees_a_link_that_was_cut(tmp_path):
    """And no other problem in a lab."""
    run_file = write_run(tmp_path, CLUSTERS)
    lab = [tmp_path / "run_topology.yaml", "--scale", "0.01", "--fault", "t=0s cut a<->b"]
    done = run_launch("lab", *lab, "--", "doctor", run_file)
    assert done.returncode == 1, done.stderr
    problems = re.findall(r"^problem +(.*)", done.stdout, re.MULTILINE)
    shut = re.findall(r"^ports: (\S+) does not reach (\S+) over", "\n".join(problems), re.MULTILINE)
    across = [("a-0", "b-0"), ("a-1", "b-0")]
    assert sorted(shut) == sorted(across + [(b, a) for a, b in across])
    assert len(problems) == len(shut)


def test_a_profile_would_run_on_the_node_that_is_named(tmp_path, capsys):
    run_file = write_run(tmp_path, CLUSTERS)
    lab = ["lab", tmp_path / "run_topology.yaml", "--dry-run", "--", "profile", run_file]
    output = tmp_path / "found.yaml"
    done = run_launch_here(capsys, *lab, "--node", "b-0", "--output", output)
    assert done.returncode == 0, done.stderr
    [started] = [line for line in done.stdout.splitlines() if "launch profile" in line]
    assert ".b-0 " in started
    assert f"--output {output} --node b-0" in started
    done = run_launch_here(capsys, *lab, "--node", "c-0")
    assert done.returncode == 2
    assert "must be a node of the topology" in done.stderr


@needs_lab
def test_a_profile_is_made_with_the_share_of_its_node(tmp_path):
    run_file = write_run(tmp_path, CLUSTERS)
    output = tmp_path / "found.yaml"
    lab = ["lab", tmp_path / "run_topology.yaml", "--cpu", "30%", "--scale", "0.01", "--"]
    one_head = ["model.width=16", "model.num_heads=1"]  # fewer products to time
    done = run_launch(*lab, "profile", run_file, *one_head, "--output", output)
    assert done.returncode == 0, done.stderr + done.stdout
    assert calibration.read(output).devices == ("cpu",)
    assert left_behind(re.search(r"holmes-(\w+):", done.stdout)[1]) == []
