"""`meshwright demo`: train a small model on generated text, here and now."""

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.check import run_directory
from meshwright.errors import EXIT_DONE, EXIT_INPUT, EXIT_INTERRUPTED, EXIT_NO_FIT, RunError

if TYPE_CHECKING:
    from meshwright.hardware.machine import Accelerator, Machine
    from meshwright.plan.search.local import LocalDecision
    from meshwright.spec import RunSpec

RECIPE = "demo"
PROMPT = "It was a sunny morning in"
SAMPLE_TOKENS = 240
SAMPLE_TEMPERATURE = 0.5


def demo(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Values that override the demo's run, such as schedule.num_steps=40."
        ),
    ] = None,
    directory: Annotated[
        Path,
        typer.Option(
            "--dir",
            parser=run_directory,
            metavar="DIR",
            help="The run directory; that of an earlier run is renamed first.",
        ),
    ] = Path("runs") / RECIPE,
) -> None:
    """Train a small model on generated text, here and now.

    Chooses the number of ranks, the precision and the micro-batch for this machine, and prints why.
    Trains a byte-level Llama on generated stories, stops half-way, resumes from the checkpoint, samples
    text from the trained model, and writes the report. Nothing is downloaded.
    """
    from meshwright.spec.text import find_run_file, load_run

    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("torch", name="torch")  # printed with how to install it
    _require_own_directory(directory)
    started_at = time.monotonic()
    recipe = str(find_run_file(RECIPE))
    machine, decision = _decide(load_run(recipe, overrides or []))
    settings = [*decision.overrides(), *(overrides or [])]
    run = load_run(recipe, settings)
    _print_decision(run, machine, decision)
    _move_aside(directory)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, machine.cores // run.parallel.num_ranks)))
    _train(["train", recipe, *settings, "--dir", str(directory)], run, directory)
    _sample(directory)
    _finish(directory, time.monotonic() - started_at)


def print_line(text: str = "") -> None:
    """Print one line on stdout, unbuffered: the ranks print on stderr in between."""
    print(text, flush=True)


def _decide(run: "RunSpec") -> "tuple[Machine, LocalDecision]":
    from meshwright.hardware.machine import this_machine
    from meshwright.plan.search.local import decide_local

    machine = this_machine(_accelerators())
    return machine, decide_local(run, machine)


def _accelerators() -> "tuple[Accelerator, ...]":
    """CUDA devices; torch, slow to import, is imported only where there is a driver."""
    if not Path("/proc/driver/nvidia").exists():
        return ()
    import torch

    from meshwright.hardware.machine import Accelerator

    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Accelerator(each.name, each.total_memory, (each.major, each.minor)) for each in found)


def _print_decision(run: "RunSpec", machine: "Machine", decision: "LocalDecision") -> None:
    from meshwright.spec.parameters import num_parameters
    from meshwright.units import show_bytes, show_count

    devices = (
        f", {len(machine.accelerators)} x {machine.accelerators[0].name}" if machine.accelerators else ""
    )
    cores = f"{machine.cores} core{'s' * (machine.cores > 1)}"
    print_line(f"This machine: {cores}, {show_bytes(machine.free_memory_bytes)} free memory{devices}")
    print_line(
        f"The model:    {show_count(num_parameters(run.model))} parameters, {run.model.num_layers} layers of "
        f"width {run.model.width}; {run.schedule.num_steps} steps of {run.data.batch_sequences} sequences of "
        f"{run.data.sequence_length} bytes"
    )
    print_line("Decided:")
    print_line(f"  ranks        {decision.num_ranks:<5} {decision.reasons['ranks']}")
    print_line(f"  precision    {decision.compute:<5} {decision.reasons['precision']}")
    print_line(f"  micro-batch  {decision.microbatch_sequences:<5} {decision.reasons['microbatch']}")
    print_line()


def _require_own_directory(directory: Path) -> None:
    """Refuse a directory that holds something other than a run: it would be renamed."""
    from meshwright.errors import SpecError

    holds_run = (directory / "run.yaml").is_file()
    is_other = directory.is_dir() and not holds_run and any(directory.iterdir())
    if is_other or (directory.exists() and not directory.is_dir()) or directory.resolve() == Path.cwd():
        raise SpecError(
            "this exists and is no directory of a run", where=str(directory), hint="name a new one with --dir"
        )


def _move_aside(directory: Path) -> None:
    """Rename the directory of an earlier demo: two runs never share a directory."""
    if not directory.exists():
        return
    number = next(n for n in range(1, 10**6) if not directory.with_name(f"{directory.name}-{n}").exists())
    renamed = directory.with_name(f"{directory.name}-{number}")
    directory.rename(renamed)
    print_line(f"{directory} already existed; it is now {renamed}\n")


def _train(arguments: list[str], run: "RunSpec", directory: Path) -> None:
    """Train half of the run, stop, and resume from the checkpoint."""
    middle = run.schedule.num_steps // 2
    print_line(f"Training into {directory}, first to step {middle}:")
    _start([*arguments, "--stop-after", str(middle)], run, directory)
    print_line("\nThe same command again:")
    _start(arguments, run, directory)


def _start(arguments: list[str], run: "RunSpec", directory: Path) -> None:
    from meshwright.train.supervise import run_ranks

    code = run_ranks(run, arguments, directory)
    if code in (EXIT_INTERRUPTED, EXIT_INPUT, EXIT_NO_FIT):  # the ranks have printed why
        sys.exit(code)
    if code != EXIT_DONE:
        hint = f"the events are in {directory}; `meshwright report {directory}` shows them"
        raise RunError(f"training ended with exit code {code}", where=str(directory), hint=hint)


def _sample(directory: Path) -> None:
    from meshwright.checkpoint.weights import open_weights
    from meshwright.data.chat.prompt import text_prompt
    from meshwright.observe.run_files import SAMPLE_NAME
    from meshwright.train.sample import Sampling, choose_tokenizer, limit_threads, sample_text

    weights = open_weights(directory)
    limit_threads(weights)
    sampling = Sampling(num_tokens=SAMPLE_TOKENS, temperature=SAMPLE_TEMPERATURE)
    tokenizer = choose_tokenizer(weights, None)
    text = PROMPT + sample_text(weights, tokenizer, text_prompt(tokenizer, PROMPT), sampling)
    (directory / SAMPLE_NAME).write_text(text + "\n")
    print_line(f'\nThe model writes, after "{PROMPT}":\n\n  ' + text.replace("\n", "\n  ") + "\n")


def _finish(directory: Path, seconds: float) -> None:
    from meshwright.observe.run_report import write_report

    report, figures = write_report(directory)
    if figures.eval_loss is not None and figures.unigram_entropy is not None:
        print_line(
            f"Held-out loss {figures.eval_loss:.3f} nats per byte; without context the best possible is "
            f"{figures.unigram_entropy:.3f}, the corpus' unigram entropy."
        )
    print_line(f"Report: {report} ({seconds:.0f} s in all)")
