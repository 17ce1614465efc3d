"""The code does what the documents say."""

import dataclasses
import json
import math
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.lab_rows import ROWS
from docs import package_graph, pictures
from holmesjax import config as configs, job, job_description
from holmesjax.checkpoints import skipped_data
from holmesjax.config import CHECKOUT
from holmesjax.errors import HolmesError
from holmesjax.files import run_folder, yaml_files
from holmesjax.job import Job
from holmesjax.lab import scaled_topology as lab
from holmesjax.liveness import lease
from holmesjax.report import goodput, metrics, page as report_page, recorder, trace
from holmesjax.topology import file as topology_file, loading
from holmesjax.topology.catalogue import DEVICES, NICS
from holmesjax.units import show
from launch import process_logs, restarts
from launch.arguments import parse
from launch.launchers import kubernetes, skypilot, slurm
from launch.launchers.kubernetes_options import KubernetesOptions, PodOptions, Toleration
from launch.launchers.ray_options import RayOptions
from launch.launchers.skypilot_options import SkyPilotOptions
from launch.launchers.slurm_options import SlurmOptions
from tests.clusters import PLANS, golden_plan
from tests.pages import PAGES

RUN_FILES = sorted(CHECKOUT.glob("configs/r[ue]*s/*.yaml"))
README = (CHECKOUT / "README.md").read_text()
PLANNING = (CHECKOUT / "docs/planner.md").read_text()
TRAINING = (CHECKOUT / "docs/training.md").read_text()
API = (CHECKOUT / "docs/api.md").read_text()
BENCHMARKS = (CHECKOUT / "docs/benchmarks.md").read_text()
SOURCES = {}  # by the last name of each module
for file in sorted(CHECKOUT.glob("[hklb]*/**/*.py")):
    SOURCES[file.stem] = SOURCES.get(file.stem, "") + file.read_text()
SETTINGS = {field.name: field.type for field in dataclasses.fields(configs.Config)}
SECTIONS = "".join(text for name, text in SOURCES.items() if name.endswith("sections"))


# Its search takes half a minute, and is that of the same model in `llama3_1_8b`; a test of
# explanations plans the file with a shorter one.
SELDOM = "llama3_8b_pretraining"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path, id=path.stem, marks=[pytest.mark.exhaustive] if path.stem == SELDOM else []
        )
        for path in RUN_FILES
    ],
)
def test_every_run_file_can_be_planned_and_its_header_is_a_claim(path):
    if path.stem in PLANS:  # which takes seconds, and a test of the planner does it
        loaded = Job(
            config=configs.load(path),
            topology=loading.load(configs.topology_path(configs.load(path), path)),
            plan=golden_plan(path.stem),
        )
    else:
        loaded = job.load(path)
    assert len(job_description.describe(loaded)) <= 30
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    text = " ".join(line.removeprefix("#").strip() for line in header)
    name = path.relative_to(CHECKOUT).as_posix()
    assert re.search(f"python -m launch (train|plan) {re.escape(name)}", text)
    assert "Expected:" in text
    assert re.search(r"commit [0-9a-f]{7}", text), "say where the numbers come from"
    for step in re.findall(r"[Aa] step of ([\d.]+ \w+)", text):
        assert step == show(loaded.plan.step_time_s, "s")


@pytest.mark.parametrize(
    "path", sorted(CHECKOUT.glob("configs/topologies/*.yaml")), ids=lambda path: path.stem
)
def test_every_topology_loads(path):
    assert loading.load(path).name == path.stem


@pytest.mark.parametrize(
    "path",
    [*CHECKOUT.glob("configs/runs/*.yaml"), *CHECKOUT.glob("configs/recipes/*.yaml")],
    ids=lambda path: path.stem,
)
def test_examples_pin_nothing_that_they_need_not(path):
    """Another topology would keep what is good for theirs."""
    says_why = ("quickstart", "small_llama", "islands", "expert_parallel")
    needed = any(name in path.stem for name in says_why)
    parallel = yaml_files.read(path, HolmesError).values.get("parallel") or {}
    assert bool(parallel) == needed


