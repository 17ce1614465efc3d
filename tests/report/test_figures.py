"""The pictures hold the numbers they are given, for every shape of a run."""

import dataclasses
import math
import sys

import matplotlib.colors
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle, StepPatch

from holmesjax.plan.plan import Axis, Plan, StagePlan
from holmesjax.report import figures, style, trace
from holmesjax.report.figures import link_traffic, loss_curve, pipeline_timeline
from holmesjax.report.mesh_picture import mesh_picture
from holmesjax.topology.machines import Cluster, DeviceKind, Link, Nic, Node, Topology


def record(step: int, loss: float = 2.0, **values: object) -> dict[str, object]:
    return {"step": step, "loss": loss, "skipped": False, "link_bytes": {}} | values


def task(stage: int, kind: str, microbatch: int | None, start_s: float, end_s: float):
    times = {"start_s": start_s, "end_s": end_s}
    return {"stage": stage, "kind": kind, "microbatch": microbatch, **times}


def machines(names: tuple[str, ...], *, nodes: int = 2, devices: int = 4) -> tuple[Plan, Topology]:
    """One stage a cluster, data over its nodes and tensor inside them."""
    inside = Link(fabric="nvlink", bandwidth_bytes_per_s=300e9, latency_s=2e-6)
    kind = DeviceKind(
        name="A100",
        peak_flop_per_s={"bfloat16": 312e12},
        memory_bytes=80e9,
        memory_bandwidth_bytes_per_s=2e12,
        link=inside,
    )
    nic = Nic(name="hdr", fabric="infiniband", rate_bytes_per_s=25e9, latency_s=3e-6, count=2)
    between = Link(fabric="ethernet", bandwidth_bytes_per_s=3.125e9, latency_s=50e-6)
    clusters, stages = [], []
    for number, name in enumerate(names):
        hosts = tuple(
            Node(name=f"{name}-{i}", device=kind, num_devices=devices, nics=(nic,))
            for i in range(nodes)
        )
        clusters.append(Cluster(name=name, fabric="infiniband", nodes=hosts))
        first = number * nodes * devices
        stages.append(
            StagePlan(
                cluster=name,
                nodes=tuple(host.name for host in hosts),
                chunks=((f"block_{number:03d}",),),
                devices=tuple(range(first, first + nodes * devices)),
                mesh={Axis.DATA: nodes, Axis.TENSOR: devices},
                fabrics={Axis.DATA: "infiniband", Axis.TENSOR: "nvlink"},
                memory_bytes={"parameters": 1e9},
                seconds={"compute": 0.1},
            )
        )
    plan = Plan(
        topology="t",
        topology_hash="0",
        stages=tuple(stages),
        global_batch=8,
        microbatches=2,
        schedule="1f1b",
        activation_checkpointing="none",
        boundary_bytes=1.0,
        step_time_s=0.1,
        bound_s=0.1,
        shares={},
    )
    links = {(a, b): between for a in names for b in names if a != b}
    return plan, Topology(name="t", clusters=tuple(clusters), links=links)


def draw(figure: Figure) -> Figure:
    figure.savefig("/dev/null", format="svg")
    return figure


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def lines(figure: Figure) -> dict[str, np.ndarray]:
    return {line.get_label(): line.get_xydata() for line in figure.axes[0].lines}


def test_no_window_system_is_touched():
    draw(loss_curve([record(1)]))
    assert "matplotlib.pyplot" not in sys.modules


def test_loss_curve_shows_every_loss():
    records = [record(1, 3.0), record(2, 2.5, val_loss=2.6), record(3, 2.0)]
    curves = lines(draw(loss_curve(records)))
    assert curves["training"].tolist() == [[1, 3.0], [2, 2.5], [3, 2.0]]
    assert curves["validation"].tolist() == [[2, 2.6]]
    assert set(curves) == {"training", "validation"}


