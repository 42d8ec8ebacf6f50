"""What `make soak` tries beyond `make test`: more cases, and more examples of a property."""

from typing import Any

import pytest
from hypothesis import settings

SOAK_FACTOR = 20


def soak(*values: object, id: str | None = None) -> Any:
    """A case of a parametrised test that only `make soak` tries."""
    return pytest.param(*values, marks=pytest.mark.soak, id=id)


def examples(count: int, **others: Any) -> settings:
    """Settings of a property: `count` examples in `make test`, 20 times as many in `make soak`."""
    factor = SOAK_FACTOR if settings.get_current_profile_name() == "soak" else 1
    return settings(max_examples=count * factor, **others)
