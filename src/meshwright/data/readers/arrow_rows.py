"""Rows of Arrow tables as records."""

from typing import Any

import numpy as np

from meshwright.data.records import Field, Record


def row_of(batch: Any, index: int) -> Record:
    """One row of a record batch or table; null is no field."""
    record: dict[str, Field] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        value = field_of(column[index])
        if value is not None:
            record[name] = value
    return record


def field_of(scalar: Any) -> Field | None:
    """An Arrow scalar as a field: lists of numbers are arrays, and an image of `datasets` is its bytes."""
    if not scalar.is_valid:
        return None
    values = getattr(scalar, "values", None)
    if values is not None and hasattr(values, "to_numpy") and _is_number(values.type):
        return values.to_numpy(zero_copy_only=False)
    value = scalar.as_py()
    if isinstance(value, (bytes, str, int, float)):
        return value
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
        return value["bytes"]
    if isinstance(value, list):
        array = _rectangular(value)
        if array is not None:
            return array
    return str(value)


def _is_number(kind: Any) -> bool:
    return str(kind).rstrip("0123456789") in ("int", "uint", "float", "double", "halffloat", "bool")


def _rectangular(value: list[Any]) -> np.ndarray | None:
    """Nested lists of numbers of equal lengths as an array; None for anything else."""
    try:
        array = np.array(value)
    except ValueError:
        return None
    return array if array.dtype.kind in "iufb" and array.size else None
