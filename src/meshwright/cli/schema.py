"""`meshwright schema`: the JSON schema of a run file."""

import json
from typing import Any, cast

import typer

# What a person may write for a number: `4M`, `1_000`, `80GiB`.
_HUMAN_NUMBER = {
    "type": "string",
    "pattern": r"^\s*[+-]?[0-9][0-9_,]*\.?[0-9]*([eE][+-]?[0-9]+)?\s*[a-zA-Z]*\s*$",
}
_KEPT_OUTSIDE = ("title", "description", "default")


def schema() -> None:
    """Print the JSON schema of a run file, which editors use to complete and check it.

    Save it with `meshwright schema > run.schema.json` and write this as the first line of a run file:

    # yaml-language-server: $schema=run.schema.json
    """
    typer.echo(json.dumps(run_schema(), indent=2))


def run_schema() -> dict[str, Any]:
    """The schema of `RunSpec`, loosened by what the text form accepts besides.

    Numbers may be text (`4M`), the model a name, and no key is required, since a recipe may say it.
    """
    from meshwright.spec.families import FAMILIES
    from meshwright.spec.run import RunSpec

    document = _loosened(RunSpec.model_json_schema(mode="validation"))
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    properties = document["properties"]
    properties["model"] = {
        "description": "A family, a Hugging Face folder or config.json, or a mapping that may name a family.",
        "anyOf": [{"enum": list(FAMILIES)}, {"type": "string"}, {"$ref": "#/$defs/ModelSpec"}],
    }
    properties["recipe"] = {
        "description": "A recipe's name or another run file; this file is laid over it.",
        "type": "string",
    }
    return document


def _loosened(node: Any) -> Any:
    """The same schema with human numbers allowed and nothing required."""
    if isinstance(node, list):
        return [_loosened(item) for item in cast(list[Any], node)]
    if not isinstance(node, dict):
        return node
    fields = cast(dict[str, Any], node)
    changed = {key: _loosened(value) for key, value in fields.items() if key != "required"}
    if changed.get("type") not in ("integer", "number"):
        return changed
    outside = {key: changed.pop(key) for key in _KEPT_OUTSIDE if key in changed}
    return {**outside, "anyOf": [changed, _HUMAN_NUMBER]}