def test_the_plan_in_the_documents_is_the_plan():
    [shown] = re.findall(r"```text\n(topology .*?)```", PLANNING, re.DOTALL)
    printed = job_description.describe(job.load("configs/runs/quickstart.yaml", compares=True))
    assert shown.splitlines() == printed


def test_the_python_api_makes_a_plan(capsys):
    [shown] = re.findall(r"```python\n(.*?)```", API, re.DOTALL)
    exec(shown, {})
    assert capsys.readouterr().out == "['ib', 'roce'] 0.477 s\n"


def test_the_mistake_in_the_documents_is_what_is_printed():
    with pytest.raises(HolmesError) as error:
        job.load("configs/runs/quickstart.yaml", ["train.stepz=10"])
    assert f"error: {error.value}" in TRAINING


def test_the_topology_in_the_readme_can_be_planned(tmp_path):
    [shown] = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert len(shown.splitlines()) == 6
    (tmp_path / "ours.yaml").write_text(shown)
    loaded = job.load("configs/runs/quickstart.yaml", [f"topology={tmp_path / 'ours.yaml'}"])
    assert [cluster.name for cluster in loaded.topology.clusters] == ["new", "old"]


def test_the_page_of_topologies_has_every_key_and_kind_and_its_file_can_be_planned(tmp_path):
    page = (CHECKOUT / "docs/topologies.md").read_text()
    entries = (topology_file.ClusterEntry, topology_file.NodeEntry, topology_file.NicEntry)
    entries += (topology_file.DevicesEntry, topology_file.PeakEntry, topology_file.DeviceLinkEntry)
    entries += (topology_file.LinkEntry,)
    keys = {field.name for entry in entries for field in dataclasses.fields(entry)}
    missing = {name for name in keys | {*DEVICES, *NICS} if f"`{name}`" not in page}
    assert not missing
    shown, _ = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "ours.yaml").write_text(shown)
    nodes = loading.load(tmp_path / "ours.yaml").nodes
    assert [node.num_devices for node in nodes] == 9 * [8] + [4]


@pytest.mark.parametrize("system", ["maxtext", "torchtitan", "megatron"])
def test_the_settings_beside_those_of_another_system_exist(system):
    page = (CHECKOUT / f"docs/coming_from_{system}.md").read_text()
    ours = " ".join(re.findall(r"^\|.* \| ([^|]+) \|$", page, re.MULTILINE))
    named = {*re.findall(r"`(\w+)\.(\w+)`", ours)} - {("model", "preset")}  # a key of files
    assert len(named) > 40
    assert not [name for name in named if not hasattr(SETTINGS[name[0]], name[1])]


@pytest.mark.parametrize(
    "page, options",
    [
        ("slurm", SlurmOptions),
        ("kubernetes", KubernetesOptions),
        ("kubernetes", Toleration),
        ("skypilot", SkyPilotOptions),
        ("ray", RayOptions),
    ],
)
def test_every_key_of_an_options_file_is_on_its_page(page, options):
    text = (CHECKOUT / f"docs/{page}.md").read_text()
    keys = {field.name for field in dataclasses.fields(options)}
    if options is KubernetesOptions:
        keys |= {field.name for field in dataclasses.fields(PodOptions)}
    assert not [key for key in keys if not re.search(rf"\b{key}\b", text)]


def test_the_page_of_the_run_folder_has_every_file_and_every_part_of_the_time():
    page = (CHECKOUT / "docs/run_folder.md").read_text()
    files = (metrics.FILE, report_page.FILE, trace.FILE, recorder.TIMELINE, run_folder.ALLOWED)
    files += (skipped_data.RECORD, lease.FILE, restarts.RECORD, job.ENVIRONMENT, lab.FILE)
    files += (job.CONFIG, job.TOPOLOGY, job.PLAN, f"{process_logs.LOGS}/")
    files += (slurm.SCRIPT, slurm.OPTIONS, kubernetes.MANIFEST, kubernetes.KEY)
    files += (f"{skypilot.FOLDER}/", skypilot.KEY)
    missing = [name for name in (*files, *goodput.BUCKETS) if f"`{name}`" not in page]
    assert not missing


