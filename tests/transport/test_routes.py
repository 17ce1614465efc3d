"""Pieces against brute force: what NumPy cuts, sends and puts together is the whole, once."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from holmesjax.errors import PlanError
from holmesjax.layer_specs.array_boxes import intersection, within
from holmesjax.plan.plan import Axis, Plan, StagePlan
from holmesjax.plan.processes import Process
from holmesjax.transport import routes
from holmesjax.transport.crossings import Crossing
from holmesjax.transport.routes import boxes, pieces, wire_spec

SHAPE = (16, 4, 12)
SPECS = [
    ((), (), ()),
    (("data",), (), ()),
    ((), ("tensor",), ()),
    (("tensor",), (), ("data",)),
    (("data", "tensor"), (), ()),
    (("tensor", "data"), (), ()),
]
MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]


def stage_of(mesh, devices):
    sizes = dict(zip((Axis.DATA, Axis.TENSOR), mesh, strict=True))
    return StagePlan(
        cluster="c",
        nodes=("n",),
        chunks=((),),
        devices=tuple(devices),
        mesh=sizes,
        fabrics={},
        memory_bytes={},
        seconds={},
    )


def plan_of(*stages):
    return Plan(
        topology="t",
        topology_hash="",
        stages=stages,
        global_batch=1,
        microbatches=1,
        schedule="1f1b",
        activation_checkpointing="none",
        boundary_bytes=0.0,
        step_time_s=0.0,
        bound_s=0.0,
        shares={},
    )


def processes_of(groups):
    """`groups`: for each stage, the devices of each of its processes."""
    number = itertools.count()
    return tuple(
        Process(
            number=next(number),
            name=f"c/{s}.{rank}",
            cluster="c",
            node="n",
            stage=s,
            rank=rank,
            devices=tuple(devices),
            local_devices=tuple(devices),
        )
        for s, group in enumerate(groups)
        for rank, devices in enumerate(group)
    )


def grouped(devices, size):
    ordered = sorted(devices)
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


def setting(source, target, sizes, shape=SHAPE, reverse=False):
    """A crossing between two stages of (mesh, spec), with so many devices a process each."""
    first = range(math.prod(source[0]))
    second = range(len(first), len(first) + math.prod(target[0]))
    stages = [
        stage_of(mesh, reversed(devices) if reverse else devices)
        for (mesh, _), devices in ((source, first), (target, second))
    ]
    crossing = Crossing(
        name="F0",
        source=0,
        target=1,
        link="a -> b",
        shape=shape,
        dtype="float32",
        source_spec=source[1],
        target_spec=target[1],
    )
    groups = [grouped(d, size) for d, size in zip((first, second), sizes, strict=True)]
    return crossing, plan_of(*stages), processes_of(groups)


def oracle(whole, spec, stage):
    """The box that each device holds, cut one axis at a time."""
    sizes = {axis.value: size for axis, size in stage.mesh.items()}
    held = {}
    for device, place in zip(stage.devices, np.ndindex(*sizes.values()), strict=True):
        at, part = dict(zip(sizes, place, strict=True)), whole
        for dim, axes in enumerate(spec):
            for axis in axes:
                part = np.split(part, sizes[axis], axis=dim)[at[axis]]
        held[device] = part
    return held


def brute_force(crossing, plan, processes):
    """Every box that lands beside every box that is held; the one that has sent least sends."""
    home = {device: p.number for p in processes for device in p.devices}
    held = boxes(crossing.shape, crossing.source_spec, plan.stages[0])
    landing = boxes(crossing.shape, wire_spec(crossing, plan, processes), plan.stages[1])
    sent, found = Counter(), []
    for target, box in sorted({(home[device], box) for device, box in landing.items()}):
        devices = tuple(d for d in landing if (home[d], landing[d]) == (target, box))
        for other in sorted(set(held.values())):
            if (common := intersection(box, other)) is not None:
                holders = {home[device] for device in held if held[device] == other}
                source = min(holders, key=lambda number: (sent[number], number))
                sent[source] += math.prod(stop - start for start, stop in common)
                found.append((common, source, target, devices))
    return found


def check(crossing, plan, processes):
    assert list(pieces(crossing, plan, processes)) == brute_force(crossing, plan, processes)
    whole = np.arange(math.prod(crossing.shape)).reshape(crossing.shape)
    source_boxes = boxes(crossing.shape, crossing.source_spec, plan.stages[0])
    shards = oracle(whole, crossing.source_spec, plan.stages[0])
    for device, box in source_boxes.items():
        np.testing.assert_array_equal(
            whole[within(box, tuple((0, n) for n in whole.shape))], shards[device]
        )
    wire = wire_spec(crossing, plan, processes)
    landing = boxes(crossing.shape, wire, plan.stages[1])
    landed = {
        device: np.full([b - a for a, b in box], -1, whole.dtype) for device, box in landing.items()
    }
    crossed = np.zeros(whole.shape, int)
    for piece in pieces(crossing, plan, processes):
        sender, receiver = processes[piece.source], processes[piece.target]
        assert (sender.stage, receiver.stage) == (0, 1)
        assert set(piece.devices) <= set(receiver.devices)
        # The sender has to hold the piece on one of its devices.
        home = next(
            device
            for device in sender.devices
            if all(
                a <= c and d <= b
                for (a, b), (c, d) in zip(source_boxes[device], piece.box, strict=True)
            )
        )
        data = shards[home][within(piece.box, source_boxes[home])]
        crossed[tuple(slice(*ends) for ends in piece.box)] += 1
        for device in piece.devices:
            landed[device][within(piece.box, landing[device])] = data
    once = 1 if crossing.shape else sum(p.stage == 1 for p in processes)
    np.testing.assert_array_equal(crossed, once)
    for device, part in oracle(whole, wire, plan.stages[1]).items():
        np.testing.assert_array_equal(landed[device], part)
    return wire


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (4, 1), (1, 4), (4, 4)])
def test_every_byte_crosses_once_and_every_device_gets_its_own(sizes):
    layouts = list(itertools.product(MESHES, SPECS))
    for source, target in itertools.product(layouts[::2], layouts[1::2]):
        check(*setting(source, target, sizes))


@st.composite
def layouts(draw):
    mesh = draw(st.tuples(*[st.integers(1, 3)] * 2))
    axes = draw(st.permutations(["data", "tensor"]))[: draw(st.integers(0, 2))]
    spec = [[], [], []]
    for axis in axes:
        spec[draw(st.integers(0, 2))].append(axis)
    return mesh, tuple(map(tuple, spec))


@settings(max_examples=150, deadline=None)
@given(layouts(), layouts(), st.tuples(*[st.integers(1, 5)] * 2), st.booleans())
def test_any_mesh_spec_and_grouping(source, target, sizes, reverse):
    check(*setting(source, target, sizes, shape=(36, 36, 36), reverse=reverse))


def test_a_spec_says_the_first_axis_is_major():
    held = boxes((8,), (("tensor", "data"),), stage_of((2, 2), range(4)))
    assert held == {0: ((0, 2),), 2: ((2, 4),), 1: ((4, 6),), 3: ((6, 8),)}


def test_replicas_in_one_process_are_sent_once():
    crossing, plan, processes = setting(((1, 1), SPECS[0]), ((1, 4), SPECS[0]), (1, 4))
    [piece] = pieces(crossing, plan, processes)
    assert piece.box == ((0, 16), (0, 4), (0, 12))
    assert piece.devices == (1, 2, 3, 4)


@pytest.mark.parametrize("shape", [(3, 8, 6), (2, 8, 6)])  # does not divide; is cut up already
def test_replicas_in_several_processes_share_the_first_dim_that_divides(shape):
    cut = ("data",) if shape[0] == 2 else ()
    target = ((2, 2) if cut else (1, 4), (cut, (), ()))
    crossing, plan, processes = setting(((1, 1), SPECS[0]), target, (1, 2), shape=shape)
    if cut:  # each process has one device of every replica
        processes = (processes[0], *processes_of([[], [(1, 3), (2, 4)]]))
        processes = tuple(replace(p, number=i) for i, p in enumerate(processes))
    assert wire_spec(crossing, plan, processes) == (cut, ("tensor",), ())
    assert Counter(p.target for p in pieces(crossing, plan, processes)) == {1: 2, 2: 2}


def test_only_boxes_that_meet_are_looked_at(monkeypatch):
    looks = []
    look = routes.intersection
    monkeypatch.setattr(routes, "intersection", lambda *ends: looks.append(ends) or look(*ends))
    crossing, plan, processes = setting(
        ((64, 1), SPECS[1]), ((1, 64), SPECS[0]), (1, 1), shape=(64, 4, 12)
    )
    found = pieces(crossing, plan, processes)
    assert len(looks) == len(found) == 64


def test_copies_at_the_source_take_turns():
    crossing, plan, processes = setting(((2, 1), SPECS[0]), ((4, 1), SPECS[1]), (1, 1))
    assert [p.source for p in pieces(crossing, plan, processes)] == [0, 1, 0, 1]


def test_a_scalar_goes_to_every_process():
    crossing, plan, processes = setting(((2, 1), ()), ((2, 2), ()), (1, 2), shape=())
    assert check(crossing, plan, processes) == ()
    assert [(p.target, p.devices) for p in pieces(crossing, plan, processes)] == [
        (2, (2, 3)),
        (3, (4, 5)),
    ]


def test_what_cannot_be_shared_is_refused():
    target = ((1, 4), (("data",), (), ()))
    crossing, plan, processes = setting(((1, 1), SPECS[0]), target, (1, 1), shape=(2, 3, 5))
    with pytest.raises(PlanError, match=r"F0, a -> b.*along mesh axis tensor(.|\n)*\(2, 3, 5\)"):
        pieces(crossing, plan, processes)
