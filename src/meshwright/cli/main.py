"""The `meshwright` command: finds the verb, runs it, and turns errors into text and exit codes.

A verb is one line in VERBS and the module of the same name in this folder. The module has either an `app`
(a typer app with verbs of its own) or a function of the verb's name; where the verb is a keyword of Python,
module and function end in an underscore. `--help` reads only this table, and only the module of the verb in
use is imported.
"""

import errno
import importlib
import keyword
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.completion import completion_init
from typer.core import TyperGroup
from typer.main import get_command

import meshwright
from meshwright.errors import (
    EXIT_DONE,
    EXIT_FAULT,
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    MeshwrightError,
    SpecErrors,
)

VERBS = {
    "plan": "Decide how to train a model on a cluster, and explain why.",
    "predict": "Predict memory, step time and MFU of a run file on a cluster.",
    "check": "List everything that is wrong with a run file, and what wastes the hardware.",
    "rehearse": "Trace a rank of the full run on this machine, then prove the run on local ranks.",
    "train": "Run a run file: starts local ranks, or joins those that a launcher started.",
    "profile": "Profile the step of a run file, and say what would make it faster.",
    "launch": "Write, and submit, what SLURM, MPI, torchrun, Kubernetes and others need to start a run.",
    "demo": "Train a small model on generated text, here and now.",
    "evaluate": "Compute the loss of a trained model on a dataset.",
    "sample": "Print text that a trained model writes after a prompt.",
    "compare": "Compare two runs' losses, gradient norms and weights.",
    "watch": "Show runs in the browser while they go on.",
    "report": "Write one HTML file about a run.",
    "import": "Read a config file of Accelerate, DeepSpeed, torchtitan or Megatron-LM into a run file.",
    "export": "Write a run file as an Accelerate or DeepSpeed config file.",
    "convert": "Convert checkpoints to and from Hugging Face safetensors.",
    "data": "Tokenize, inspect and verify datasets.",
    "models": "List the model families.",
    "show": "Draw a pipeline timeline, a rank map or memory.",
    "bench": "Measure this machine.",
    "hardware": "List known devices and clusters, describe your own, and measure this machine.",
    "env": "Print versions, cores, memory and accelerators of this machine.",
    "schema": "Print the JSON schema of a run file, for editors.",
    "completion": "Print the completion script of a shell.",
}
COMPLETE_VARIABLE = "_MESHWRIGHT_COMPLETE"
# Installed by `pip install "meshwright[train]"` only.
TRAIN_PACKAGES = ("torch", "safetensors", "tokenizers", "tensorboard")
# Errors of a path that the user named; other errors of the operating system are reported as faults.
_PATH_ERRORS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
_PATH_ERROR_CODES = {errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP}
_DISK_FULL_CODES = {errno.ENOSPC, errno.EDQUOT}
# Some releases of typer bundle their own click; this is the error class that typer raises.
UsageError: type[Any] = typer.BadParameter.__bases__[0]


class _Commands(Mapping[str, Any]):
    """Verb -> command; looking one up imports its module, listing the names imports nothing."""

    def __getitem__(self, verb: str) -> Any:
        if verb not in VERBS:
            raise KeyError(verb)
        name = f"{verb}_" if keyword.iskeyword(verb) else verb
        module = importlib.import_module(f"meshwright.cli.{name}")
        app: typer.Typer | None = getattr(module, "app", None)
        if app is None:
            app = new_app()
            app.command(verb)(getattr(module, name))
        command = get_command(app)
        command.name = verb
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


class _Stopped(Exception):
    """Carries an interrupt or a closed pipe past typer, which would turn it into a silent exit code."""


class _Verbs(TyperGroup):
    """The verbs of VERBS, with help that reads only that table."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = _Commands()

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, BrokenPipeError) as error:
            raise _Stopped from error

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, VERBS[verb]) for verb in self.commands])


def new_app(**options: Any) -> typer.Typer:
    """A typer app with this program's defaults: plain help, no tracebacks of its own."""
    defaults: dict[str, Any] = {
        "add_completion": False,
        "rich_markup_mode": None,
        "pretty_exceptions_enable": False,
        "no_args_is_help": True,
        "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 100},
    }
    return typer.Typer(**{**defaults, **options})


app = new_app(cls=_Verbs)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"meshwright {meshwright.__version__}")
        raise typer.Exit(EXIT_DONE)


