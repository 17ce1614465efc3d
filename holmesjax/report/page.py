"""`report.html`: one page that tells how a run went.

The page carries its pictures and its style, asks the network for nothing and runs no script, so it
can be mailed or archived. Equal inputs give equal bytes. It follows the light or dark theme of the
reader: the greys of `figures` become variables of its style sheet. `page.html.jinja` is the page
and its style; this module prepares the values.
"""

import io
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib
import numpy as np
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup
from matplotlib.figure import Figure

from holmesjax.errors import DataError, HolmesError
from holmesjax.files import json_text, regular_files, yaml_files
from holmesjax.files.whole_files import write_whole
from holmesjax.hosts.process_environment import die_with
from holmesjax.lab import scaled_topology
from holmesjax.plan import forecast
from holmesjax.plan.plan import Plan, StagePlan
from holmesjax.plan.plan_description import layers_text, unlike_shares
from holmesjax.report import (
    expert_alarm,
    figures,
    history,
    island_rounds,
    link_losses,
    mesh_picture,
    metrics,
    style,
    trace,
)
from holmesjax.report.history import History
from holmesjax.report.page_cards import cards, number_text
from holmesjax.topology import loading
from holmesjax.topology.machines import Topology
from holmesjax.units import counted, show

Record = Mapping[str, Any]
FILE = "report.html"
TEMPLATE = "page.html.jinja"
SHOWN_EVENTS = 20  # of an island that is a job of its own
MAX_BARS = 4000  # of a timeline; more would make a huge page
MAX_CURVES = 12  # of numbers of callbacks and layers; the table has all
SVG = "{http://www.w3.org/2000/svg}"
THEME = {
    style.INK: "var(--ink)",
    style.MUTED: "var(--muted)",
    style.GRID: "var(--grid)",
    style.IDLE: "var(--idle)",
    style.PAPER: "var(--paper)",
}


