"""Imports point down: a module imports only from its own package and from the places below it."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from docs.package_graph import imports_of, parsed

ROOT = Path(__file__).parent.parent
# From bottom to top. A place is a package, or a module of the root of `holmesjax` or `launch`.
PLACES = [
    "kernels",
    "holmesjax.errors",
    "holmesjax.xla_flags",
    "holmesjax.units",
    "holmesjax.hub_names",
    "holmesjax.files",
    "holmesjax.liveness",
    "holmesjax.schedules",
    "holmesjax.config",
    "holmesjax.topology",
    "holmesjax.data",
    "holmesjax.layer_specs",
    "holmesjax.hugging_face",
    "holmesjax.costs",
    "holmesjax.plan",
    "holmesjax.planner",
    "holmesjax.lab",
    "holmesjax.parallel",
    "holmesjax.models",
    "holmesjax.optimizers",
    "holmesjax.transport",
    "holmesjax.hosts",
    "holmesjax.process_variables",
    "holmesjax.job",
    "holmesjax.job_files",
    "holmesjax.job_description",
    "holmesjax.runtime",
    "holmesjax.checkpoints",
    "holmesjax.islands",
    "holmesjax.report",
    "holmesjax.callbacks",
    "holmesjax.training_loop",
    "holmesjax.training_setup",
    "holmesjax.trainer",
    "holmesjax.generation",
    "holmesjax.distributed",
    "launch.broken_imports",
    "launch.outputs",
    "launch.writable_outputs",
    "launch.corpus_options",
    "launch.progress_message",
    "launch.programs",
    "launch.launchers",
    "launch.arguments",
    "launch.workers",
    "launch.failure_causes",
    "launch.failure_messages",
    "launch.holdups",
    "launch.device_hangs",
    "launch.process_logs",
    "launch.restarts",
    "launch.loop_watch",
    "launch.watchdog",
    "launch.stop_requests",
    "launch.failure_diagnosis",
    "launch.job_saves",
    "launch.attempt",
    "launch.supervisor",
    "launch.generation_job",
    "launch.lab_machine",
    "launch.verbs",
]
# A plan is made, checked and supervised on machines without JAX.
WITHOUT_JAX = [
    "kernels.adamw_choice",
    "kernels.attention.choice",
    "kernels.expert_slots",
    *PLACES[PLACES.index("holmesjax.errors") : PLACES.index("holmesjax.parallel")],
    "holmesjax.optimizers.groups",
    "holmesjax.optimizers.learning_rates",
    "holmesjax.models.initial_values",
    "holmesjax.transport.addresses",
    "holmesjax.transport.admission",
    "holmesjax.transport.buffers",
    "holmesjax.transport.connection_loop",
    "holmesjax.transport.connections",
    "holmesjax.transport.crossings",
    "holmesjax.transport.frame_timing",
    "holmesjax.transport.frames",
    "holmesjax.transport.handshake",
    "holmesjax.transport.key_files",
    "holmesjax.transport.heartbeats",
    "holmesjax.transport.outbox",
    "holmesjax.transport.socket_buffers",
    "holmesjax.transport.ports",
    "holmesjax.transport.pull",
    "holmesjax.transport.records",
    "holmesjax.transport.relay",
    "holmesjax.transport.relay_messages",
    "holmesjax.transport.relayed",
    "holmesjax.transport.rendezvous",
    "holmesjax.transport.routes",
    "holmesjax.transport.tls",
    "holmesjax.hosts.agent",
    "holmesjax.hosts.computing",
    "holmesjax.hosts.doctor",
    "holmesjax.hosts.hardware",
    "holmesjax.hosts.jax_settings",
    "holmesjax.hosts.kernel_check",
    "holmesjax.hosts.nccl",
    "holmesjax.hosts.nics",
    "holmesjax.hosts.probe",
    "holmesjax.hosts.process_environment",
    "holmesjax.hosts.shared_memory",
    "holmesjax.hosts.agent_messages",
    "holmesjax.process_variables",
    "holmesjax.job",
    "holmesjax.job_files",
    "holmesjax.job_description",
    "holmesjax.callbacks",
    "holmesjax.checkpoints.island_states",
    "holmesjax.islands.agreement",
    "holmesjax.islands.election",
    "holmesjax.islands.island_lease",
    "holmesjax.islands.mailbox",
    "holmesjax.islands.global_weights",
    "holmesjax.islands.mailbox_claim",
    "holmesjax.islands.mailbox_places",
    "holmesjax.islands.mailbox_records",
    "holmesjax.islands.mailbox_seat",
    "holmesjax.islands.rejoining",
    "holmesjax.islands.round_merging",
    "holmesjax.islands.merge_duty",
    "holmesjax.islands.sending",
    "holmesjax.islands.sent_parts",
    "holmesjax.islands.merge",
    "holmesjax.runtime.step_timeout",
    "holmesjax.checkpoints.commit_alarm",
    "holmesjax.checkpoints.copy_progress",
    "holmesjax.checkpoints.scrub",
    "holmesjax.checkpoints.committed",
    "holmesjax.checkpoints.fetching",
    "holmesjax.checkpoints.manifest",
    "holmesjax.checkpoints.mirror",
    "holmesjax.checkpoints.newest_whole",
    "holmesjax.checkpoints.record_parts",
    "holmesjax.checkpoints.changed_settings",
    "holmesjax.checkpoints.resume",
    "holmesjax.checkpoints.retention",
    "holmesjax.checkpoints.committing",
    "holmesjax.checkpoints.save_schedule",
    "holmesjax.checkpoints.second_reading",
    "holmesjax.checkpoints.setting_aside",
    "holmesjax.checkpoints.skipped_data",
    "holmesjax.checkpoints.stores",
    "holmesjax.distributed.controller",
    "holmesjax.distributed.data_agreement",
    "holmesjax.distributed.member",
    "holmesjax.distributed.member_link",
    "holmesjax.distributed.messages",
    "holmesjax.distributed.member_records",
    "holmesjax.distributed.store_end",
    "holmesjax.distributed.store_hub",
    "holmesjax.distributed.store_messages",
    "launch.programs",
    "launch.launchers.launcher",
    "launch.launchers.table",
    "launch.arguments",
]
OUTSIDE = {"jax", "jaxlib", "flax", "optax", "orbax"}


def modules() -> dict[str, Path]:
    files = [
        file
        for place in ("holmesjax", "kernels", "launch")
        for file in ROOT.glob(f"{place}/**/[!_]*.py")
    ]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}


MODULES = modules()


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    return {module: imports_of(parsed(file)) for module, file in MODULES.items()}


def place_of(module: str) -> str:
    found = [place for place in PLACES if f"{module}.".startswith(f"{place}.")]
    assert found, f"{module} has no place: add it to PLACES"
    [place] = found
    return place


def is_without_jax(module: str) -> bool:
    return any(f"{module}.".startswith(f"{place}.") for place in WITHOUT_JAX)


def test_imports_point_down(imports):
    wrong = [
        f"{module} imports {name}"
        for module, names in imports.items()
        for name in names & MODULES.keys()
        if PLACES.index(place_of(name)) > PLACES.index(place_of(module))
    ]
    assert not wrong


def test_no_module_imports_itself_through_others(imports):
    graph = {module: names & MODULES.keys() for module, names in imports.items()}
    assert set(TopologicalSorter(graph).static_order()) == graph.keys()  # CycleError names a cycle


def test_only_ops_import_kernels(imports):
    """But for choices and counts, which have no arrays: a plan is priced and told by them."""
    wrong = [
        module
        for module, names in imports.items()
        if place_of(module) != "kernels"
        and any(
            name.split(".")[0] == "kernels"
            and not name.startswith(
                tuple(prefix for prefix in WITHOUT_JAX if prefix.startswith("kernels."))
            )
            for name in names
        )
    ]
    assert sorted(wrong) == ["holmesjax.models.ops", "holmesjax.optimizers.update_ops"]


def test_a_plan_needs_no_jax(imports):
    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        if is_without_jax(module)
        for name in imports[module]
        if name.split(".")[0] in OUTSIDE or (name in MODULES and not is_without_jax(name))
    ]
    assert not wrong


def test_every_place_says_what_lives_there():
    for place in PLACES:
        folder = ROOT / place.replace(".", "/")
        file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        text = ast.get_docstring(parsed(file))
        assert text, f"{place} has no docstring"


def test_the_design_has_every_package_in_its_order():
    text = (ROOT / "docs/design/packages.md").read_text()
    rows = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert named == [place.removeprefix("holmesjax.") for place in PLACES]


def test_no_test_module_imports_from_another():
    """Modules that say what they make have the helpers of several tests."""
    is_test = lambda name: re.fullmatch(r"tests\.(\w+\.)*test_\w+(\.\w+)?", name)
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for place in ("tests", "benchmarks", "docs")
        for file in ROOT.glob(f"{place}/**/*.py")
        for name in imports_of(parsed(file))
        if is_test(name)
    ]
    assert not wrong
