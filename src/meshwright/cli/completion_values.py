"""What a shell offers for a word: recipes, run files, families, clusters, settings and their values."""

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

_RUN_SUFFIXES = (".yaml", ".yml")


def complete_run(incomplete: str) -> list[str]:
    """Recipes, and run files and folders below the path that is being typed."""
    from meshwright.spec.text import recipe_names

    found = [name for name in recipe_names() if name.startswith(incomplete)]
    return found + [path for path in _paths(incomplete) if path.endswith(("/", *_RUN_SUFFIXES))]


def complete_model(incomplete: str) -> list[str]:
    """Model families, and folders and files such as a config.json."""
    from meshwright.spec.families import FAMILIES

    return [name for name in FAMILIES if name.startswith(incomplete)] + _paths(incomplete)


def complete_cluster(incomplete: str) -> list[str]:
    """Names of clusters and devices; what follows the colon is counted."""
    from meshwright.hardware.catalogue import cluster_names, device_names

    names = [*cluster_names(), *device_names()]
    return [f"{name}:" for name in dict.fromkeys(names) if name.startswith(incomplete)]


def complete_setting(incomplete: str) -> list[str]:
    """Keys of a run file, `parallel.tp=`, and after the sign the values, where there is a list of them."""
    from meshwright.spec import RunSpec

    key, sign, _ = incomplete.partition("=")
    settings = dict(_settings(RunSpec))
    if sign:
        found = [f"{key}={value}" for value in _values(settings.get(key))]
        return [word for word in found if word.startswith(incomplete)]
    return [f"{name}=" for name in settings if name.startswith(incomplete)]


def _settings(spec: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, type) of every setting of a spec and of the specs inside it."""
    for name, field in spec.model_fields.items():
        nested = [one for one in _alternatives(field.annotation) if hasattr(one, "model_fields")]
        for one in nested:
            yield from _settings(one, f"{prefix}{name}.")
        if not nested:
            yield f"{prefix}{name}", field.annotation


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _values(kind: Any) -> Iterator[str]:
    for one in _alternatives(kind):
        if one is bool:
            yield from ("true", "false")
        elif get_origin(one) is Literal:
            yield from map(str, get_args(one))


def _paths(incomplete: str) -> list[str]:
    """Files, and folders with a slash at their end, whose path begins so; none that is hidden."""
    folder, _, start = incomplete.rpartition("/")
    root = Path(f"{folder}/") if "/" in incomplete else Path()
    prefix = f"{folder}/" if "/" in incomplete else ""
    try:
        entries = sorted(root.iterdir())
    except OSError:
        return []
    shown = [entry for entry in entries if entry.name.startswith(start) and not entry.name.startswith(".")]
    return [f"{prefix}{entry.name}{'/' if entry.is_dir() else ''}" for entry in shown]
