"""A picture of the machines of a plan, and which mesh lies on them."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.text import Text

from holmesjax.plan.plan import Plan, StagePlan
from holmesjax.plan.plan_description import layers_text
from holmesjax.report.style import (
    GRID,
    IDLE,
    INK,
    MUTED,
    ROUND,
    SERIES,
    TEXT_ON,
    draw_text,
    fabric_color,
)
from holmesjax.topology.machines import Cluster, Link, Node, Topology
from holmesjax.units import show

# Lengths, in widths of a device.
DEVICE_IN, MIN_WIDTH, MAX_WIDTH, LINK_HEIGHT, TRUNK = 0.554, 12, 18.05, 1.2, 0.28
NODE_COLUMNS, MAX_NODE_ROWS = 8, 2  # devices in a row of a node, rows of nodes in a cluster


def mesh_picture(plan: Plan, topology: Topology) -> Figure:
    """Clusters, nodes and devices, what joins them, and which stage each device holds."""
    figure, clusters = Figure(), topology.clusters
    axes = figure.add_axes((0, 0, 1, 1))
    places = [place for c in clusters for row in _rows_of_nodes(c.nodes)[0] for place in row]
    rights = [left + max(_node_width(n) + 0.45, _node_width(n) / 2 + 4.5) for n, left in places]
    width = max(MIN_WIDTH, *rights)  # 4.5: for the name of the fabric, right of the last node
    bottom, first_device = 0.1, 0
    for index, cluster in enumerate(clusters):
        if index:
            pair = clusters[index - 1].name, cluster.name
            _draw_link(axes, _link_text(topology, pair), x=width / 2, top=bottom)
            bottom += LINK_HEIGHT
        top, bottom = bottom, _draw_cluster(axes, cluster, plan, first_device, top=bottom)
        box = FancyBboxPatch((0.1, top), width - 0.2, bottom - top, boxstyle=ROUND)
        axes.add_patch(box)
        box.set(facecolor="none", edgecolor=MUTED)
        first_device += sum(node.num_devices for node in cluster.nodes)
    lines = ["In each square: the number of the device, and its place along the axes of its mesh."]
    far = [(a.name, b.name) for i, a in enumerate(clusters) for b in clusters[i + 2 :]]
    lines += [f"{a} \u2194 {b}: {_link_text(topology, (a, b))}" for a, b in far]
    for line in lines:
        bottom += 0.42
        draw_text(axes, 0.15, bottom, line, fontsize=8.5, color=MUTED)
    fabrics = {
        stage.fabrics[axis]: None
        for stage in plan.stages
        for axis, size in stage.mesh.items()
        if size > 1
    }
    if fabrics:
        bottom += 0.42
        text = "Axes have the colour of what they go over:"
        start = draw_text(axes, 0.15, bottom, text, fontsize=8.5, color=MUTED)
        _add_words(axes, start, [(name, fabric_color(name)) for name in fabrics], between="·")
    bottom += 0.25
    axes.set(xlim=(0, width), ylim=(bottom, 0))
    axes.set_axis_off()
    figure.set_size_inches(width * DEVICE_IN, bottom * DEVICE_IN)
    return figure


def _draw_cluster(
    axes: Axes, cluster: Cluster, plan: Plan, first_device: int, *, top: float
) -> float:
    """Draws from `top` down and returns where it ends. One unit is the width of a device."""
    y = top + 0.45
    draw_text(axes, 0.45, y, f"cluster {cluster.name}", fontsize=11.5, weight="bold")
    for number, stage in enumerate(plan.stages):
        if any(node.name in stage.nodes for node in cluster.nodes):
            y += 0.52
            color = SERIES[number % len(SERIES)]
            axes.add_patch(Rectangle((0.45, y - 0.15), 0.3, 0.3, facecolor=color))
            text = draw_text(
                axes, 0.9, y, f"stage {number}: {_stage_text(stage)}, mesh", fontsize=9.5
            )
            _add_words(axes, text, _mesh_words(stage), between="x")
    y += 0.45
    rows, num_hidden = _rows_of_nodes(cluster.nodes)
    buses = []
    for row in rows:
        for node, left in row:
            _draw_node(axes, node, plan, first_device=first_device, left=left, top=y)
            first_device += node.num_devices
        if len(cluster.nodes) > 1:
            start = TRUNK if len(rows) > 1 else math.inf
            buses.append(_draw_bus(axes, cluster, row, start=start, top=y))
        y += max(_node_height(node) for node, _ in row) + (0.75 if len(cluster.nodes) > 1 else 0.2)
    if len(rows) > 1:  # one fabric: a trunk joins the rows
        axes.plot((TRUNK, TRUNK), (buses[0], buses[-1]), color=INK, linewidth=2.5)
    if num_hidden:
        draw_text(axes, 0.45, y + 0.25, f"nodes not shown: {num_hidden}", fontsize=9.5, color=MUTED)
        y += 0.5
    return y + 0.15


def _rows_of_nodes(nodes: Sequence[Node]) -> tuple[list[list[tuple[Node, float]]], int]:
    """Nodes with their left edges, row by row, and how many of them are not shown."""
    rows: list[list[tuple[Node, float]]] = [[]]
    left = 0.45
    for index, node in enumerate(nodes):
        if left + _node_width(node) > MAX_WIDTH - 0.4 and rows[-1]:
            if len(rows) == MAX_NODE_ROWS:
                return rows, len(nodes) - index
            rows.append([])
            left = 0.45
        rows[-1].append((node, left))
        left += _node_width(node) + 0.35
    return rows, 0


def _node_width(node: Node) -> float:
    return max(4.0, min(node.num_devices, NODE_COLUMNS) + 0.4)


def _node_height(node: Node) -> float:
    return 0.7 + -(-node.num_devices // NODE_COLUMNS) + (0.75 if node.num_devices > 1 else 0.15)


def _draw_node(
    axes: Axes, node: Node, plan: Plan, *, first_device: int, left: float, top: float
) -> None:
    width, height = _node_width(node), _node_height(node)
    box = FancyBboxPatch((left, top), width, height, boxstyle=ROUND, fc=IDLE, ec=GRID)
    axes.add_patch(box)
    draw_text(
        axes, left + 0.25, top + 0.37, f"{node.name}: {node.num_devices} x {node.device.name}"
    )
    for index in range(node.num_devices):
        row, column = divmod(index, NODE_COLUMNS)
        _draw_device(axes, plan, first_device + index, left + 0.2 + column, top + 0.65 + row)
    if node.num_devices > 1:
        y = top + height - 0.5
        right = left + 0.2 + min(node.num_devices, NODE_COLUMNS)
        axes.plot((left + 0.28, right - 0.08), (y, y), color=INK, linewidth=2.5)
        link = node.device.link
        label = f"{link.fabric} {show(link.bandwidth_bytes_per_s, 'B/s')}"
        draw_text(axes, left + 0.25, y + 0.25, label, fontsize=8, color=MUTED)


def _draw_device(axes: Axes, plan: Plan, device: int, left: float, top: float) -> None:
    holder = next((s for s, stage in enumerate(plan.stages) if device in stage.devices), None)
    square = Rectangle((left + 0.06, top), 0.88, 0.88)
    square.set_facecolor(GRID if holder is None else SERIES[holder % len(SERIES)])
    axes.add_patch(square)
    color = INK if holder is None else TEXT_ON[SERIES[holder % len(SERIES)]]
    draw_text(axes, left + 0.5, top + 0.33, str(device), fontsize=9.5, ha="center", color=color)
    if holder is not None:
        stage = plan.stages[holder]
        place = np.unravel_index(stage.devices.index(device), tuple(stage.mesh.values()))
        parts = [str(at) for at, size in zip(place, stage.mesh.values(), strict=True) if size > 1]
        label = f"({', '.join(parts)})" if parts else ""
        draw_text(axes, left + 0.5, top + 0.65, label, fontsize=7.5, ha="center", color=color)


def _draw_bus(
    axes: Axes, cluster: Cluster, row: list[tuple[Node, float]], *, start: float, top: float
) -> float:
    """The fabric under a row of nodes whose upper edge is `top`; returns its height."""
    y = top + max(_node_height(node) for node, _ in row) + 0.35
    middles = [left + _node_width(node) / 2 for node, left in row]
    axes.plot((min(start, *middles), middles[-1]), (y, y), color=INK, linewidth=2.5)
    for (node, _), middle in zip(row, middles, strict=True):
        axes.plot((middle, middle), (top + _node_height(node), y), color=INK)
    nics = [nic for nic in row[0][0].nics if nic.fabric == cluster.fabric]
    rates = ", ".join(f"{nic.count} x {show(nic.rate_bytes_per_s, 'b/s')}" for nic in nics)
    label = f"{cluster.fabric}, {rates} a node" if nics else cluster.fabric
    draw_text(axes, middles[-1] + 0.2, y, label, fontsize=8.5, color=MUTED)
    return y


def _draw_link(axes: Axes, label: str, *, x: float, top: float) -> None:
    style = {"arrowstyle": "<|-|>", "color": INK, "linewidth": 1.5, "linestyle": (0, (4, 2))}
    axes.annotate("", (x, top), (x, top + LINK_HEIGHT), arrowprops=style)
    draw_text(axes, x + 0.3, top + LINK_HEIGHT / 2, label, fontsize=9.5)


def _link_text(topology: Topology, pair: tuple[str, str]) -> str:
    """Bandwidth and latency between two clusters; of both ways, where they differ."""
    there, back = topology.links[pair], topology.links[pair[::-1]]
    if there == back:
        return _one_way_text(there)
    return f"{_one_way_text(there)} down; {_one_way_text(back)} up"


def _one_way_text(link: Link) -> str:
    rate, latency = show(link.bandwidth_bytes_per_s, "b/s"), show(link.latency_s, "s")
    return f"{link.fabric} {rate}, {latency}"


def _stage_text(stage: StagePlan) -> str:
    runs = [chunk[0] + (f" to {chunk[-1]}" if len(chunk) > 1 else "") for chunk in stage.chunks]
    layers = ", ".join(runs)
    if len(stage.layers) > 1:
        layers += f" ({layers_text(stage, {})})"
    return layers


def _mesh_words(stage: StagePlan) -> list[tuple[str, str]]:
    """The axes of a stage's mesh, each with the colour of what it goes over."""
    used = [(axis, size) for axis, size in stage.mesh.items() if size > 1]
    words = [(f"{axis} {size}", fabric_color(stage.fabrics[axis])) for axis, size in used]
    return words or [("of one device", INK)]


def _add_words(axes: Axes, after: Text, words: Sequence[tuple[str, str]], between: str) -> None:
    """Continues a text with words in colours of their own."""
    size = float(after.get_fontsize())
    for i, (word, color) in enumerate(words):
        for text, ink in [(between, INK)] * bool(i) + [(word, color)]:
            after = axes.annotate(
                text,
                xy=(1, 0.5),
                xytext=(0.4 * size, 0),
                xycoords=after,
                textcoords="offset points",
                va="center",
                color=ink,
                fontsize=size,
                parse_math=False,
            )