def test_loss_curve_shows_each_validation_set():
    losses = [{"web": 2.5, "code": 2.7}, {"web": 2.0, "code": 2.4}]
    records = [
        record(step, 3.0, val_loss=2.6, val_losses=val_losses)
        for step, val_losses in enumerate(losses, start=1)
    ]
    curves = lines(draw(loss_curve([*records, record(3, 2.0)])))
    assert curves["validation: web"].tolist() == [[1, 2.5], [2, 2.0]]
    assert curves["validation: code"].tolist() == [[1, 2.7], [2, 2.4]]


def test_loss_curve_marks_steps_without_an_update():
    records = [record(1), record(2, math.nan), record(3, skipped=True), record(4, math.inf)]
    curves = lines(draw(loss_curve(records)))
    assert curves["skipped: gradient not finite"][:, 0].tolist() == [2, 3, 4]
    np.testing.assert_array_equal(curves["training"][:, 1], [2.0, math.nan, 2.0, math.nan])


@pytest.mark.parametrize("losses", [[math.nan], [1.0], [math.nan] * 100])
def test_loss_curve_of_odd_runs(losses):
    figure = draw(loss_curve([record(step, loss) for step, loss in enumerate(losses, start=1)]))
    assert all(tick == int(tick) for tick in figure.axes[0].get_xticks())
    assert bool(len(figure.axes[0].get_yticks())) == math.isfinite(losses[0])


def test_a_long_run_is_averaged_without_bias():
    records = [record(step, float(step)) for step in range(1, 5001)]  # a line stays a line
    raw, smooth = (line.get_xydata() for line in draw(loss_curve(records)).axes[0].lines)
    assert len(raw) <= figures.MAX_POINTS
    for curve in (raw, smooth):
        np.testing.assert_allclose(curve[:, 0], curve[:, 1], rtol=1e-12)


def bars(figure: Figure) -> list[tuple[float, float, str]]:
    """Start in ms, width in ms and kind of every task drawn."""
    to_hex = matplotlib.colors.to_hex
    kinds = {to_hex(color): trace.KINDS[kind] for kind, color in figures.COLOR_OF.items()}
    shown = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    colors = [to_hex(patch.get_facecolor()) for patch in shown]
    return sorted(
        (round(patch.get_x(), 6), round(patch.get_width(), 6), kinds[color])
        for patch, color in zip(shown, colors, strict=True)
        if color in kinds
    )


def test_timeline_shows_every_task_and_the_idle_share():
    tasks = [
        task(0, "F", 0, 10.00, 10.02),
        task(0, "B", 0, 10.06, 10.10),
        task(1, "F", 0, 10.02, 10.04),
        task(1, "B", 0, 10.04, 10.06),
        task(1, "W", 0, 10.06, 10.08),
        task(1, "U", None, 10.09, 10.10),
    ]
    figure = draw(pipeline_timeline(tasks))
    assert bars(figure) == [
        (0, 20, "forward"),
        (20, 20, "forward"),
        (40, 20, "backward"),
        (60, 20, "weight gradient"),
        (60, 40, "backward"),
        (90, 10, "update"),
    ]
    # Stage 0 works 60 of 100 ms; stage 1 from 20 to 80 and from 90 to 100.
    assert [text for text in texts(figure) if "idle" in text] == ["idle 40%", "idle 30%"]
    assert [text for text in texts(figure) if text.isdigit()] == ["0"] * 5
    [legend] = [figure.axes[0].get_legend()]
    assert [text.get_text() for text in legend.get_texts()][-1] == "idle (bubble)"


def test_boundaries_have_rows_of_their_own():
    tasks = [task(0, "F", 0, 0.0, 0.1), task(1, "F", 0, 0.3, 0.4)]
    way = {"source": 0, "target": 1, "kind": "F", "microbatch": 0, "start_s": 0.1, "end_s": 0.3}
    figure = draw(pipeline_timeline(tasks, [way]))
    assert bars(figure) == [(0, 100, "forward"), (100, 200, "forward"), (300, 100, "forward")]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["stage 0", "stage 1", "0 to 1"]


def test_timeline_of_one_task():
    figure = draw(pipeline_timeline([task(0, "F", 0, 5.0, 8.0)]))
    assert texts(figure) == ["idle 0%", "0"]
    assert figure.axes[0].get_xlabel() == "time since the step began (s)"


