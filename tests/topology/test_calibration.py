"""Calibrations: what their numbers mean, the files that are shipped, and mistakes in a file."""

import dataclasses
import re

import pytest

from holmesjax.errors import Mistakes
from holmesjax.topology import calibration, catalogue, loading, saving
from holmesjax.topology.calibration import FOLDER, Calibration, Product, ProductSpeed

SPEED = ProductSpeed(share=0.8, rows=100, columns=80, depth=60)


def test_a_product_takes_the_time_of_a_longer_one_at_the_share_of_the_peak():
    long = 2 * (1000 + 100) * (500 + 80) * (200 + 60)
    assert SPEED.seconds(Product(1000, 500, 200, 3), 1e12) == pytest.approx(3 * long / 0.8e12)


def test_large_products_reach_the_share_and_thin_ones_far_less():
    reached = lambda *dims: Product(*dims).flop / SPEED.seconds(Product(*dims), 1.0)
    assert reached(1e6, 1e6, 1e6) == pytest.approx(0.8, rel=1e-3)
    assert reached(4096, 4096, 64) < 0.5
    sizes = [reached(n, n, n) for n in (64, 256, 1024, 4096)]
    assert sizes == sorted(sizes)


# ---- files ---------------------------------------------------------------------------------------

SHIPPED = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_calibration_is_of_devices_that_name_it(path):
    file = calibration.read(path)
    named = [kind for kind, row in catalogue.DEVICES.items() if row.get("calibration") == path.stem]
    assert sorted(file.devices) == sorted(named)
    for kind in named:
        assert loading.known_device(kind).calibration == file.calibration


def test_calibrations_say_whether_holmesjax_measured_them():
    """Every source of those that it measured names it, with a date."""
    for path in SHIPPED:
        file = calibration.read(path)
        sources = dataclasses.asdict(file.sources).values()
        own = [
            bool(re.match(r"HolmesJAX, \d{4}-\d\d-\d\d: |launch profile on ", source))
            for source in sources
        ]
        assert own == [file.measured_by == "HolmesJAX"] * len(own), path


def test_an_h100_reaches_what_an_h200_does():
    """Until one is measured: otherwise a plan of both would take the older one for the faster."""
    h100, h200 = (calibration.read(FOLDER / f"{kind}.yaml") for kind in ("h100", "h200"))
    assert h100.measured_by == "others"
    assert h100.calibration == h200.calibration


def test_the_catalogue_names_calibrations_that_are_shipped():
    named = {row["calibration"] for row in catalogue.DEVICES.values() if "calibration" in row}
    assert named == {path.stem for path in SHIPPED}


TOPOLOGY = """\
name: one
clusters:
  - name: a
    fabric: local
    nodes: 1
    devices: {kind: KIND, count: 8CALIBRATION}
"""
MINE = """\
devices: [h100, b200]
calibration:
  products: {share: 0.5, rows: 1, columns: 2, depth: 3}
  attention: 2
  memory: 0.7
sources: {products: measured, attention: measured, memory: measured}
"""
EXPECTED = Calibration(
    products=ProductSpeed(share=0.5, rows=1, columns=2, depth=3), attention=2, memory=0.7
)


@pytest.fixture
def load(tmp_path):
    """Loads a topology with one kind of device and a calibration, beside the file mine.yaml."""
    (tmp_path / "mine.yaml").write_text(MINE)

    def load_text(kind, value=""):
        value = f", calibration: {value}" if value else ""
        text = TOPOLOGY.replace("KIND", kind).replace("CALIBRATION", value)
        (tmp_path / "one.yaml").write_text(text)
        return loading.load(tmp_path / "one.yaml")

    return load_text


def device_of(topology):
    return topology.clusters[0].nodes[0].device


def test_a_topology_names_a_file_beside_it_a_shipped_one_or_the_numbers(load):
    shipped = calibration.read(FOLDER / "h100.yaml").calibration
    assert device_of(load("h100")).calibration == shipped
    assert device_of(load("h100", "mine.yaml")).calibration == EXPECTED
    assert device_of(load("b200")).calibration == Calibration()
    section = "{products: {share: 0.5, rows: 1, columns: 2, depth: 3}, attention: 2, memory: 0.7}"
    assert device_of(load("b200", section)).calibration == EXPECTED
    only = device_of(load("h100", "{products: {share: 0.25}}")).calibration
    assert only == Calibration(products=ProductSpeed(share=0.25))


def test_a_saved_topology_holds_the_numbers(load, tmp_path):
    """It is read back where the file is not, and its hash is that of the numbers."""
    named = load("h100", "mine.yaml")
    saving.save(named, tmp_path / "saved.yaml")
    (tmp_path / "mine.yaml").unlink()
    assert loading.load(tmp_path / "saved.yaml") == named
    faster = dataclasses.replace(EXPECTED, attention=1.0)
    device = dataclasses.replace(device_of(named), calibration=faster)
    [cluster] = named.clusters
    node = dataclasses.replace(cluster.nodes[0], device=device)
    other = dataclasses.replace(named, clusters=(dataclasses.replace(cluster, nodes=(node,)),))
    assert saving.hash_of(other) != saving.hash_of(named)


@pytest.mark.parametrize(
    "kind, value, problem",
    [
        ("h200", "mine.yaml", "one.yaml:6: clusters[0].devices.calibration: is a calibration of"),
        ("h100", "nowhere.yaml", "nowhere.yaml: no such file"),
        ("h100", "h200", "is a calibration of h200"),
        ("h100", "3", "must be a text"),
        ("h100", "{products: {share: 2000}}", "products.share: must be at most 1000"),
        ("h100", "{products: {share: 0}}", "products.share: must be more than 0"),
        ("h100", "{memory: fast}", "memory: must be a number"),
        ("h100", "{speed: 1}", "no such setting"),
    ],
)
def test_a_mistake_is_refused(load, kind, value, problem):
    with pytest.raises(Mistakes) as error:
        load(kind, value)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ("devices: [h100, b200]", "devices: []", "devices: must not be empty"),
        ("memory: measured}", "}", "sources.memory: is missing"),
        ("share: 0.5, ", "", "calibration.products.share: is missing"),
        ("attention: 2", "attention: -1", "calibration.attention: must be more than 0"),
    ],
)
def test_a_mistake_in_a_calibration_file_is_refused(load, tmp_path, old, new, problem):
    assert old in MINE
    (tmp_path / "mine.yaml").write_text(MINE.replace(old, new))
    with pytest.raises(Mistakes) as error:
        load("h100", "mine.yaml")
    assert "mine.yaml:" in str(error.value)
    assert problem in str(error.value)
