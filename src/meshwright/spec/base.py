"""The base of every spec: frozen, complete, no unknown keys, numbers as people write them (4K, 80GiB)."""

import hashlib
import json
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from meshwright.units import parse_count, parse_number

LARGEST_COUNT = 2**63 - 1  # what a tensor's 64-bit integer holds
Positive = Annotated[int, Field(ge=1, le=LARGEST_COUNT), BeforeValidator(parse_count)]
# Limits far above any model, so that an absurd size is refused at once and by every verb.
LayerCount = Annotated[int, Field(ge=1, le=10_000), BeforeValidator(parse_count)]
ExpertCount = Annotated[int, Field(ge=1, le=2**16), BeforeValidator(parse_count)]
ModelSize = Annotated[int, Field(ge=1, le=2**24), BeforeValidator(parse_count)]
VocabSize = Annotated[int, Field(ge=1, le=2**31), BeforeValidator(parse_count)]
NonNegative = Annotated[int, Field(ge=0, le=LARGEST_COUNT), BeforeValidator(parse_count)]
Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(parse_number)]
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(parse_number)]
NonNegativeNumber = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(parse_number)]
Fraction = Annotated[float, Field(ge=0, le=1), BeforeValidator(parse_number)]


class Spec(BaseModel):
    """Numbers, strings and other specs; frozen, and unknown keys are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True
    )

    def with_(self, **changes: Any) -> Self:
        """A new, validated spec with these fields replaced."""
        return type(self).model_validate({**self.model_dump(), **{k: _plain(v) for k, v in changes.items()}})

    def fingerprint(self) -> str:
        """Sixteen hex digits that are equal exactly when the specs are equal."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, Spec) else value
