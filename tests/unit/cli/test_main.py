"""Exit codes, error texts, lazy verbs."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from meshwright.cli import main
from meshwright.errors import MeshwrightError, PlanError, RunError, SpecError, SpecErrors

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """Make `meshwright schema` raise what the test says."""

    def install(error: BaseException) -> int:
        def schema() -> None:
            raise error

        monkeypatch.setattr("meshwright.cli.schema.schema", schema)
        return main.run(["schema"])

    return install


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError("a fact", where="a.b", hint="a hint"), 2),
        (PlanError("it does not fit"), 3),
        (RunError("a rank died"), 4),
        (KeyboardInterrupt(), 130),
        (typer.Abort(), 130),
        (typer.Exit(0), 0),
        (typer.Exit(3), 3),
        (SystemExit(4), 4),
        (SystemExit(), 0),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 2),
        (ModuleNotFoundError("No module named 'torch.distributed'", name="torch.distributed"), 2),
        (ModuleNotFoundError("No module named 'meshwright.nothing'", name="meshwright.nothing"), 70),
        (KeyError("x"), 70),
        (PermissionError(errno.EACCES, "Permission denied", "/root/x"), 2),
        (FileNotFoundError("of our own making"), 70),
        (OSError(errno.EIO, "disk"), 70),
        (OSError(errno.ENOSPC, "No space left on device"), 2),
        (OSError(errno.EROFS, "Read-only file system", "/x"), 2),
        (RecursionError(), 70),
    ],
    ids=repr,
)
def test_exit_codes(failing, error: BaseException, code: int, capsys: Captured):
    assert failing(error) == code
    assert "Traceback" not in capsys.readouterr().err


def test_fact_where_and_hint_go_to_stderr(failing, capsys: Captured):
    failing(SpecError("a fact", where="run.yaml:3 a.b", hint="do this"))
    captured = capsys.readouterr()
    assert captured.err == "error: a fact\n  where: run.yaml:3 a.b\n  hint:  do this\n"
    assert captured.out == ""


def test_an_interrupt_and_a_full_disk_are_reported(failing, capsys: Captured):
    failing(KeyboardInterrupt())
    assert capsys.readouterr().err == "interrupted\n"
    failing(OSError(errno.ENOSPC, "No space left on device"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["error: No space left on device", "  where: standard output"]
    assert lines[2].startswith("  hint:  ")


def test_several_errors_are_counted(capsys: Captured):
    error = SpecErrors([SpecError("one"), SpecError("two", hint="do")])
    assert main.show_error(error) == "2 things are wrong\n\nerror: one\n\nerror: two\n  hint:  do"
    assert main.show_error(MeshwrightError("one")) == "error: one"


def test_a_fault_of_ours_is_one_line_and_a_file(failing, capsys: Captured):
    failing(KeyError("lost"))
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    file = Path(text.rsplit(" ", 1)[-1].rstrip(")\n"))
    assert "KeyError: 'lost'" in file.read_text()
    file.unlink()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["chec"], "Did you mean 'check'"),
        (["check", "--jsn", "demo"], "--json"),
        (["check"], "Missing argument"),
        (["--nonsense"], "No such option"),
        (["nothing-like-it"], "No such command"),
    ],
)
def test_wrong_arguments_exit_2_with_the_nearest(arguments: list[str], text: str, capsys: Captured):
    assert main.run(arguments) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert "--help` shows" in captured.err
    assert captured.out == ""


def test_a_group_alone_is_help(capsys: Captured):
    assert main.run(["show"]) == 2
    assert capsys.readouterr().err.startswith("Usage: meshwright show")


def test_nothing_at_all_is_help(capsys: Captured):
    assert main.run([]) == 0
    assert "Verbs:" in capsys.readouterr().out


def test_every_verb_in_the_table_loads_and_has_help(capsys: Captured):
    for verb in main.VERBS:
        assert main.run([verb, "--help"]) == 0
        assert f"meshwright {verb}" in capsys.readouterr().out


def test_every_verb_has_its_module_and_every_module_its_verb():
    modules = {file.stem for file in Path(main.__file__).parent.glob("*.py")}
    modules = {name if name.startswith("_") else name.rstrip("_") for name in modules}  # import_.py
    # A verb with much to print has further modules, such as plan_verify.py.
    parts = {name for name in modules if name.partition("_")[0] in main.VERBS and name not in main.VERBS}
    assert modules - {"__init__", "main"} - parts == set(main.VERBS)


def test_help_imports_neither_verbs_nor_specs():
    code = (
        "import sys; from meshwright.cli.main import run; run(['--help']);"
        "heavy = {'torch', 'numpy', 'pydantic', 'rich', 'yaml', 'meshwright.spec', 'meshwright.cli.check'};"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", ["schema", "plan llama-3.2-1b --on h100:1 2>/dev/null"])
def test_a_reader_that_has_gone_is_no_error(arguments: str):
    command = f"{sys.executable} -m meshwright {arguments} | head -c 10"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) == 10


def test_a_deleted_current_directory_is_named(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main.run(["check", "demo"]) == 2
    assert "the current directory no longer exists" in capsys.readouterr().err