def test_numbers_that_do_not_fit_are_left_out():
    tasks = [task(0, "F", i, i / 1000, (i + 1) / 1000) for i in range(500)]
    assert texts(draw(pipeline_timeline(tasks))) == ["idle 0%"]


@pytest.mark.parametrize("num_steps", [1, 2, 5, 2501])
def test_traffic_adds_up(num_steps):
    per_step = {"a -> b": 2**20, "b -> a": 3 * 2**20}
    records = [record(step, link_bytes=per_step) for step in range(11, 11 + num_steps)]
    each, total = draw(link_traffic(records)).axes
    unit = {"MiB": 2**20, "GiB": 2**30}[total.get_ylabel().split()[0]]
    assert each.get_ylabel() == "MiB sent"
    tops = [patch.get_data() for patch in each.patches if isinstance(patch, StepPatch)]
    assert [set(top.values.tolist()) for top in tops] == [{1.0}, {4.0}]
    assert tops[0].edges[[0, -1]].tolist() == [10.5, 10.5 + num_steps]
    last = [patch.get_data().values[-1] * unit for patch in total.patches]
    np.testing.assert_allclose(last, [num_steps * 2**20, num_steps * 4 * 2**20], rtol=1e-12)


def test_traffic_names_each_link_with_its_sum():
    records = [record(step, link_bytes={"a -> b": 512}) for step in (1, 2)]
    [legend] = draw(link_traffic(records)).legends
    assert [text.get_text() for text in legend.get_texts()] == ["a -> b: 1 KiB"]


def test_traffic_of_one_stage_says_so():
    assert texts(draw(link_traffic([record(1)]))) == ["one stage: no links"]


def test_mesh_picture_places_every_device():
    plan, topology = machines(("alpha", "beta"))
    figure = draw(mesh_picture(plan, topology))
    shown = texts(figure)
    assert [text for text in shown if text.isdigit()] == [str(i) for i in range(16)]
    places = [f"({data}, {tensor})" for data in range(2) for tensor in range(4)]
    assert [text for text in shown if text.startswith("(")] == places * 2
    assert "ethernet 25 Gb/s, 50 us" in shown
    at = shown.index("stage 1: block_001, mesh")
    assert shown[at + 1 : at + 4] == ["data 2", "x", "tensor 4"]
    colors = {text.get_text(): text.get_color() for text in figure.axes[0].texts}
    assert colors["data 2"] == colors["infiniband"] == style.FABRIC_COLOR["infiniband"]
    assert colors["tensor 4"] == colors["nvlink"] == style.FABRIC_COLOR["nvlink"]
    assert shown.count("infiniband, 2 x 200 Gb/s a node") == 2
    assert shown.count("nvlink 300 GB/s") == 4
    assert "alpha-0: 4 x A100" in shown


def test_mesh_picture_of_one_device():
    plan, topology = machines(("alone",), nodes=1, devices=1)
    shown = texts(draw(mesh_picture(plan, topology)))
    assert shown[shown.index("stage 0: block_000, mesh") + 1] == "of one device"
    assert not any("nvlink" in text or "infiniband" in text for text in shown)


def test_mesh_picture_of_many_nodes_and_clusters():
    plan, topology = machines(("a", "b", "c"), nodes=9, devices=16)
    shown = texts(draw(mesh_picture(plan, topology)))
    assert shown.count("nodes not shown: 5") == 3
    assert "a \u2194 c: ethernet 25 Gb/s, 50 us" in shown
    assert str(9 * 16) in shown  # the first device of b, though nodes of a are left out


def test_mesh_picture_shows_devices_that_no_stage_holds():
    plan, topology = machines(("alpha", "beta"))
    half = dataclasses.replace(plan, stages=plan.stages[:1])
    shown = texts(draw(mesh_picture(half, topology)))
    assert len([text for text in shown if text.isdigit()]) == 16
    assert len([text for text in shown if text.startswith("(")]) == 8


def test_names_are_shown_as_they_are():
    name = "$x_{$<b>&"  # as mathematics it would be an error
    plan, topology = machines((name, "beta"))
    assert f"cluster {name}" in texts(draw(mesh_picture(plan, topology)))
