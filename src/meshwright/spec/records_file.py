"""Records files as text: recognised, read and checked without opening a source."""

from pathlib import Path
from typing import Any, cast

from meshwright.errors import SpecError
from meshwright.files import read_text
from meshwright.spec.records import RecordsSpec
from meshwright.spec.settings import read_spec_file
from meshwright.spec.yaml_text import parse_yaml

_ENDINGS = (".yaml", ".yml")


def is_records_file(path: object) -> bool:
    """Whether a path names a records file."""
    return isinstance(path, str | Path) and str(path).endswith(_ENDINGS)


def has_sources(path: str | Path) -> bool:
    """Whether a YAML file is a records file, by its key `sources`: run files have none."""
    if not is_records_file(path) or not Path(path).is_file():
        return False
    try:
        value = parse_yaml(read_text(Path(path)), str(path)).value
    except (OSError, UnicodeDecodeError):
        return False  # whoever reads it as a run file says what is wrong with it
    return isinstance(value, dict) and "sources" in cast(dict[str, Any], value)


def read_records(path: str | Path) -> RecordsSpec:
    """The spec of a records file; SpecErrors lists everything that is wrong with it."""
    spec = read_spec_file(RecordsSpec, Path(path))
    if not spec.sources:
        raise SpecError("there is no source", where=f"{path}: sources", hint="sources: [{path: images/}]")
    if len({source.weight is None for source in spec.sources}) > 1:
        hint = "give each source a weight, or none of them"
        raise SpecError("some sources have a weight and some have none", where=f"{path}: sources", hint=hint)
    return spec