class _Table(NamedTuple):
    """A table of a section. A cell is a text, or a text with a smaller one below it."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str | tuple[str, str]]]


class _Section(NamedTuple):
    """A heading with a text, then tables, then pictures: SVG, with a heading or an empty text."""

    title: str
    text: str
    tables: Sequence[_Table] = ()
    pictures: Sequence[tuple[str, Markup]] = ()


class _Titles(NamedTuple):
    """The names of numbers of the plan and of the run, where they stand side by side."""

    predicted: str
    measured: str
    text: str


_PREDICTED = _Titles(
    "Predicted",
    "Measured",
    "What the planner decided before the first step, and how well it predicted the run.",
)
_REHEARSED = _Titles(
    "Predicted for the topology's devices",
    "Measured on the devices of the rehearsal",
    "What the planner decided before the first step. The run is a rehearsal: its times are those "
    "of other devices than the plan's, so they do not tell how well it was predicted.",
)


def write_report(run_dir: str | Path) -> Path:
    """Reads the files of a run and writes `report.html` and `trace.json` beside them.

    Returns the path of the report. Raises `DataError` if no step is finished.
    """
    run_dir = Path(run_dir)
    records = history.read(run_dir)
    if not len(records):
        raise DataError(
            str(run_dir / metrics.FILE),
            "has no finished step, so there is nothing to report",
            found="no records",
            fix="train at least one step, or pass the folder named by run.dir",
        )
    plan = Plan.load(run_dir / "plan.yaml")
    topology = loading.load(run_dir / "topology.yaml")
    timed = _read_timeline(run_dir / "timeline.json")
    predicted, sent = forecast.tasks(plan), forecast.transfers(plan)
    settings = yaml_files.read(run_dir / "config.yaml", DataError).values
    titles = _REHEARSED if settings.get("run", {}).get("rehearse", False) else _PREDICTED
    lab = _read_lab(run_dir / scaled_topology.FILE)
    sections = [
        _plan_section(plan, records, titles),
        _loss_section(records),
        *_others_section(records),
        *_experts_section(records),
        _timeline_section(predicted, sent, timed, titles),
        _traffic_section(records),
        *([lab] if lab else []),
        *_rounds_section(island_rounds.read(run_dir)),
        _machines_section(plan, topology),
    ]
    text = _template().render(
        title=run_dir.resolve().name,
        facts=_facts(plan, records),
        cards=cards(records),
        sections=sections,
        config=regular_files.read_text(run_dir / "config.yaml"),
    )
    _write_trace(run_dir / trace.FILE, predicted, sent, timed, titles)
    path = run_dir / FILE
    write_whole(path, text)
    return path


def _rounds_section(found: island_rounds.IslandRounds | None) -> list[_Section]:
    """The rounds of an island that is a job of its own, and its newest events."""
    if found is None:
        return []
    text = f"{counted(found.rounds, 'round', form=',')} of the mailbox landed, "
    text += f"{found.left_out} of them merged without this island. "
    text += f"{counted(len(found.events), 'event', form=',')}."
    islands = [(name, f"{count:,}") for name, count in found.tokens.items()]
    tables = [_Table(("Island", "Tokens in these rounds"), islands)] if islands else []
    if found.events:
        newest = [(event,) for event in found.events[-SHOWN_EVENTS:]]
        tables.append(_Table(("Newest events",), newest))
    return [_Section("Rounds", text, tables)]


def _read_timeline(path: Path) -> Record:
    """The tasks of a step that were timed; none where a crash has left no whole file."""
    try:
        timed = json_text.read(path)
        if isinstance(timed["step"], int) and all(map(_is_timed, timed["tasks"])):
            return dict(timed)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return {"tasks": []}


def _is_timed(task: Record) -> bool:
    """Whether a task says its stage and its times. Raises KeyError and TypeError."""
    has_times = math.isfinite(task["start_s"]) and math.isfinite(task["end_s"])
    return has_times and type(task["stage"]) is int and isinstance(task["kind"], str)


def _template() -> Template:
    """Loads the page; whatever is filled in is escaped, and nothing may be missing."""
    path = Path(__file__).with_name(TEMPLATE)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.from_string(path.read_text(encoding="utf-8"))


def _facts(plan: Plan, records: History) -> list[str]:
    num_devices = sum(len(stage.devices) for stage in plan.stages)
    return [
        f"topology {plan.topology}",
        f"{counted(len(plan.stages), 'stage', form=',')} on "
        f"{counted(num_devices, 'device', form=',')}",
        f"schedule {plan.schedule} with {counted(plan.microbatches, 'microbatch', 'es', form=',')}",
        *unlike_shares(plan),
        f"step {records.last['step']:,}",
    ]


def _plan_section(plan: Plan, records: History, titles: _Titles) -> _Section:
    columns = ("Stage", "Cluster", "Layers", "Mesh and fabrics", "Devices", "Memory per device")
    stages = [_stage_row(number, stage) for number, stage in enumerate(plan.stages)]
    step_s, bubble = records.median("step_time_s"), records.median("bubble_share")
    compared = [
        (
            "Step time",
            number_text(plan.step_time_s, ".3g") + " s",
            number_text(step_s, ".3g") + " s",
        ),
        ("Bubble", number_text(plan.shares.get("bubble", 0.0), ".1%"), number_text(bubble, ".1%")),
    ]
    text = titles.text
    if plan.exception:
        text += f" An exception: {plan.exception}."
    headings = ("", titles.predicted, f"{titles.measured} (median)")
    tables = [_Table(columns, stages), _Table(headings, compared)]
    if memory := _memory_rows(plan, records):
        headings = ("Memory of the fullest device", titles.predicted, titles.measured)
        tables.append(_Table(headings, memory))
    return _Section("Plan", text, tables)


def _memory_rows(plan: Plan, records: History) -> list[tuple[str, str, str]]:
    """The fullest device of each stage; nothing where devices keep no statistics, as CPUs."""
    peaks, rows = records.memory_bytes, []
    for number, stage in enumerate(plan.stages):
        names = (f"device {device}" for device in stage.devices)
        if known := [peaks[name] for name in names if name in peaks]:
            predicted = show(sum(stage.memory_bytes.values()), "B")
            rows.append((f"stage {number}", predicted, show(max(known), "B")))
    return rows


def _stage_row(number: int, stage: StagePlan) -> list[tuple[str, str]]:
    few = len(stage.nodes) <= 3
    nodes = (
        ", ".join(stage.nodes)
        if few
        else f"{len(stage.nodes)} nodes, {_first_to_last(stage.nodes)}"
    )
    used = [(axis, size) for axis, size in stage.mesh.items() if size > 1]
    mesh = " x ".join(f"{axis} {size}" for axis, size in used) or "1 device"
    fabrics = ", ".join(f"{axis} over {stage.fabrics[axis]}" for axis, _ in used)
    total = show(sum(stage.memory_bytes.values()), "B")
    items = ", ".join(f"{name} {show(size, 'B')}" for name, size in stage.memory_bytes.items())
    return [
        (str(number), ""),
        (stage.cluster, nodes),
        (layers_text(stage, {}), ", ".join(map(_first_to_last, stage.chunks))),
        (mesh, fabrics),
        (str(len(stage.devices)), _first_to_last(stage.devices)),
        (total, items),
    ]


def _first_to_last(items: Sequence[object]) -> str:
    return str(items[0]) if len(items) == 1 else f"{items[0]} to {items[-1]}"


def _loss_section(records: History) -> _Section:
    picture = _picture("loss", figures.loss_curve(records))
    return _Section("Loss", "In nats per token.", pictures=[("", picture)])


def _others_section(records: History) -> list[_Section]:
    """The numbers of callbacks and of layers; nothing where there are none."""
    if not records.others:
        return []
    rows, pictures = [], []
    for number, name in enumerate(records.others):
        step, value = records.with_steps(name)
        finite = value[np.isfinite(value)]
        ends = (finite.min(), finite.max()) if len(finite) else (math.nan, math.nan)
        cells = [number_text(x, ".4g") for x in (value[0], value[-1], *ends)]
        rows.append((name, *cells, f"{step[-1]:,.0f}"))
        if number < MAX_CURVES and len(finite) > 1:
            pictures.append(
                (name, _picture(f"number-{number}", figures.number_curve(records, name)))
            )
    table = _Table(("Name", "First", "Last", "Least", "Most", "Last step"), rows)
    text = "What callbacks and layers have added to the records of steps."
    return [_Section("Numbers of your own", text, [table], pictures)]


def _experts_section(records: History) -> list[_Section]:
    """The loads of experts as they were told last, and alarms; nothing where none were told."""
    if (record := records.last_expert_loads) is None:
        return []
    text = (
        f"Choices of each expert over the mean of its layer, in the {record[expert_alarm.STEPS]:,} "
        f"steps to step {record['step']:,}. A cross is an expert without a token."
    )
    rows = [
        (
            f"{step:,}",
            ", ".join(f"{name}: {load:.3g}" for name, load in loads.items())
            + (f" and {more:,} more" if more else ""),
        )
        for step, (loads, more) in reversed(records.expert_alarms.items())
    ]
    tables = [_Table(("Alarm at step", "Experts, and their loads over the mean"), rows)]
    picture = _picture("experts", figures.expert_loads(record[expert_alarm.LOADS]))
    return [_Section("Experts", text, tables if rows else (), [("", picture)])]


def _machines_section(plan: Plan, topology: Topology) -> _Section:
    text = "Clusters, their fabrics, the links between them, and the stage of every device."
    picture = _picture("machines", mesh_picture.mesh_picture(plan, topology))
    return _Section("Machines", text, pictures=[("", picture)])


def _timeline_section(
    predicted: list[forecast.Record],
    sent: list[forecast.Record],
    timed: Record,
    titles: _Titles,
) -> _Section:
    """The step as it was predicted, and as it ran."""
    steps = [(f"{titles.predicted}, boundaries included", predicted, sent)]
    if timed["tasks"]:
        steps.append((f"{titles.measured}, step {timed['step']:,}", timed["tasks"], []))
    if not any(tasks for _, tasks, _ in steps):
        return _Section("Pipeline", "No step was predicted, or timed task by task.")
    text = (
        f"Numbers are microbatches. All times are in {trace.FILE} beside this page, to be opened "
        "in ui.perfetto.dev."
    )
    pictures = [
        (title, _picture(f"timeline-{number}", figures.pipeline_timeline(tasks, transfers)))
        for number, (title, tasks, transfers) in enumerate(steps)
        if 0 < len(tasks) + len(transfers) <= MAX_BARS
    ]
    return _Section("Pipeline", text, pictures=pictures)


def _write_trace(
    path: Path,
    predicted: list[forecast.Record],
    sent: list[forecast.Record],
    timed: Record,
    titles: _Titles,
) -> None:
    """Both steps, one below the other."""
    found = []
    if predicted:
        found += trace.events(titles.predicted.lower(), 1, predicted, sent)
    if timed["tasks"]:
        found += trace.events(f"{titles.measured.lower()}, step {timed['step']}", 2, timed["tasks"])
    write_whole(path, trace.text(found))


def _traffic_section(records: History) -> _Section:
    if not records.entries("link_bytes"):
        return _Section("Traffic", "This run has one stage: nothing crosses between stages.")
    text = "What the stages sent each other; the links are stacked on one another."
    of_all_steps = {
        group: {link: np.nansum(records.of((group, link))) for link in records.entries(group)}
        for group in ("link_losses", "link_lost_s")
    }
    text = ". ".join([text.rstrip("."), *link_losses.lines([of_all_steps])]) + "."
    picture = _picture("traffic", figures.link_traffic(records))
    return _Section("Traffic", text, pictures=[("", picture)])


def _read_lab(path: Path) -> _Section | None:
    """The section of a lab's file, if there is one. Raises HolmesError for another format."""
    if not path.exists():
        return None
    try:
        return _lab_section(json_text.read(path))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HolmesError(
            str(path),
            "is no record of a lab that this version writes",
            found=f"{type(error).__name__}: {error}",
            fix="write the report with the version that ran the lab, or delete the file",
        ) from None


