"""The torch-free verbs, run with the packages of `pip install meshwright` and no others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.without_torch import base_packages, link_packages

ROOT = Path(__file__).parents[3]
VERBS = {
    "help": ["--help"],
    "version": ["--version"],
    "check": ["check", "demo"],
    "check with origins": ["check", "llama-3.1-8b-8gpu", "--origins"],
    "schema": ["schema"],
    "launch": ["launch", "llama-3.1-8b-8gpu", "--site", "leonardo"],
    "import": ["import", "tests/data/configs/zero3_fp16.json", "--onto", "llama-3.1-8b-8gpu"],
    "export": ["export", "llama-3.1-8b-8gpu", "--to", "deepspeed"],
    "env": ["env", "--json"],
    "models": ["models", "list"],
    "hardware": ["hardware", "list"],
    "show schedule": ["show", "schedule"],
}
MODULES = {file.stem.rstrip("_") for file in (ROOT / "src/meshwright/cli").glob("*.py")}
# Runs each command line in one process and says what each gave; torch must not have come in.
DRIVER = """
import contextlib, io, json, sys
from meshwright.cli.main import run
results = {}
for name, arguments in json.loads(sys.argv[1]).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    results[name] = {"code": code, "out": out.getvalue(), "err": err.getvalue()}
json.dump({"results": results, "torch": "torch" in sys.modules}, sys.stdout)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("packages")
    link_packages(folder)
    run_dir = tmp_path_factory.mktemp("runs") / "demo"
    verbs = {name: line for name, line in VERBS.items() if exists(line[0])}
    verbs["launch"] = [*verbs["launch"], "-o", str(run_dir / "launch")]
    verbs["train"] = ["train", "demo", "parallel.dp_replicate=1", "--dir", str(run_dir)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{folder}", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", DRIVER, json.dumps(verbs)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert not document["torch"]
    return document["results"]


def exists(verb: str) -> bool:
    """Whether the verb is there; options are."""
    return verb.startswith("-") or verb in MODULES


def test_the_base_requirements_hold_no_torch():
    assert {"pydantic", "typer", "pydantic-core"} <= {name.replace("_", "-") for name in base_packages()}
    assert "torch" not in base_packages()


@pytest.mark.parametrize("name", VERBS)
def test_a_torch_free_verb_works(results: dict[str, dict[str, object]], name: str):
    if not exists(VERBS[name][0]):
        pytest.skip(f"there is no verb {name} yet")
    assert results[name]["code"] == 0, results[name]["err"]
    assert results[name]["out"]


def test_env_says_what_it_cannot_know(results: dict[str, dict[str, object]]):
    facts = json.loads(str(results["env"]["out"]))
    assert facts["accelerators"] is None
    assert facts["versions"]["torch"] == "not installed"


def test_a_verb_that_needs_torch_says_how_to_get_it(results: dict[str, dict[str, object]]):
    assert results["train"]["code"] == 2
    assert 'pip install "meshwright[train]"' in str(results["train"]["err"])
    assert "Traceback" not in str(results["train"]["err"])