def test_the_readme_is_one_screen():
    assert len(README.splitlines()) <= 92


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_files_and_headings_that_a_page_names_exist(path):
    text = path.read_text()
    folders = "holmesjax|kernels|configs|launch|docs|notebooks|benchmarks|tests"
    named = {Path(name) for name in re.findall(rf"`((?:{folders})/[\w./]*(?:\.\w+|/))`", text)}
    links = re.findall(r"\]\(((?!http)[^)\s]+)\)|<img src=\"([^\"]+)\"", text)
    for link in ("".join(pair) for pair in links):
        file, _, heading = link.partition("#")
        target = (path.parent / file if file else path).resolve()
        named.add(target)
        if heading and target.exists():
            assert heading in headings(target), link
    made = CHECKOUT / "docs/reference"  # by make docs
    whole = [CHECKOUT / name for name in named]
    missing = [str(path) for path in whole if not path.exists() and made not in path.parents]
    assert not missing


def test_no_page_is_longer_than_three_screens():
    """Screens have fifty lines; a longer line is shown as several."""
    lengths = {
        str(path.relative_to(CHECKOUT)): sum(
            max(1, math.ceil(len(line) / 130)) for line in path.read_text().splitlines()
        )
        for path in PAGES
        if CHECKOUT / "docs" in path.parents
    }
    assert not {name: length for name, length in lengths.items() if length > 150}


def test_every_decision_of_the_design_has_its_date():
    pages = {path.stem: path.read_text() for path in CHECKOUT.glob("docs/design/*.md")}
    decisions = [
        paragraph
        for text in pages.values()
        for paragraph in text.split("\n\n")
        if paragraph.startswith("**")
    ]
    decisions += re.findall(r"^- .*(?:\n  .*)*", pages["rejected"], re.MULTILINE)
    assert len(decisions) > 100
    assert not [
        decision for decision in decisions if not re.search(r"\(20\d\d-\d\d-\d\d[;)]", decision)
    ]


def headings(page):
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "path",
    [page for page in PAGES if "coming_from_" not in page.stem],  # names of other systems
    ids=lambda path: path.name,
)
def test_the_names_that_a_page_has_from_the_code_are_there(path):
    """`module.name`, where such a module exists; `checkpoint.every` may be a setting, too."""
    named = set(re.findall(r"`(?:\w+\.)?([a-z_]+)\.([A-Za-z_]+)[`.(]", path.read_text()))
    files = {"json", "md", "py", "sbatch", "svg", "yaml"}
    missing = [
        f"{module}.{name}"
        for module, name in named
        if module in SOURCES and name not in files
        if not re.search(rf"\b{name}\b", SOURCES[module] + SECTIONS)
    ]
    assert not missing


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_command_of_a_page_can_be_parsed(path):
    blocks = re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL)
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if "-m" not in words:
            continue
        module, *arguments = words[words.index("-m") + 1 :]
        if module == "launch":
            parse(arguments)  # exits where it finds a mistake
        elif module.startswith("benchmarks"):
            assert (CHECKOUT / f"{module.replace('.', '/')}.py").exists(), line
        named = [word for word in arguments if word.startswith("configs/")]
        assert all((CHECKOUT / name).exists() for name in named), line
        settings = [word for word in arguments if re.match(r"\w+\.[\w.]+=", word)]
        settings = [word for word in settings if word.partition(".")[0] in SETTINGS]
        run_files = [name for name in named if "/topologies/" not in name]
        configs.load(*run_files[:1] or ["configs/runs/quickstart.yaml"], settings)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_part_of_a_run_file_on_a_page_is_accepted(path, tmp_path):
    """The rest of the run file is that of the quickstart."""
    quickstart = yaml_files.read("configs/runs/quickstart.yaml", HolmesError).values
    for block in re.findall(r"```yaml\n(.*?)```", path.read_text(), re.DOTALL):
        (tmp_path / "part.yaml").write_text(block)
        part = yaml_files.read(tmp_path / "part.yaml", HolmesError).values
        if not part.keys() <= SETTINGS.keys():
            continue  # another file
        run = {name: dict(values) for name, values in quickstart.items() if name != "topology"}
        run["train"]["steps"] = 10**7
        if "mixture" in part.get("data", ()):
            del run["data"]["corpus"]
        if "schedule_by" in part.get("optimizer", ()):
            del run["optimizer"]["warmup_steps"]
        for name, values in part.items():
            run[name] = values if "preset" in values else run.get(name, {}) | values
        text = yaml_files.to_text({"topology": quickstart["topology"], **run})
        (tmp_path / "run.yaml").write_text(text)
        configs.load(tmp_path / "run.yaml")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_what_the_python_of_a_page_imports_is_there(path):
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        found = re.findall(r"^from (holmesjax[\w.]*) import (.+)$", block, re.MULTILINE)
        for module, names in found:
            file = CHECKOUT / module.replace(".", "/")
            file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
            for name in re.findall(r"(\w+)(?: as \w+)?(?:, |$)", names):
                is_module = (file.parent / f"{name}.py").exists() or (file.parent / name).is_dir()
                assert is_module or re.search(rf"\b{name}\b", file.read_text()), (module, name)