def _lab_section(lab: Record) -> _Section:
    text = (
        f"Rebuilt on one machine; rates are {lab['scale']:.3g} of the real ones. Bytes as the "
        "kernel has counted them, and what they are for. Headers are those of Ethernet, IP and "
        "TCP, acknowledgements included; the rest are heads of frames, heartbeats and hellos."
    )
    rate = lambda value: "unshaped" if value is None else show(value, "b/s")
    interfaces = [
        (
            node["node"],
            f"{100 * node['cpu']:.3g}% of a core",
            interface["name"],
            rate(interface["rate_bytes_per_s"]),
            show(interface["sent_bytes"], "B"),
            show(interface["received_bytes"], "B"),
        )
        for node in lab["nodes"]
        for interface in node["interfaces"]
    ]
    links = [
        (
            f"{link['from']} to {link['to']}",
            rate(link["rate_bytes_per_s"]),
            show(link["kernel_bytes"], "B"),
            *(show(num_bytes, "B") for num_bytes in link["parts"].values()),
        )
        for link in lab["links"]
    ]
    faults = [
        (str(fault["step"]), f"{fault['time_s']:.1f} s", fault["fault"]) for fault in lab["faults"]
    ]
    parts = ("Steps", "Validation", "Headers", "Sent again", "Rest")
    tables = [_Table(("Node", "CPU", "Interface", "Rate", "Sent", "Received"), interfaces)]
    if links:
        tables.append(_Table(("Link", "Rate from a node", "Kernel", *parts), links))
    if faults:
        tables.append(_Table(("After step", "After the start", "Fault"), faults))
    return _Section("Lab", text, tables)


