"""The speed of a kind of device: the share of its data sheet that each operation reaches.

The data sheet is in the topology, and a calibration stands beside it. `launch profile` measures
one, `configs/calibrations/` has some, and each states where its numbers are from. It is also a
section of a topology file, `calibration:` of `devices`, as a file's name or written out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from holmesjax.errors import Mistakes, TopologyError
from holmesjax.files import schema, yaml_files

FOLDER = Path(__file__).parents[2] / "configs/calibrations"

Factor = Annotated[float, Field(gt=0, le=1000, strict=True)]
Share = Factor  # of a peak; above 1 where the peak is a guess
Dim = Annotated[float, Field(ge=0, le=1e5, strict=True)]
Seconds = Annotated[float, Field(ge=0, le=10, strict=True)]
Text = Annotated[str, Field(min_length=1, strict=True)]


class Product(NamedTuple):
    """A matrix product of [rows, depth] and [depth, columns], done `times` times."""

    rows: float
    columns: float
    depth: float
    times: float = 1
    dtype: str = ""  # of its operands; "": the compute dtype

    @property
    def flop(self) -> float:
        """A multiplication and an addition are two."""
        return 2.0 * self.rows * self.columns * self.depth * self.times

    @property
    def gradients(self) -> tuple["Product", "Product"]:
        """The products that make the gradients of its left and of its right operand."""
        rows, columns, depth, times, dtype = self
        left = Product(rows, depth, columns, times, dtype)
        return left, Product(depth, columns, rows, times, dtype)


def flop(products: Iterable[Product]) -> float:
    return sum(product.flop for product in products)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductSpeed:
    """How long matrix products take, of [M, K] and [K, N]:

        seconds = 2 (M + rows) (N + columns) (K + depth) / (share * peak)

    Large products reach `share` of the peak. A dim costs as if it were longer: its last tile is not
    full, and the pipelines of the device fill and drain.
    """

    share: Share
    rows: Dim = 0.0
    columns: Dim = 0.0
    depth: Dim = 0.0

    def seconds(self, product: Product, peak_flop_per_s: float) -> float:
        m, n, k, times, _ = product
        padded = 2.0 * times * (m + self.rows) * (n + self.columns) * (k + self.depth)
        return padded / (self.share * peak_flop_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The speed that one kind of device reaches.

    The values of a kind without a calibration: half the peak is between the 0.41 and 0.56 of
    Korthikanti et al. (arXiv:2205.05198, table 5), all else is what the data sheet says.
    """

    products: ProductSpeed = ProductSpeed(share=0.5)
    attention: Factor = 1.0  # time of attention, to that of its products by `products`
    memory: Share = 1.0  # of the bandwidth, where operations are bound by it
    between: Factor = 1.0  # time of a layer's other operations, to that of their bytes by `memory`
    layer_s: Seconds = 0.0  # what a layer takes however few its tokens, forward and backward


UNKNOWN = Calibration()  # of a kind that nobody has measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """The source of each number."""

    products: Text
    attention: Text
    memory: Text
    between: Text = "not measured"
    layer_s: Text = "not measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationFile:
    """The contents of a calibration file."""

    devices: Annotated[tuple[Text, ...], Field(min_length=1)]  # kinds that it is of
    measured_by: Literal["HolmesJAX", "others"] = "others"  # by `launch profile`, or see `sources`
    calibration: Calibration
    sources: Sources


def find(name: str, folder: Path) -> Path:
    """The file that a topology in `folder` means: one of its own, or a shipped one by its name."""
    shipped = FOLDER / f"{name}.yaml"
    return shipped if shipped.is_file() else folder / name


def read(path: str | Path) -> CalibrationFile:
    """Reads a calibration file. Raises `Mistakes` with all that is wrong with it."""
    document = yaml_files.read(path, TopologyError)
    file, mistakes = schema.read(CalibrationFile, document)
    if mistakes:
        raise Mistakes(mistakes)
    built: CalibrationFile = schema.build(file)
    return built


def values(calibration: Calibration) -> dict[str, Any]:
    """The section of a file that `read` and a topology file read back as equal."""
    products = {f.name: getattr(calibration.products, f.name) for f in fields(ProductSpeed)}
    return {
        "products": products,
        "attention": calibration.attention,
        "memory": calibration.memory,
        "between": calibration.between,
        "layer_s": calibration.layer_s,
    }
