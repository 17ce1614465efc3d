"""`report.html`: one page that tells how a run went.

The page carries its pictures and its style, asks the network for nothing and runs no script, so it
can be mailed or archived. Equal inputs give equal bytes. It follows the light or dark theme of the
reader: the greys of `figures` become variables of its style sheet.
"""

import io
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

from holmesjax.errors import DataError
from holmesjax.lab import scaled_topology
from holmesjax.plan import forecast
from holmesjax.plan.plan import Plan, StagePlan
from holmesjax.report import figures, metrics, trace
from holmesjax.topology import machines
from holmesjax.units import duration, show

Record = Mapping[str, Any]
FILE = "report.html"
MAX_BARS = 4000  # of a timeline; more would make a huge page
SVG = "{http://www.w3.org/2000/svg}"
THEME = {
    figures.INK: "var(--ink)",
    figures.MUTED: "var(--muted)",
    figures.GRID: "var(--grid)",
    figures.IDLE: "var(--idle)",
    figures.PAPER: "var(--paper)",
}
STYLE = """
:root { color-scheme: light dark; --ink: #1b2430; --muted: #5b6675; --grid: #e2e6eb;
  --idle: #f1f3f6; --paper: #ffffff; --page: #f6f7f9; --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --muted: #9aa5b4; --grid: #313a46;
  --idle: #222a34; --paper: #171d25; --page: #0f141a; --accent: #56b4e9; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 40px 24px 56px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums; }
main { max-width: 1120px; margin: 0 auto; }
header { margin: 0 4px 24px; }
.brand { color: var(--accent); font-weight: 600; font-size: 13px; letter-spacing: .04em; }
h1 { font-size: 30px; line-height: 1.2; margin: 4px 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 2px; }
h3 { font-size: 14px; font-weight: 500; margin: 14px 0 4px; }
p { margin: 0; color: var(--muted); overflow-wrap: anywhere; }
section { background: var(--paper); border: 1px solid var(--grid); border-radius: 12px;
  padding: 22px 26px; margin-top: 18px; }
section > p:not(:last-child) { margin-bottom: 14px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 14px; }
.card { background: var(--paper); border: 1px solid var(--grid); border-radius: 12px;
  padding: 16px 18px; }
.card dt { color: var(--muted); font-size: 13px; }
.card dd { margin: 0; }
.value { font-size: 26px; font-weight: 650; line-height: 1.35; }
.unit { color: var(--muted); font-size: 14px; margin-left: 5px; }
.note { color: var(--muted); font-size: 13px; }
.table { overflow-x: auto; margin-top: 12px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--muted); font-weight: 500; font-size: 13px; }
th, td { padding: 9px 18px 9px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td small { display: block; color: var(--muted); font-size: 12.5px; }
table + table { margin-top: 18px; }
td:nth-child(5) small { white-space: nowrap; }
figure { margin: 0; overflow-x: auto; }
svg { display: block; width: 100%; min-width: 620px; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }
summary { cursor: pointer; font-weight: 600; font-size: 18px; }
pre { margin: 14px 0 0; padding: 16px; background: var(--idle); border-radius: 8px;
  overflow-x: auto; font: 13px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
footer { margin: 22px 4px 0; color: var(--muted); font-size: 13px; }
@media print { body { background: none; padding: 0; } section, .card { break-inside: avoid; } }
"""


def write_report(run_dir: str | Path) -> Path:
    """Reads the files of a run and writes `report.html` beside them; returns its path."""
    run_dir = Path(run_dir)
    records = metrics.read(run_dir)
    if not records:
        raise DataError(
            str(run_dir / metrics.FILE),
            "has no finished step, so there is nothing to report",
            found="no records",
            fix="train at least one step, or pass the folder named by run.dir",
        )
    plan = Plan.load(run_dir / "plan.yaml")
    topology = machines.load(run_dir / "topology.yaml")
    timeline = run_dir / "timeline.json"
    timed = json.loads(timeline.read_text()) if timeline.exists() else {"tasks": []}
    predicted, sent = forecast.tasks(plan), forecast.transfers(plan)
    lab = run_dir / scaled_topology.FILE
    title = run_dir.resolve().name
    body = [
        _header(title, plan, records),
        _cards(plan, records),
        _plan_section(plan, records),
        _section("Loss", "In nats per token.", _picture("loss", figures.loss_curve(records))),
        _timeline_section(predicted, sent, timed),
        _traffic_section(records),
        *([_lab_section(json.loads(lab.read_text()))] if lab.exists() else []),
        _section(
            "Machines",
            "Clusters, their fabrics, the links between them, and the stage of every device.",
            _picture("machines", figures.mesh_picture(plan, topology)),
        ),
        _config_section((run_dir / "config.yaml").read_text(encoding="utf-8")),
    ]
    _write_trace(run_dir / trace.FILE, predicted, sent, timed)
    path = run_dir / FILE
    partial = path.with_suffix(".partial")
    partial.write_text(_page(title, "\n".join(body)), encoding="utf-8")
    partial.replace(path)
    return path