def _picture(name: str, figure: Figure) -> Markup:
    """Draws a figure as SVG inside HTML: ids start with `name`, and greys follow the theme."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    root = ElementTree.fromstring(file.getvalue())
    width_px = 1.5 * float(root.attrib["viewBox"].split()[2])
    for parent in root.iter():
        for child in [c for c in parent if c.tag in (f"{SVG}metadata", f"{SVG}style")]:
            parent.remove(child)
    used = set(
        re.findall(r"#([\w-]+)", " ".join(v for e in root.iter() for v in e.attrib.values()))
    )
    for element in root.iter():
        element.tag = element.tag.removeprefix(SVG)
        attributes = {key.split("}")[-1]: value for key, value in element.attrib.items()}
        element.attrib.clear()
        for key, value in attributes.items():
            if key == "fill":  # of a hatch; variables work in a style only
                key, value = "style", f"fill: {value}"
            if key != "id":
                element.set(key, _attribute(key, value, name))
            elif value in used:
                element.set("id", f"{name}-{value}")
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("style", f"max-width: {width_px:.0f}px")
    root.set("role", "img")
    root.set("aria-label", name)
    svg = re.sub(r">\s+<", "><", ElementTree.tostring(root, encoding="unicode"))
    return Markup(svg)


def _attribute(key: str, value: str, name: str) -> str:
    if key in ("href", "clip-path"):
        return value.replace("#", f"#{name}-")
    if key == "d":  # a hundredth of a point is finer than any screen
        return re.sub(r"\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}", value)
    if key == "style":
        value = re.sub(r"font-family:[^;]+;", "", value).replace("url(#", f"url(#{name}-")
        return re.sub(r"#[0-9a-f]{6}", lambda match: THEME.get(match[0], match[0]), value)
    return value


if __name__ == "__main__":
    die_with(os.environ.get("HOLMES_PARENT"))
    try:
        print(write_report(sys.argv[1]))
    except HolmesError as wrong:
        sys.exit(f"{wrong.where} {wrong.problem}")
