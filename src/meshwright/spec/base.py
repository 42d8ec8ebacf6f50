"""What every spec has in common: frozen, complete, no unknown keys, human number forms."""

import hashlib
import json
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from meshwright.units import parse_bytes, parse_count, parse_number, parse_seconds

LARGEST_COUNT = 2**63 - 1  # what a tensor's 64-bit integer holds
Count = Annotated[int, BeforeValidator(parse_count)]
Positive = Annotated[int, BeforeValidator(parse_count), Field(ge=1, le=LARGEST_COUNT)]
NonNegative = Annotated[int, BeforeValidator(parse_count), Field(ge=0, le=LARGEST_COUNT)]
Number = Annotated[float, BeforeValidator(parse_number), Field(allow_inf_nan=False)]
PositiveNumber = Annotated[float, BeforeValidator(parse_number), Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, BeforeValidator(parse_number), Field(ge=0, le=1)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0, allow_inf_nan=False)]


class Spec(BaseModel):
    """Numbers, strings and other specs; frozen, and unknown keys are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True
    )

    def with_(self, **changes: Any) -> Self:
        """A new spec with these fields replaced and everything validated again."""
        return type(self).model_validate({**self.model_dump(), **{k: _plain(v) for k, v in changes.items()}})

    def fingerprint(self) -> str:
        """Sixteen hex digits that are equal exactly when the specs are equal."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, Spec) else value
