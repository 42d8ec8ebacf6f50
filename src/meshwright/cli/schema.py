"""`meshwright schema`: the JSON schema of a run file."""

import json
from typing import Any

import typer


def schema() -> None:
    """Print the JSON schema of a run file, which editors use to complete and check it.

    Save it with `meshwright schema > run.schema.json` and write this as the first line of a run file:

    # yaml-language-server: $schema=run.schema.json
    """
    typer.echo(json.dumps(run_schema(), indent=2))


def run_schema() -> dict[str, Any]:
    """The schema of `RunSpec`, loosened by what the text form accepts besides."""
    from meshwright.spec.run import RunSpec

    return RunSpec.model_json_schema(mode="validation")
