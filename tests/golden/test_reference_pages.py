"""The generated pages of docs/reference are what the program says today."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    found = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["cli.md", "python.md", "run.md"])
def test_a_committed_page_is_up_to_date(generate: ModuleType, name: str):
    committed = (DOCS / "reference" / name).read_text()
    assert generate.pages()[name] == committed, "run `python docs/generate.py` and read the difference"


def test_every_key_says_what_it_means(generate: ModuleType):
    rows = [
        line
        for line in generate.run_page().splitlines()
        if line.startswith("| `") and "| mapping |" not in line
    ]
    silent = [row for row in rows if row.endswith("|  |")]
    assert rows and not silent


def test_inner_verbs_are_found(generate: ModuleType):
    assert "schedule" in generate.inner_verbs("show")
    assert generate.inner_verbs("check") == []


def test_guides_show_the_examples_as_they_are(generate: ModuleType):
    shown = generate.guides_with_examples()
    assert all(page.read_text() == text for page, text in shown.items()), "run `python docs/generate.py`"
    examples = {path.name for path in (DOCS.parent / "examples").glob("*.py")}
    assert {
        name for text in shown.values() for name in examples if f"<!-- examples/{name} -->" in text
    } == examples
