"""The blocks of a user module: the modules that are recomputed, compiled and gathered one at a time."""

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn

from meshwright.errors import SpecError
from meshwright.spec.violations import nearest

Blocks = dict[str, nn.Module]
"""Blocks by their names in the model; a module that is used several times appears once."""


def find_blocks(model: nn.Module, pattern: str | None = None) -> Blocks:
    """The blocks of a model, named by a pattern or found; empty when no module looks like one.

    Blocks that are found are members of a ModuleList or Sequential that share their class with another
    member. Where such members differ in the shapes of their parameters, as the stages of a convolutional
    network do, and each of them holds such a list itself, the inner members are the blocks.
    """
    found = _named(model, pattern) if pattern is not None else list(_found(model, ""))
    by_module = {id(module): (name, module) for name, module in reversed(found)}
    return dict(sorted(by_module.values(), key=lambda item: [one[0] for one in found].index(item[0])))


def _named(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    # `*` stays within one part of a name, so `layer.*` means the layers and not everything inside them.
    parts = pattern.split(".")
    found = [
        (name, module)
        for name, module in model.named_modules()
        if name and len(split := name.split(".")) == len(parts) and all(map(fnmatchcase, split, parts))
    ]
    if not found:
        names = [name for name, _ in model.named_modules() if name]
        lists = ", ".join(_joined(name, "*") for name in list_names(model))
        hint = nearest(pattern, [f"{name}.*" for name in names]) or (
            f"its lists are {lists}" if lists else ""
        )
        raise SpecError(
            f"pattern {pattern!r} matches none of the {len(names)} modules of {type(model).__name__}",
            where="blocks",
            hint=hint or "leave `blocks` out: this model has no list of modules of one class",
        )
    return found


def list_names(model: nn.Module) -> list[str]:
    """Names of the lists that hold the blocks found without a pattern."""
    names = [name.rpartition(".")[0] for name, _ in _found(model, "")]
    return list(dict.fromkeys(names))


def _found(module: nn.Module, name: str, *, can_descend: bool = True) -> Iterator[tuple[str, nn.Module]]:
    members = _members_of_one_class(module)
    inner = {
        key: list(_found(child, _joined(name, key), can_descend=can_descend and key not in members))
        for key, child in module.named_children()
    }
    descends = can_descend and _differ_in_shapes(members) and all(inner[key] for key in members)
    for key, child in module.named_children():
        if key in members and not descends:
            yield _joined(name, key), child
        else:
            yield from inner[key]


def _members_of_one_class(module: nn.Module) -> Blocks:
    """Members of a list that share their class with another member and have submodules."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return {}
    found = {key: one for key, one in module.named_children() if any(one.children()) and _has_parameters(one)}
    counts = Counter(type(one) for one in found.values())
    return {key: one for key, one in found.items() if counts[type(one)] > 1}


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _differ_in_shapes(members: Blocks) -> bool:
    shapes = {tuple(tuple(one.shape) for one in member.parameters()) for member in members.values()}
    return len(shapes) > 1


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
