"""The page shows the numbers of the run, asks the network for nothing and trusts no name."""

import dataclasses
import functools
import html.parser
import json
import math
import re
import weakref
from collections import Counter
from pathlib import Path

import pytest

from holmesjax.config import LogConfig
from holmesjax.errors import DataError, HolmesError
from holmesjax.plan.plan import Axis, Plan, StagePlan, TaskSeconds
from holmesjax.report import history, metrics, page as report
from holmesjax.report.metrics import Metrics
from holmesjax.report.page import write_report
from holmesjax.topology import saving
from holmesjax.topology.machines import Cluster, DeviceKind, Link, Nic, Node, Topology

VOID = {"meta", "link"}
ATTACK = "<script>alert(1)</script>\"'&"


class Page(html.parser.HTMLParser):
    """The texts and attributes of a page; refuses elements that are not closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append(data.strip())

    def values(self, *names: str) -> list[str]:
        return [value for name, value in self.attributes if name in names]


def machines(cluster_names: list[str]) -> tuple[Plan, Topology]:
    """One stage a cluster, two nodes of two devices each."""
    kind = DeviceKind(
        name="A100",
        peak_flop_per_s={"float32": 19.5e12, "bfloat16": 312e12},
        memory_bytes=80e9,
        memory_bandwidth_bytes_per_s=2e12,
        link=Link(fabric="nvlink", bandwidth_bytes_per_s=300e9, latency_s=2e-6),
    )
    nic = Nic(name="hdr", fabric="infiniband", rate_bytes_per_s=25e9, latency_s=3e-6, count=2)
    layers = ["embed", *(f"block_{i:03d}" for i in range(2 * len(cluster_names))), "head"]
    clusters, stages = [], []
    for number, name in enumerate(cluster_names):
        nodes = tuple(
            Node(name=f"{name}-{i}", device=kind, num_devices=2, nics=(nic,)) for i in range(2)
        )
        clusters.append(Cluster(name=name, fabric="infiniband", nodes=nodes))
        is_last = number == len(cluster_names) - 1
        mine = layers[2 * number + bool(number) : None if is_last else 2 * number + 3]
        stages.append(
            StagePlan(
                cluster=name,
                nodes=tuple(node.name for node in nodes),
                chunks=(tuple(mine),),
                devices=tuple(range(4 * number, 4 * number + 4)),
                mesh={Axis.DATA: 2, Axis.TENSOR: 2},
                fabrics={Axis.DATA: "infiniband", Axis.TENSOR: "nvlink"},
                memory_bytes={"parameters": 1.5 * 2**30, "gradients": 0.5 * 2**30},
                seconds={"compute": 0.1, "tensor": 0.0, "data": 0.0, "boundary": 0.0},
            )
        )
    plan = Plan(
        topology="two_clusters",
        topology_hash="0123456789ab",
        stages=tuple(stages),
        global_batch=8,
        microbatches=2,
        schedule="1f1b",
        activation_checkpointing="none",
        boundary_bytes=1024.0,
        step_time_s=0.125,
        bound_s=0.125,
        shares={"compute": 0.8125, "bubble": 0.1875},
    )
    ethernet = Link(fabric="ethernet", bandwidth_bytes_per_s=3.125e9, latency_s=50e-6)
    links = {(a, b): ethernet for a in cluster_names for b in cluster_names if a != b}
    return plan, Topology(name="two_clusters", clusters=tuple(clusters), links=links)


def record(step: int, **values: object) -> dict[str, object]:
    links = {"stage 0 -> stage 1": 2**20, "stage 1 -> stage 0": 2**20}
    return {
        "step": step,
        "loss": 5.0 - step / 4,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "tokens_per_s": 4096.0 * step,
        "step_time_s": 0.25,
        "bubble_share": step / 100,
        "skipped": False,
        "link_bytes": links,
    } | values


def task(stage: int, kind: str, start_s: float, end_s: float) -> dict[str, object]:
    return {"stage": stage, "kind": kind, "microbatch": 0, "start_s": start_s, "end_s": end_s}


TASKS = [task(0, "F", 0, 1), task(1, "F", 1, 2), task(1, "B", 2, 3), task(0, "B", 3, 4)]


def write_run(
    folder: Path,
    records: list[dict[str, object]],
    *,
    name: str = "run",
    clusters: list[str] | None = None,
    tasks: list[dict[str, object]] | None = TASKS,
    config: str = "train:\n  steps: 3\n",
) -> Path:
    """Writes the files of a run as the trainer does, and returns its folder."""
    run_dir = folder / name
    plan, topology = machines(["alpha", "beta"] if clusters is None else clusters)
    with Metrics(run_dir, LogConfig(tensorboard=False)) as metrics:
        for written in records:
            metrics.write(written)
    plan.save(run_dir / "plan.yaml")
    saving.save(topology, run_dir / "topology.yaml")
    if tasks is not None:
        (run_dir / "timeline.json").write_text(json.dumps({"step": 3, "tasks": tasks}))
    (run_dir / "config.yaml").write_text(config)
    return run_dir


@pytest.fixture
def make_run(tmp_path):
    return functools.partial(write_run, tmp_path)


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """The report of a run of one step, in its folder."""
    folder = tmp_path_factory.mktemp("one_step")
    return write_report(write_run(folder, [record(1)], config="learning_rate: 3e-4  # <peak>\n"))


def read(run_dir: Path) -> Page:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    return Page(path.read_text(encoding="utf-8"))


def cards(page: Page) -> dict[str, list[str]]:
    """The texts after each label of the summary."""
    labels = ["Final loss", "Validation loss", "Throughput", "Step time", "Tokens"]
    labels += ["MFU", "Wall time"]
    at = [page.texts.index(label) for label in labels] + [page.texts.index("Plan")]
    return {label: page.texts[at[i] + 1 : at[i + 1]] for i, label in enumerate(labels)}


def test_numbers_equal_the_run(make_run):
    page = read(make_run([record(1), record(2, val_loss=4.625), record(3, step_time_s=0.5)]))
    assert cards(page) == {
        "Final loss": ["4.250", "nats/token", "4.750 at step 1"],
        "Validation loss": ["4.625", "nats/token", "at step 2"],
        "Throughput": ["8,192", "tokens/s", "median over steps"],
        "Step time": ["0.25", "s", "median over steps"],
        "Tokens": ["9,216", "3 steps, 0 skipped"],  # 4096 * (1 * 0.25 + 2 * 0.25 + 3 * 0.5)
        "MFU": ["none", "these devices have no data sheet"],
        "Wall time": ["1.0 s", "sum of all steps"],
    }
    used = [record(i, mfu=i / 10, time_left_s=132.4) for i in (1, 2, 4)]
    found = cards(read(make_run(used, name="used")))
    assert found["MFU"] == ["20.0%", "of the devices' peak, median over steps"]
    assert found["Wall time"] == ["750 ms", "sum of all steps; 2 min 12 s left"]
    facts = "2 stages on 8 devices · schedule 1f1b with 2 microbatches · step 3"
    assert f"topology two_clusters · {facts}" in page.texts
    at = page.texts.index("Predicted")
    compared = ["Step time", "0.125 s", "0.25 s", "Bubble", "18.8%", "2.0%"]
    assert page.texts[at + 2 : at + 8] == compared


def test_each_validation_set_and_the_wait_for_batches_have_a_card(make_run):
    losses = {"web": 4.5, "code": 4.75}
    records = [
        record(1, input_wait_s=0.0),
        record(2, val_loss=4.625, val_losses=losses, input_wait_s=0.125),
    ]
    texts = read(make_run(records)).texts
    after = lambda label: texts[texts.index(label) + 1 : texts.index(label) + 4]
    assert after("Validation: web")[:2] == ["4.500", "nats/token"]
    assert after("Validation: code")[:2] == ["4.750", "nats/token"]
    assert after("Input wait") == ["0.0625", "s", "median over steps; 25.0% of the wall time"]


def test_steps_without_a_checkpoint_have_a_card(make_run):
    since = [{}, {"steps_without_checkpoint": 40}, {"steps_without_checkpoint": 41}, {}]
    since[3] = {"damaged_step": 1200}
    texts = read(make_run([record(i, **fields) for i, fields in enumerate(since, start=1)])).texts
    at = texts.index("Alarm")
    note = "without a checkpoint, for 41 steps at most; last at 3"
    assert texts[at + 1 : at + 4] == ["2", "steps", note]
    at = texts.index("Damaged checkpoints")
    note = "when they were read again; the newest is that after step 1,200"
    assert note in texts[at + 1 : at + 4]


def test_loads_of_experts_have_a_picture_and_their_alarms_a_table(make_run):
    loads = {"block_001": [8, 2, 0, 2], "block_003": [3, 3, 3, 3]}
    told = {"expert_loads": loads, "expert_load_steps": 2}
    in_alarm = {"experts_in_alarm": {"block_001/0": 2.6666, "block_001/2": 0.0}}
    in_alarm["num_experts_in_alarm"] = 7
    page = read(make_run([record(1), record(2, **told, **in_alarm), record(3)]))
    assert {"Experts", "block_003", "block_001/0: 2.67, block_001/2: 0 and 5 more"} <= set(
        page.texts
    )
    assert any("in the 2 steps to step 2." in text for text in page.texts)
    images = [value for value in page.values("href") if value.startswith("data:image/png")]
    assert images
    assert sum(map(len, images)) < 20_000
    assert "Experts" not in read(make_run([record(1)])).texts


def test_a_rehearsal_says_that_its_times_are_of_other_devices(make_run):
    page = read(make_run([record(1)], config="run:\n  rehearse: true\n"))
    titles = "Predicted for the topology's devices", "Measured on the devices of the rehearsal"
    at = page.texts.index(titles[0])
    assert page.texts[at + 1] == f"{titles[1]} (median)"
    assert any("they do not tell how well it was predicted" in text for text in page.texts)
    assert f"{titles[1]}, step 3" in page.texts
    assert "Predicted" not in page.texts


def test_plan_table_has_a_row_for_each_stage(one_step):
    page = Page(one_step.read_text(encoding="utf-8"))
    at = page.texts.index("Memory per device") + 1
    memory = ["2 GiB", "parameters 1.5 GiB, gradients 512 MiB"]
    mesh = ["data 2 x tensor 2", "data over infiniband, tensor over nvlink"]
    first = ["0", "alpha", "alpha-0, alpha-1", "embed + 2 layers", "embed to block_001", *mesh]
    second = ["1", "beta", "beta-0, beta-1", "2 layers + head", "block_002 to head", *mesh]
    assert page.texts[at : at + 22] == [
        *(*first, "4", "0 to 3", *memory),
        *(*second, "4", "4 to 7", *memory),
    ]


def test_memory_that_was_measured_stands_beside_the_prediction(make_run):
    """The last peak of each device counts; the fullest one stands for its stage."""
    peaks = [{"device 0": 2**30, "device 5": 2**29}, {"device 3": 3 * 2**30}, {"device 5": 2**31}]
    records = [
        record(i, memory_bytes=peaks_of_step) for i, peaks_of_step in enumerate(peaks, start=1)
    ]
    texts = read(make_run(records)).texts
    at = texts.index("Memory of the fullest device")
    assert texts[at + 3 : at + 9] == ["stage 0", "2 GiB", "3 GiB", "stage 1", "2 GiB", "2 GiB"]


def test_every_section_is_there(one_step):
    page = Page(one_step.read_text(encoding="utf-8"))
    headings = ["Plan", "Loss", "Pipeline", "Traffic", "Machines", "Resolved config"]
    assert [text for text in page.texts if text in headings] == headings
    assert page.tags["svg"] == 4
    assert page.tags["details"] == 1
    assert "open" not in dict(page.attributes)
    assert "learning_rate: 3e-4  # <peak>" in page.texts
    assert "idle 50%" in page.texts


@pytest.mark.parametrize("values", [{}, {"val_loss": math.nan}], ids=["no val", "nan val"])
def test_one_step_whose_numbers_are_not_finite(values, make_run):
    broken = record(1, loss=math.nan, grad_norm=math.inf, skipped=True, **values)
    shown = cards(read(make_run([broken])))
    assert shown["Final loss"] == ["not finite", "nats/token", "not finite at step 1"]
    assert shown["Tokens"] == ["1,024", "1 step, 1 skipped"]
    assert shown["Validation loss"][0] == ("not finite" if values else "none")


def test_one_stage_has_no_links(make_run):
    tasks = [task(0, "F", 0, 1)]
    page = read(make_run([record(1, link_bytes={})], clusters=["alone"], tasks=tasks))
    assert "This run has one stage: nothing crosses between stages." in page.texts
    assert page.tags["svg"] == 3


def test_a_run_that_was_not_timed(make_run):
    page = read(make_run([record(1)], tasks=None))
    assert "No step was predicted, or timed task by task." in page.texts


def test_the_step_is_shown_as_predicted_and_as_it_ran(make_run):
    run_dir = make_run([record(1)])
    seconds = TaskSeconds(
        forward_s=(1.0,),
        backward_s=(2.0,),
        weight_s=(0.0,),
        transfer_s=(0.5, 0.5),
        gather_s=0.0,
        reduce_s=0.1,
        update_s=0.2,
    )
    plan = Plan.load(run_dir / "plan.yaml")
    first, last = plan.stages
    stages = (
        dataclasses.replace(first, task_seconds=seconds),
        dataclasses.replace(last, task_seconds=dataclasses.replace(seconds, transfer_s=())),
    )
    dataclasses.replace(plan, stages=stages).save(run_dir / "plan.yaml")
    page = read(run_dir)
    assert "Predicted, boundaries included" in page.texts
    assert "Measured, step 3" in page.texts
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["predicted", "measured, step 3"]
    assert len([e for e in events if e["ph"] == "X" and e["pid"] == 2]) == len(TASKS)


def test_a_torn_file_is_reported_up_to_the_last_whole_step(make_run):
    run_dir = make_run([record(1), record(2)])
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert "2 steps, 0 skipped" in read(run_dir).texts


def test_a_run_without_steps_is_refused(make_run):
    run_dir = make_run([])
    with pytest.raises(DataError, match=r"metrics.jsonl: has no finished step.*\n.*\n  fix: train"):
        write_report(run_dir)
    assert not (run_dir / "report.html").exists()


def test_names_are_text(make_run):
    name = ATTACK.replace("/", "|")  # a folder's name holds no slash
    clusters = [ATTACK, '$x_{$&quot; id="a" href="#a"']
    page = read(make_run([record(1)], name=name, clusters=clusters, config=f"data: {ATTACK}\n"))
    assert page.tags["script"] == 0
    assert f"data: {ATTACK}" in page.texts
    assert page.texts.count(name) == 1
    for cluster in clusters:
        assert cluster in page.texts  # the table
        assert f"cluster {cluster}" in page.texts  # the picture
    assert not any(name.startswith("on") for name, _ in page.attributes)


def test_nothing_is_asked_of_the_network(one_step):
    text = one_step.read_text(encoding="utf-8")
    page = Page(text)
    assert not re.search(r"\w+://|@import|src=|<script", text)
    assert all(value.startswith(("#", "data:")) for value in page.values("href"))
    assert all(value.startswith("#") for value in re.findall(r"url\((.*?)\)", text))


def test_ids_are_unique_and_every_reference_has_its_target(make_run):
    run_dir = make_run([record(step) for step in range(1, 61)])
    page = read(run_dir)
    text = (run_dir / "report.html").read_text(encoding="utf-8")
    ids = Counter(page.values("id"))
    assert set(ids.values()) == {1}
    used = re.findall(r"url\(#(.*?)\)", text) + [v[1:] for v in page.values("href") if v[0] == "#"]
    assert used
    assert set(used) == set(ids)


def test_equal_inputs_give_equal_bytes(one_step):
    first = one_step.read_bytes()
    assert write_report(one_step.parent).read_bytes() == first


def test_a_large_run_stays_below_a_megabyte(make_run):
    num_stages, num_microbatches = 8, 64
    tasks = [
        task(stage, kind, 2 * (stage + m) + at, 2 * (stage + m) + at + 1)
        for stage in range(num_stages)
        for m in range(num_microbatches)
        for at, kind in enumerate("FB")
    ]
    links = {f"stage {i} -> stage {i + 1}": 1e9 / 7 for i in range(num_stages - 1)}
    records = [
        record(step, loss=3 + math.sin(step * step), link_bytes=links) for step in range(1, 20_001)
    ]
    names = [f"cluster-{i}" for i in range(num_stages)]
    run_dir = make_run(records, clusters=names, tasks=tasks)
    assert write_report(run_dir).stat().st_size < 700_000


def test_the_report_of_many_steps_keeps_numbers_and_no_records(make_run, monkeypatch):
    """A record is gone when the next thousands are read."""
    most, alive = 0, weakref.WeakSet()

    class Counted(dict):
        __hash__ = object.__hash__

    def with_count(line, parse=metrics._raw_record):
        nonlocal most
        found = Counted(parse(line))
        alive.add(found)
        most = max(most, len(alive))
        return found

    monkeypatch.setattr(metrics, "_raw_record", with_count)
    monkeypatch.setattr(history, "CHUNK", 100)
    found = history.read(make_run([record(step) for step in range(1, 2001)]))
    assert len(found) == 2000
    assert most <= 300


def test_columns_hold_what_the_records_hold(make_run):
    """In any order of the lines; of two records of one step the later counts."""
    links = {"a": 1.0}
    lines = [
        record(3, val_loss=2.0, link_bytes=links),
        record(1, loss=math.nan, link_bytes={}),
        record(2, mfu=0.5, link_bytes={"b": 3.0}),
        record(3, val_loss=1.0, link_bytes=links, skipped=True),
    ]
    for chunk in (1, 2, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(history, "CHUNK", chunk)
            found = history.of(lines)
        assert found.of("step").tolist() == [1, 2, 3]
        assert [math.isnan(x) for x in found.of("loss")] == [True, False, False]
        assert found.has("mfu").tolist() == [False, True, False]
        assert found.of("skipped").tolist() == [0, 0, 1]
        assert [x.tolist() for x in found.with_steps("val_loss")] == [[3], [1.0]]
        assert sorted(found.entries("link_bytes")) == ["a", "b"]
        assert found.with_steps(("link_bytes", "a"))[0].tolist() == [3]
        assert (found.first["step"], found.last["val_loss"]) == (1, 1.0)


def test_numbers_of_callbacks_have_a_table_and_pictures(make_run, monkeypatch):
    """Those of names that are not HolmesJAX's; as many as are kept."""
    monkeypatch.setattr(history, "MAX_OTHERS", 3)
    name = f"$own {ATTACK}"
    own = [{name: 2.0}, {name: math.nan, "late": 0.25}, {name: 3.0, "third": 1, "x": 5}]
    records = [record(step, **numbers) for step, numbers in enumerate(own, start=1)]
    assert history.of(records).others == [name, "late", "third"]
    page = read(make_run(records))
    assert page.texts.count(name) == 3  # a row, and a picture with its heading
    start = page.texts.index("Last step")
    rows = [*(name, "2", "3", "2", "3", "3"), *("late", "0.25", "0.25", "0.25", "0.25", "2")]
    rows += ["third", "1", "1", "1", "1", "3"]
    assert page.texts[start + 1 : start + 19] == rows


def test_the_greys_of_the_pictures_follow_the_theme(one_step):
    text = one_step.read_text(encoding="utf-8")
    body = text[text.index("<body>") :]
    assert not [grey for grey in report.THEME if grey in body]
    assert "fill: #000" not in body


def test_a_rule_that_the_plan_breaks_is_named(make_run):
    run_dir = make_run([record(1)])
    reason = "stage 0 crosses clusters ib and roce"
    plan = dataclasses.replace(Plan.load(run_dir / "plan.yaml"), exception=reason)
    plan.save(run_dir / "plan.yaml")
    assert f"An exception: {reason}." in " ".join(read(run_dir).texts)


def test_a_lab_of_another_format_is_refused(make_run):
    run_dir = make_run([record(1)])
    (run_dir / "lab.json").write_text('{"scale": 0.001, "nodes": []}')
    with pytest.raises(HolmesError, match="is no record of a lab") as raised:
        write_report(run_dir)
    assert raised.value.found == "KeyError: 'links'"