def _page(title: str, body: str) -> str:
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)} - HolmesJAX</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{body}
<footer>From metrics.jsonl, plan.yaml, topology.yaml, timeline.json and config.yaml.</footer>
</main>
</body>
</html>
"""


def _header(title: str, plan: Plan, records: Sequence[Record]) -> str:
    num_devices = sum(len(stage.devices) for stage in plan.stages)
    facts = [
        f"topology {plan.topology}",
        f"{_count(len(plan.stages), 'stage')} on {_count(num_devices, 'device')}",
        f"schedule {plan.schedule} with {_count(plan.microbatches, 'microbatch', 'es')}",
        f"step {records[-1]['step']:,}",
    ]
    return (
        '<header><div class="brand">HolmesJAX run report</div>'
        f"<h1>{escape(title)}</h1><p>{escape(' · '.join(facts))}</p></header>"
    )


def _cards(plan: Plan, records: Sequence[Record]) -> str:
    first, last = records[0], records[-1]
    validated = [record for record in records if "val_loss" in record]
    tokens = sum(r["tokens_per_s"] * r["step_time_s"] for r in records)
    skipped = sum(bool(record["skipped"]) for record in records)
    rate, step_s = _median(records, "tokens_per_s"), _median(records, "step_time_s")
    used = [record for record in records if "mfu" in record]
    left_s = last.get("time_left_s", 0.0)
    total_s = sum(record["step_time_s"] for record in records)
    cards = [
        _card(
            "Final loss",
            _number(last["loss"], ".3f"),
            "nats/token",
            f"{_number(first['loss'], '.3f')} at step {first['step']:,}",
        ),
        _card(
            "Validation loss",
            _number(validated[-1]["val_loss"], ".3f") if validated else "none",
            "nats/token" if validated else "",
            f"at step {validated[-1]['step']:,}" if validated else "not measured in this run",
        ),
        _card("Throughput", _number(rate, ",.0f"), "tokens/s", "median over steps"),
        _card("Step time", _number(step_s, ".3g"), "s", "median over steps"),
        _card(
            "Tokens",
            _number(tokens, ",.0f"),
            "",
            f"{_count(len(records), 'step')}, {skipped:,} skipped",
        ),
        _card(
            "MFU",
            _number(_median(used, "mfu"), ".1%") if used else "none",
            "",
            "of the devices' peak, median over steps"
            if used
            else "these devices have no data sheet",
        ),
        _card(
            "Wall time",
            _number(total_s, duration),
            "",
            f"sum of all steps; {duration(left_s)} left" if left_s else "sum of all steps",
        ),
    ]
    return f'<dl class="cards">{"".join(cards)}</dl>'


def _card(label: str, value: str, unit: str, note: str) -> str:
    return (
        f'<div class="card"><dt>{escape(label)}</dt><dd><span class="value">{escape(value)}</span>'
        f'<span class="unit">{escape(unit)}</span><div class="note">{escape(note)}</div></dd></div>'
    )


def _plan_section(plan: Plan, records: Sequence[Record]) -> str:
    columns = ("Stage", "Cluster", "Layers", "Mesh and fabrics", "Devices", "Memory per device")
    stages = [_stage_row(number, stage) for number, stage in enumerate(plan.stages)]
    bubble = _median(records, "bubble_share")
    step_s = _median(records, "step_time_s")
    compared = [
        ("Step time", _number(plan.step_time_s, ".3g") + " s", _number(step_s, ".3g") + " s"),
        ("Bubble", _number(plan.shares.get("bubble", 0.0), ".1%"), _number(bubble, ".1%")),
    ]
    rows = [tuple(f"<td>{escape(cell)}</td>" for cell in row) for row in compared]
    text = "What the planner decided before the first step, and how well it predicted the run."
    if plan.exception:
        text += f" An exception: {plan.exception}."
    headings = ("", "Predicted", "Measured (median)")
    return _section("Plan", text, _table(columns, stages) + _table(headings, rows))


def _stage_row(number: int, stage: StagePlan) -> tuple[str, ...]:
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
    cells = [
        (str(number), ""),
        (stage.cluster, nodes),
        (_count(len(stage.layers), "layer"), ", ".join(map(_first_to_last, stage.chunks))),
        (mesh, fabrics),
        (str(len(stage.devices)), _first_to_last(stage.devices)),
        (total, items),
    ]
    return tuple(f"<td>{escape(big)}<small>{escape(small)}</small></td>" for big, small in cells)


def _first_to_last(items: Sequence[object]) -> str:
    return str(items[0]) if len(items) == 1 else f"{items[0]} to {items[-1]}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="table"><table><tr>{head}</tr>{body}</table></div>'


def _timeline_section(
    predicted: list[forecast.Record], sent: list[forecast.Record], timed: Record
) -> str:
    """The step as it was predicted, and as it ran."""
    steps = [("As predicted, boundaries included", predicted, sent)]
    if timed["tasks"]:
        steps.append((f"Step {timed['step']:,} as it ran", timed["tasks"], []))
    content = ""
    for number, (title, tasks, transfers) in enumerate(steps):
        if 0 < len(tasks) + len(transfers) <= MAX_BARS:
            figure = figures.pipeline_timeline(tasks, transfers)
            content += f"<h3>{escape(title)}</h3>{_picture(f'timeline-{number}', figure)}"
    if not any(tasks for _, tasks, _ in steps):
        return _section("Pipeline", "No step was predicted, or timed task by task.", "")
    text = (
        f"Numbers are microbatches. All times are in {trace.FILE} beside this page, to be opened "
        "in ui.perfetto.dev."
    )
    return _section("Pipeline", text, content)


def _write_trace(
    path: Path, predicted: list[forecast.Record], sent: list[forecast.Record], timed: Record
) -> None:
    """Both steps, one below the other."""
    found = []
    if predicted:
        found += trace.events("predicted", 1, predicted, sent)
    if timed["tasks"]:
        found += trace.events(f"measured, step {timed['step']}", 2, timed["tasks"])
    trace.write(path, found)


def _traffic_section(records: Sequence[Record]) -> str:
    if not any(record["link_bytes"] for record in records):
        return _section("Traffic", "This run has one stage: nothing crosses between stages.", "")
    text = "What the stages sent each other; the links are stacked on one another."
    return _section("Traffic", text, _picture("traffic", figures.link_traffic(records)))


def _lab_section(lab: Record) -> str:
    text = (
        f"Rebuilt on one machine; rates are {lab['scale']:.3g} of the real ones. Bytes as the "
        "kernel has counted them, and what they are for. Headers are those of Ethernet, IP and "
        "TCP, acknowledgements included; the rest are heads of frames, heartbeats and hellos."
    )
    cells = lambda *values: tuple(f"<td>{escape(value)}</td>" for value in values)
    rate = lambda value: "unshaped" if value is None else show(value, "b/s")
    interfaces = [
        cells(
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
        cells(
            f"{link['from']} to {link['to']}",
            rate(link["rate_bytes_per_s"]),
            show(link["kernel_bytes"], "B"),
            *(show(num_bytes, "B") for num_bytes in link["parts"].values()),
        )
        for link in lab["links"]
    ]
    faults = [
        cells(str(fault["step"]), f"{fault['time_s']:.1f} s", fault["fault"])
        for fault in lab["faults"]
    ]
    content = _table(("Node", "CPU", "Interface", "Rate", "Sent", "Received"), interfaces)
    if links:
        parts = ("Steps", "Validation", "Headers", "Sent again", "Rest")
        content += _table(("Link", "Rate from a node", "Kernel", *parts), links)
    if faults:
        content += _table(("After step", "After the start", "Fault"), faults)
    return _section("Lab", text, content)


def _config_section(text: str) -> str:
    summary = "<summary>Resolved config</summary>"
    return f"<section><details>{summary}<pre>{escape(text)}</pre></details></section>"


def _section(title: str, text: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>{content}</section>"


def _picture(name: str, figure: Figure) -> str:
    """The figure as SVG inside HTML: its ids start with `name`, its greys follow the theme."""
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
    return f"<figure>{svg}</figure>"


def _attribute(key: str, value: str, name: str) -> str:
    if key in ("href", "clip-path"):
        return value.replace("#", f"#{name}-")
    if key == "d":  # a hundredth of a point is finer than any screen
        return re.sub(r"\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}", value)
    if key == "style":
        value = re.sub(r"font-family:[^;]+;", "", value).replace("url(#", f"url(#{name}-")
        return re.sub(r"#[0-9a-f]{6}", lambda match: THEME.get(match[0], match[0]), value)
    return value


def _median(records: Sequence[Record], name: str) -> float:
    known = [record[name] for record in records if math.isfinite(record[name])]
    return statistics.median(known) if known else math.nan


def _number(value: float, form: str | Callable[[float], str]) -> str:
    if not math.isfinite(value):
        return "not finite"
    return format(value, form) if isinstance(form, str) else form(value)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{plural if number != 1 else ''}"
