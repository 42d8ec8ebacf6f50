"""Layers of values and where each value was set: default < family < recipe < file < command line."""

from dataclasses import dataclass, field
from typing import Any, Literal, cast

from meshwright.spec.yaml_text import Path, walk

Kind = Literal["default", "family", "recipe", "file", "command line"]


@dataclass(frozen=True)
class Origin:
    """Where a value was set."""

    kind: Kind
    place: str = ""
    """`run.yaml:12`, `demo.yaml:3`, or the family's name."""

    def __str__(self) -> str:
        return f"{self.kind} {self.place}".rstrip()

    @property
    def where(self) -> str:
        """The place as errors name it: a line of a file, or the command line."""
        return self.place if self.kind in ("recipe", "file") else self.kind


@dataclass
class Layer:
    """A tree of plain values and where each was set (by the longest known prefix of its path)."""

    tree: dict[str, Any] = field(default_factory=dict[str, Any])
    origins: dict[Path, Origin] = field(default_factory=dict[Path, Origin])

    def has(self, path: Path) -> bool:
        """Whether this layer sets the value at `path`."""
        value: Any = self.tree
        for key in path:
            if not isinstance(value, dict) or key not in value:
                return False
            value = cast(Any, value[key])
        return True

    def origin_of(self, path: Path) -> Origin:
        """Where the value at `path`, or the mapping that contains it, was set.

        A mapping without a line of its own, as on the command line, was set where its first value was.
        """
        below = (known for known in self.origins if known[: len(path)] == path)
        if path not in self.origins and (first := next(below, None)) is not None:
            return self.origins[first]
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return Origin("default")

    def overridden_by(self, upper: "Layer") -> "Layer":
        """Both layers merged; `upper` wins. Mappings are merged key by key, other values are replaced."""
        origins = {
            path: origin for path, origin in self.origins.items() if not _is_replaced(path, upper.tree)
        }
        return Layer(_merge(self.tree, upper.tree), {**origins, **upper.origins})

    def without(self, path: Path) -> "Layer":
        """This layer without the value at `path`."""
        tree = dict(self.tree)
        if len(path) == 1:
            tree.pop(str(path[0]), None)
        elif isinstance(tree.get(str(path[0])), dict):
            below = Layer(tree[str(path[0])]).without(path[1:])
            tree[str(path[0])] = below.tree
        origins = {p: origin for p, origin in self.origins.items() if p[: len(path)] != path}
        return Layer(tree, origins)


def layer_of(tree: dict[str, Any], origin: Origin) -> Layer:
    """A layer whose values were all set in one place."""
    return Layer(tree, {path: origin for path, _ in walk(tree)})


def _merge(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = _merge(cast(dict[str, Any], below), cast(dict[str, Any], value)) if both else value
    return merged


def _is_replaced(path: Path, upper: Any) -> bool:
    """Whether `upper` sets a value other than a mapping at `path` or above it."""
    for key in path:
        if not isinstance(upper, dict) or key not in upper:
            return False
        upper = cast(Any, upper[key])
        if not isinstance(upper, dict):
            return True
    return False
