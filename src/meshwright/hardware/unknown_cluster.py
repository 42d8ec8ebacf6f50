"""The error for a text of --on that names no cluster and no device."""

import difflib
from collections.abc import Sequence

from meshwright.errors import SpecError


def unknown_cluster(text: str, *, clusters: Sequence[str], devices: Sequence[str]) -> SpecError:
    """What is wrong with `text`: the count behind the colon, the kind of file, or the name."""
    if text.endswith((".yaml", ".yml", ".json")):
        fact = f"{text!r} describes no cluster: clusters are described in TOML"
        return SpecError(fact, where="--on", hint="`meshwright hardware new` writes such a file")
    name, colon, count = text.lower().partition(":")
    if colon and name in (*clusters, *devices):
        unit = "nodes" if name in clusters else "devices"
        hint = f"write {name}:8 ({unit}) or {name}:4x2 (2 nodes of 4)"
        return SpecError(f"{count!r} is not a number of {unit}", where="--on", hint=hint)
    known = [*clusters, *devices]
    near = difflib.get_close_matches(" ".join(name.split()), known, n=1, cutoff=0.4)
    hint = (f"did you mean {near[0]!r}? " if near else "") + f"known: {', '.join(known)}"
    return SpecError(f"unknown cluster or device {text!r}", where="--on", hint=hint)