@app.callback()
def meshwright_(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop."),
    ] = False,
) -> None:
    """Decides how to train your model on the GPUs you have, proves it, and then trains.

    Data goes to stdout, messages to stderr. Exit codes: 0 done, 2 the input is wrong, 3 it does not fit,
    4 a run failed, 70 a fault of ours, 93 restarts without progress, 130 interrupted. `meshwright VERB
    --help` explains a verb.
    """


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line, report errors on stderr, and return the exit code."""
    try:
        if COMPLETE_VARIABLE in os.environ:  # set by the script that `completion` prints
            completion_init()
        result = get_command(app).main(
            list(arguments) or ["--help"], prog_name="meshwright", standalone_mode=False
        )
        sys.stdout.flush()
    except BaseException as error:
        return report_error(error)
    return result if isinstance(result, int) else EXIT_DONE


def report_error(error: BaseException) -> int:
    """Print what happened on stderr and return the exit code."""
    if isinstance(error, _Stopped) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        return EXIT_DONE  # rich wrote to a pipe whose reader has gone
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else EXIT_DONE
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return _fail("interrupted", EXIT_INTERRUPTED)
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        # The reader (`| head`) has gone: nothing is left to print, nor to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    if isinstance(error, OSError) and _is_path_error(error):
        return _fail(_show_path_error(error), EXIT_INPUT)
    if isinstance(error, MeshwrightError):
        return _fail(show_error(error), error.exit_code)
    if isinstance(error, UsageError):
        return _fail(_show_usage_error(error), EXIT_INPUT)
    if isinstance(error, ModuleNotFoundError) and _package(error) in TRAIN_PACKAGES:
        return _fail(_show_missing_package(_package(error)), EXIT_INPUT)
    return _fail(_show_fault(error), EXIT_FAULT)


def _fail(text: str, exit_code: int) -> int:
    """Print the text on stderr and return the exit code."""
    print(text, file=sys.stderr)
    return exit_code


def show_error(error: MeshwrightError) -> str:
    """Fact, where and hint of one error or of several, as plain text."""
    violations = error.violations if isinstance(error, SpecErrors) else [error]
    shown = [_show_parts(each) for each in violations]
    count = [f"{len(shown)} things are wrong"] if len(shown) > 1 else []
    return "\n\n".join(count + shown)


def _show_parts(error: MeshwrightError) -> str:
    where = f"\n  where: {error.where}" if error.where else ""
    hint = f"\n  hint:  {error.hint}" if error.hint else ""
    return f"error: {error.fact}{where}{hint}"


def _show_usage_error(error: Any) -> str:
    if type(error).__name__ == "NoArgsIsHelpError":  # a group of verbs, and none of them was named
        return error.format_message()
    path = error.ctx.command_path if error.ctx else "meshwright"
    verbs = list(getattr(error.ctx.command, "commands", ())) if error.ctx and error.ctx.parent else []
    hint = f"use {', '.join(verbs)}" if verbs else f"`{path} --help` shows what it takes"
    return f"error: {error.format_message()}\n  where: {path}\n  hint:  {hint}"


def _is_path_error(error: OSError) -> bool:
    is_named = error.filename is not None and (
        isinstance(error, _PATH_ERRORS) or error.errno in _PATH_ERROR_CODES
    )
    return is_named or _has_no_directory(error) or error.errno in _DISK_FULL_CODES


def _has_no_directory(error: OSError) -> bool:
    """Whether the current directory was deleted: the system then names no file."""
    return error.errno == errno.ENOENT and error.filename is None


def _show_path_error(error: OSError) -> str:
    if _has_no_directory(error):
        return "error: the current directory no longer exists\n  where: .\n  hint:  change to another one"
    hint = "\n  hint:  free disk space, or write somewhere else" if error.errno in _DISK_FULL_CODES else ""
    return f"error: {error.strerror}\n  where: {error.filename or 'standard output'}{hint}"


def _package(error: ModuleNotFoundError) -> str:
    return (error.name or "").split(".")[0]


def _show_missing_package(package: str) -> str:
    return (
        f'error: this verb needs {package}, which is not installed\n  hint:  pip install "meshwright[train]"'
    )


def _show_fault(error: BaseException) -> str:
    with tempfile.NamedTemporaryFile("w", prefix="meshwright-fault-", suffix=".txt", delete=False) as file:
        file.write("".join(traceback.format_exception(error)))
    first_line = (str(error).splitlines() or [""])[0]
    return f"fault: {type(error).__name__}: {first_line} (a fault of ours; the traceback is in {file.name})"
