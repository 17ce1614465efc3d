"""`launch profile`: measures a device of this host, and writes its calibration."""

import argparse
import dataclasses
import os
import statistics
import sys
import time
from pathlib import Path

import jax

from holmesjax import units
from holmesjax.errors import ConfigError
from holmesjax.files import yaml_files
from holmesjax.parallel import platforms
from holmesjax.plan.device_pool import DevicePool
from holmesjax.runtime import device_profile
from holmesjax.topology import calibration
from holmesjax.topology.calibration import Calibration, Product
from holmesjax.topology.machines import DeviceKind
from launch import writable_outputs


def run(args: argparse.Namespace) -> int:
    kind = args.job.node_to_measure(args.node).device
    path = Path(args.output or f"{kind.name}.yaml")
    writable_outputs.check_file(path, "--output")
    os.environ.update(DevicePool.of_run(os.environ).variables)  # before JAX asks for a device
    platforms.use_devices({kind.name}, 1, rehearse=args.job.config.run.rehearse)
    device = jax.devices()[0]
    _refuse_another(device, kind)
    train, model = args.job.config.train, args.job.config.model
    timed = device_profile.measure(model, train.compute_dtype, _progress)
    _progress("")
    found, off = device_profile.explain(timed, kind, model)
    path.write_text(_file(kind, device, found, off, timed), encoding="utf-8")
    print(*_lines(kind, device, found, off, timed), sep="\n")
    print(f"wrote {path}; name it in the topology: devices: {{..., calibration: {path.name}}}")
    return 0


def _refuse_another(device: jax.Device, kind: DeviceKind) -> None:
    """Refuses a CPU for a GPU, and a GPU for a CPU. The user compares names of GPUs."""
    if (device.platform == "cpu") != (kind.name == "cpu"):
        fix = "run it on a host that has one"
        problem = f"this host has no {kind.name}"
        raise ConfigError("--node", problem, found=device.device_kind, fix=fix)


def _progress(text: str) -> None:
    """Shows a line on a terminal; each call replaces the line before."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _file(
    kind: DeviceKind,
    device: jax.Device,
    found: Calibration,
    off: dict[Product, float],
    timed: device_profile.Timed,
) -> str:
    typical = statistics.median(map(abs, off.values()))
    how = (
        f"launch profile on {device.device_kind}, {os.cpu_count()} cores, JAX {jax.__version__}, "
        f"{time.strftime('%Y-%m-%d')}"
    )
    peak = units.show(kind.peak_flop_per_s[timed.dtype], "FLOP/s")
    sources = {
        "products": f"{how}: {len(off)} products in {timed.dtype}, half of them within "
        f"{typical:.0%}; of {peak}",
        "attention": how,
        "memory": f"{how}: AdamW on {device_profile.UNCACHED:,} parameters; "
        f"of {units.show(kind.memory_bandwidth_bytes_per_s, 'B/s')}",
        "between": f"{how}: a layer of several, less its products and its attention",
        "layer_s": f"{how}: what of that is the same for {device_profile.SEQUENCES[0]} and "
        f"{device_profile.SEQUENCES[-1]} sequences",
    }
    values = {
        "devices": [kind.name],
        "measured_by": "HolmesJAX",
        "calibration": calibration.values(found),
        "sources": sources,
    }
    return yaml_files.to_text(values)


def _lines(
    kind: DeviceKind,
    device: jax.Device,
    found: Calibration,
    off: dict[Product, float],
    timed: device_profile.Timed,
) -> list[str]:
    """Yields the table of products, and the calibration."""
    lines = [f"{kind.name} ({device.device_kind}), {timed.dtype}"]
    lines.append(f"  {'rows':>8} {'columns':>8} {'depth':>8}  {'speed':>13}  predicted")
    for product, seconds in timed.products.items():
        dims = " ".join(f"{round(n):8}" for n in product[:3])
        speed = units.show(product.flop / seconds, "FLOP/s")
        lines.append(f"  {dims}  {speed:>13}  {off[product]:+.0%} of the time")
    peak = units.show(kind.peak_flop_per_s[timed.dtype], "FLOP/s")
    share, rows, columns, depth = dataclasses.astuple(found.products)
    return [
        *lines,
        f"products    {share:.0%} of {peak}, "
        f"dims as if longer by {rows:g}, {columns:g} and {depth:g}",
        f"attention   {found.attention:g} times as long as its products",
        f"memory      {found.memory:.0%} of "
        f"{units.show(kind.memory_bandwidth_bytes_per_s, 'B/s')} in the optimizer",
        f"between     {found.between:g} times as long as the bytes of a layer's other operations",
        f"layer       {units.show(found.layer_s, 's')} however few its tokens",
    ]
