"""What each recipe resolves to, value by value."""

import pytest
from tests.support.golden_files import FOLDER, assert_golden

from meshwright.spec.text import dump_run, load_run, recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_a_resolved_recipe(name: str):
    resolved = dump_run(load_run(name))
    assert_golden(f"recipes/{name}.yaml", "".join(resolved.splitlines(keepends=True)[1:]))


def test_no_golden_file_is_left_of_a_recipe_that_has_gone():
    assert sorted(file.stem for file in (FOLDER / "recipes").glob("*.yaml")) == recipe_names()
