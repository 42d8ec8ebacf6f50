"""`meshwright schema` describes what a run file may say."""

import json
from typing import Any

import pytest

from meshwright.cli.main import run
from meshwright.cli.schema import run_schema
from meshwright.spec import RunSpec
from meshwright.spec.violations import all_keys


def test_it_prints_one_json_document(capsys: pytest.CaptureFixture[str]):
    assert run(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == run_schema()


def test_every_key_is_in_it():
    document = run_schema()
    for dotted in all_keys(RunSpec):
        assert _find(document, dotted.split(".")), dotted


def test_what_the_text_form_accepts_besides():
    document = run_schema()
    assert {"type": "string"} in document["properties"]["model"]["anyOf"]
    assert document["properties"]["recipe"]["type"] == "string"
    assert [option["type"] for option in document["properties"]["seed"]["anyOf"]] == ["integer", "string"]
    assert "required" not in json.dumps(document)


def test_keys_carry_their_meaning():
    zero = run_schema()["$defs"]["ParallelSpec"]["properties"]["zero"]
    assert zero["description"].startswith("ZeRO stage, what dp_shard x cp shards")
    assert zero["anyOf"][0] == {"minimum": 0, "maximum": 3, "type": "integer"}


def _find(document: dict[str, Any], keys: list[str]) -> bool:
    node = document
    for key in keys:
        node = _spec(document, node)["properties"].get(key)
        if node is None:
            return False
    return True


def _spec(document: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    options = [node, *node.get("anyOf", []), node.get("items", {})]  # the entries of a list have keys too
    reference = next((option["$ref"] for option in options if "$ref" in option), None)
    return document["$defs"][reference.rsplit("/", 1)[-1]] if reference else node
