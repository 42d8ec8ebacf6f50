"""Files around the package that must agree with each other: checks, workflows, versions, templates."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import meshwright

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github/workflows/ci.yml"
ISSUE_FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def make_check_commands() -> list[str]:
    """The commands of `make check`, with the virtual environment's folder written out."""
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", makefile, flags=re.MULTILINE)
    assert recipe is not None
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]


def test_pre_commit_runs_what_make_check_runs():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert [hook["entry"] for hook in hooks] == make_check_commands()
    for hook in hooks:  # on the whole tree, as `make check` does, not on the staged files
        assert (hook["language"], hook["pass_filenames"], hook["always_run"]) == ("system", False, True)


def test_the_workflow_runs_the_ci_script_and_checks_every_python():
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert commands == {"check": ["make check PYTHON=python"], "suite": [".ci/run"]}
    pythons = jobs["check"]["strategy"]["matrix"]["python"]
    assert pythons == ["3.11", "3.12", "3.13"]
    assert f"Python {', '.join(pythons)}" in (ROOT / "README.md").read_text()
    assert f"| Python | {', '.join(pythons)} |" in (ROOT / "docs/policy.md").read_text()


@pytest.mark.parametrize("form", ISSUE_FORMS, ids=lambda path: path.stem)
def test_issue_forms_are_complete(form: Path):
    content = yaml.safe_load(form.read_text())
    if form.stem == "config":
        assert set(content) == {"blank_issues_enabled"}
        return
    assert {"name", "description", "body"} <= set(content)
    ids = [part["id"] for part in content["body"]]
    assert len(ids) == len(set(ids))
    for part in content["body"]:
        assert part["type"] in ("input", "textarea", "dropdown", "checkboxes")
        assert part["attributes"]["label"]


def test_all_files_name_the_same_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project["version"] == meshwright.__version__ == citation["version"]
    assert project["license"] == citation["license"]


def test_every_requirement_is_pinned_in_the_constraints():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [one for extra in project["optional-dependencies"].values() for one in extra]
    wanted = {re.split(r"[\[<>=; ]", one)[0].lower() for one in [*project["dependencies"], *extras]}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if "==" in line}
    assert wanted - {"meshwright"} <= pinned


def test_the_dockerfile_copies_files_that_exist_and_installs_what_train_needs():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert not set(copied) & set(ignored)
    assert any(line.startswith("RUN pip install") and ".[train]" in line for line in lines)
    assert 'ENTRYPOINT ["meshwright"]' in lines
    base = next(line for line in lines if line.startswith("FROM "))
    assert base == "FROM python:3.12-slim"
