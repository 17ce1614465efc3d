"""The values that settings may have: types with constraints, for the fields of sections."""

from typing import Annotated

from pydantic import ConfigDict, Field

# A section that a process never makes costs its start nothing.
STRICT = ConfigDict(extra="forbid", defer_build=True)

# Strict: a text is no number, and true is not 1. A list may stand for a tuple.
# Sizes have a limit far beyond any model or machine. So a slip is refused, and products of sizes
# stay within 64 bits.
Count = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
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
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, strict=True)]
Text = Annotated[str, Field(min_length=1, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
