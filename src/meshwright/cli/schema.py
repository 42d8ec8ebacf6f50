"""`meshwright schema`: the JSON schema of a run file."""

import json
from typing import Any, cast

import typer

# Numbers as text: `4M`, `1_000`, `80GiB`.
_NUMBER_TEXT = {
    "type": "string",
    "pattern": r"^\s*[+-]?[0-9][0-9_,]*\.?[0-9]*([eE][+-]?[0-9]+)?\s*[a-zA-Z]*\s*$",
}
_ANNOTATIONS = ("title", "description", "default")


def schema() -> None:
    """Print the JSON schema of a run file, which editors use to complete and check it.

    Save it with `meshwright schema > run.schema.json` and write this as the first line of a run file:

    # yaml-language-server: $schema=run.schema.json
    """
    typer.echo(json.dumps(run_schema(), indent=2))


def run_schema() -> dict[str, Any]:
    """The schema of `RunSpec`, widened by what a run file may contain besides.

    A number may be text (`4M`), the model may be a name, and no key is required, since a recipe may set it.
    """
    from meshwright.spec.families import FAMILIES
    from meshwright.spec.run import RunSpec

    document = _widened(RunSpec.model_json_schema(mode="validation"))
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    properties = document["properties"]
    properties["model"] = {
        "description": "A family, a Hugging Face folder or config.json, or a mapping that may name a family.",
        "anyOf": [{"enum": list(FAMILIES)}, {"type": "string"}, {"$ref": "#/$defs/ModelSpec"}],
    }
    properties["recipe"] = {
        "description": "The name of a recipe, or another run file; this file overrides its values.",
        "type": "string",
    }
    return document


def _widened(node: Any) -> Any:
    """The same schema with numbers as text allowed and nothing required."""
    if isinstance(node, list):
        return [_widened(item) for item in cast(list[Any], node)]
    if not isinstance(node, dict):
        return node
    fields = cast(dict[str, Any], node)
    changed = {key: _widened(value) for key, value in fields.items() if key != "required"}
    if changed.get("type") not in ("integer", "number"):
        return changed
    outside = {key: changed.pop(key) for key in _ANNOTATIONS if key in changed}
    return {**outside, "anyOf": [changed, _NUMBER_TEXT]}