def test_the_tables_of_the_holmes_comparison_are_its_results():
    result = json.loads((CHECKOUT / "benchmarks/results/holmes_lab_0.10.2.json").read_text())
    cells = {(line["row"], line["point"]): line for line in result["lines"]}
    for name in {row for row, _ in cells}:
        row, points = ROWS[name], (8, 32, 64) if ROWS[name].network != "fast" else (None,)
        label = row.label + ", all over Ethernet" * (row.network == "ethernet")
        shown = [f"{cells[name, point]['tokens_per_s']:,.0f}" for point in points]
        if row.network != "fast":
            shares = [cells[name, point]["share"] for point in points]
            shown = [f"{rate} ({x:.0%})" for rate, x in zip(shown, shares, strict=True)]
        assert f"| {label} | {row.system} | {' | '.join(shown)} |" in BENCHMARKS


def test_the_windows_of_long_links_follow_from_the_formula():
    page = (CHECKOUT / "docs/long_links.md").read_text()
    rows = re.findall(
        r"^\| (\d+) Gb/s \| (\d+) ms \| (\S+) MB \| (\S+) MB \| (\S+) Gb/s", page, re.M
    )
    assert len(rows) == 5
    for row in rows:
        gigabits, trip_ms, in_flight, of_each, carried = map(float, row)
        in_flight_bytes = gigabits * 1e9 / 8 * trip_ms / 1e3
        assert in_flight == pytest.approx(in_flight_bytes / 1e6, abs=0.005)
        assert of_each == pytest.approx(in_flight_bytes / 4e6, abs=0.051)
        reached = 4 * 2 / 3 * 4 * 2**20 * 8 / (trip_ms / 1e3) / 1e9
        assert carried == pytest.approx(min(gigabits, reached), abs=0.05)


def test_pictures_are_those_of_the_code_and_the_results():
    every = pictures.drawn()
    assert every.keys() == {"gain.svg", "packages.svg"}
    for name, drawn in every.items():
        ElementTree.fromstring(drawn)
        is_same = (CHECKOUT / "docs" / name).read_text() == drawn
        assert is_same, f"run `python -m docs.pictures`, and look at {name}"


def test_make_help_has_a_sentence_for_every_target():
    text = (CHECKOUT / "Makefile").read_text()
    [targets] = re.findall(r"^\.PHONY: (.+)$", text, re.MULTILINE)
    for target in targets.split():
        assert re.search(rf"^{target}:.*## [A-Z].+\.$", text, re.MULTILINE), target


def test_the_picture_of_the_packages_has_every_import():
    """Arrows that others imply are left out: with them the graph is that of the code again."""
    code = {name: place.imports for name, place in package_graph.places().items()}
    drawn = {name: set(others) for name, others in package_graph.arrows(code).items()}
    floor = package_graph.floors(code)
    for name, others in code.items():
        reached, waiting = set(), [name]
        while waiting:
            reached |= (new := drawn[waiting.pop()] - reached)
            waiting += new
        assert others <= reached, name
        assert all(floor[other] < floor[name] for other in others), name
