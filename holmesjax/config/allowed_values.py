"""The values that settings may have: types with constraints, for the fields of sections."""

from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field
from pydantic_core import PydanticKnownError

# A section that a process never makes costs its start nothing.
STRICT = ConfigDict(extra="forbid", defer_build=True)

# The least and the largest number of float32 in which all numbers of a step are computed: what is
# smaller is zero there, and what is larger infinite. The largest share is below one there, too.
LEAST, LARGEST, LARGEST_SHARE = 1.2e-38, 3.4e38, 0.9999999


def _of_float32(value: float) -> float:
    """The value, which float32 can hold."""
    if 0 < value < LEAST:
        raise PydanticKnownError("greater_than_equal", {"ge": LEAST})
    if value > LARGEST:
        raise PydanticKnownError("less_than_equal", {"le": LARGEST})
    return value


def _below_one(value: float) -> float:
    """The value, which float32 does not round to one."""
    if value > LARGEST_SHARE:
        raise PydanticKnownError("less_than_equal", {"le": LARGEST_SHARE})
    return value


# Strict: a text is no number, and true is not 1. A list may stand for a tuple.
# Sizes have a limit far beyond any model or machine. So a slip is refused, and products of sizes
# stay within 64 bits.
Count = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
NumChunks = Annotated[int, Field(ge=1, le=64, strict=True)]  # each is traced for itself
Tokens = Annotated[int, Field(ge=1, le=2**46 - 1, strict=True)]
Natural = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)]
NumLayers = Annotated[int, Field(ge=1, le=2**14, strict=True)]
Width = Annotated[int, Field(ge=1, le=2**20, strict=True)]
Wide = Annotated[int, Field(ge=1, le=2**24, strict=True)]
Length = Annotated[int, Field(ge=1, le=2**27, strict=True)]
# A clock of the system calls that wait has 31 bits of milliseconds, and some waits are doubled.
MOST_S = 10**6  # 11 days
Seconds = Annotated[float, Field(gt=0, le=MOST_S, allow_inf_nan=False, strict=True)]
NoSeconds = Annotated[float, Field(ge=0, le=MOST_S, allow_inf_nan=False, strict=True)]
Positive = Annotated[
    float, Field(gt=0, allow_inf_nan=False, strict=True), AfterValidator(_of_float32)
]
NonNegative = Annotated[
    float, Field(ge=0, allow_inf_nan=False, strict=True), AfterValidator(_of_float32)
]
Fraction = Annotated[
    float, Field(ge=0, lt=1, allow_inf_nan=False, strict=True), AfterValidator(_below_one)
]
Share = Annotated[
    float, Field(gt=0, le=1, allow_inf_nan=False, strict=True), AfterValidator(_of_float32)
]
MOST_RATE = 1000  # far above any that trains; 3e4 is a slip of 3e-4
Rate = Annotated[float, Field(gt=0, le=MOST_RATE, allow_inf_nan=False, strict=True)]
RateOrZero = Annotated[float, Field(ge=0, le=MOST_RATE, allow_inf_nan=False, strict=True)]
# Of a base below one, later pairs of a head would turn faster than the first.
RotaryBase = Annotated[
    float, Field(ge=1, allow_inf_nan=False, strict=True), AfterValidator(_of_float32)
]
Text = Annotated[str, Field(min_length=1, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
