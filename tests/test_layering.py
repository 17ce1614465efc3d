"""Modules import only from rows above their own. The table in docs/design.md is this list."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [
    ["kernels.moments"],
    [
        "kernels.adamw",
        "kernels.attention_tiles",
        "kernels.cross_entropy",
        "kernels.embedding",
        "kernels.linear",
        "kernels.norm",
        "kernels.shards",
        "kernels.tuned",
        "kernels.warpgroups",
    ],
    ["kernels.attention"],
    ["kernels.attention_mosaic", "kernels.attention_mosaic_keys", "kernels.attention_triton"],
    ["kernels.attention_mosaic_backward"],
    ["kernels.attention_ring"],
    ["kernels.attention_pallas"],
    ["holmesjax.errors", "holmesjax.normals"],
    [
        "holmesjax.units",
        "holmesjax.yaml_files",
        "holmesjax.catalogue",
        "holmesjax.hardware",
        "holmesjax.lifeline",
        "holmesjax.wire",
        "holmesjax.frames",
        "holmesjax.host_memory",
        "holmesjax.xla_flags",
        "holmesjax.data.tokenizer",
        "holmesjax.data.permutation",
    ],
    [
        "holmesjax.schema",
        "holmesjax.discovery",
        "holmesjax.door",
        "holmesjax.lease",
        "holmesjax.lines",
        "holmesjax.timed_frames",
    ],
    ["holmesjax.config", "holmesjax.calibration", "holmesjax.nccl"],
    [
        "holmesjax.topology_file",
        "holmesjax.manifest",
        "holmesjax.learning_rates",
        "holmesjax.pace",
        "holmesjax.data.corpus",
    ],
    ["holmesjax.topology", "holmesjax.saving", "holmesjax.data.batches"],
    [
        "holmesjax.costs",
        "holmesjax.network",
        "holmesjax.schedule",
        "holmesjax.faults",
        "holmesjax.upgrades",
    ],
    ["holmesjax.memory", "holmesjax.stage_times", "holmesjax.mapper", "holmesjax.lab"],
    ["holmesjax.plan", "holmesjax.lab_commands"],
    ["holmesjax.layouts", "holmesjax.processes", "holmesjax.crossings", "holmesjax.forecast"],
    ["holmesjax.problem"],
    ["holmesjax.shortlist"],
    ["holmesjax.variants"],
    ["holmesjax.search"],
    ["holmesjax.prices"],
    ["holmesjax.planner"],
    [
        "holmesjax.explain",
        "holmesjax.job",
        "holmesjax.control",
        "holmesjax.agreement",
        "holmesjax.routes",
        "holmesjax.neighbours",
        "holmesjax.place",
        "holmesjax.doctor",
    ],
    ["holmesjax.agent", "holmesjax.probe", "holmesjax.resume"],
    [
        "holmesjax.mesh",
        "holmesjax.domain",
        "holmesjax.ops",
        "holmesjax.buckets",
        "holmesjax.split",
        "holmesjax.compat",
        "holmesjax.program_cache",
    ],
    ["holmesjax.sharding", "holmesjax.collectives"],
    [
        "holmesjax.digests",
        "holmesjax.models.gpt",
        "holmesjax.optimizer",
    ],
    ["holmesjax.stage"],
    ["holmesjax.programs", "holmesjax.ends", "holmesjax.speeds"],
    [
        "holmesjax.transport",
        "holmesjax.feed",
        "holmesjax.tcp",
        "holmesjax.timeline",
        "holmesjax.trace",
        "holmesjax.metrics",
        "holmesjax.console",
    ],
    ["holmesjax.pipeline", "holmesjax.checkpoint", "holmesjax.figures"],
    ["holmesjax.report"],
    ["holmesjax.recorder"],
    ["holmesjax.session"],
    ["holmesjax.trainer", "holmesjax.worker", "holmesjax.generate"],
    [
        "launch.launcher",
        "launch.causes",
        "launch.restarts",
        "launch.hosts",
        "launch.components",
        "launch.outputs",
        "launch.patience",
    ],
    [
        "launch.supervisor",
        "launch.watchdog",
        "launch.local",
        "launch.external",
        "launch.ssh",
        "launch.slurm",
        "launch.kubernetes",
        "launch.namespaces",
    ],
    ["launch.launchers", "launch.agents"],
    ["launch.doctor", "launch.probe", "launch.profile", "launch.agent"],
    ["launch.train", "launch.plan", "launch.generate", "launch.worker", "launch.nics"],
    ["launch.injector", "launch.counters"],
    ["launch.lab"],
]
ROW = {module: row for row, modules in enumerate(LAYERS) for module in modules}
WITHOUT_JAX = ROW["holmesjax.agent"]  # a plan can be made on any laptop
OUTSIDE = {"jax", "jaxlib", "flax", "optax", "orbax", "chex", "tensorstore"}


def all_imports(module: str) -> set[str]:
    """Everything a module imports, at any depth, functions included."""
    found = set()
    path = ROOT / (module.replace(".", "/") + ".py")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: write imports in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def test_every_module_has_a_row():
    folders = ("holmesjax", "kernels", "launch")
    files = [file for folder in folders for file in ROOT.glob(f"{folder}/**/[!_]*.py")]
    assert ROW.keys() == {".".join(f.relative_to(ROOT).with_suffix("").parts) for f in files}


@pytest.mark.parametrize("module", ROW)
def test_imports_point_up(module):
    wrong = sorted(name for name in all_imports(module) & ROW.keys() if ROW[name] >= ROW[module])
    assert not wrong, f"{module} (row {ROW[module]}) may not import {wrong}: not above it"


@pytest.mark.parametrize("module", ROW)
def test_only_ops_imports_kernels_and_a_plan_needs_no_jax(module):
    imports = all_imports(module)
    if module != "holmesjax.ops" and not module.startswith("kernels."):
        assert not [name for name in imports if name.split(".")[0] == "kernels"]
    if ROW[module] <= WITHOUT_JAX and not module.startswith("kernels."):
        assert OUTSIDE.isdisjoint(name.split(".")[0] for name in imports)


def test_the_design_names_every_module():
    text = (ROOT / "docs/design.md").read_text()
    missing = [module for module in ROW if f"`{module.split('.')[-1]}`" not in text]
    assert not missing, f"docs/design.md has no row for {missing}"
