"""`meshwright data logprobs`: reference log-probs of a preference dataset, computed once."""

import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from meshwright.spec import RunSpec


def logprobs(run_file: str, overrides: list[str], *, force: bool, quiet: bool) -> None:
    """Compute on the run's mesh: on local ranks, or as one of the ranks that a launcher started."""
    from meshwright.errors import SpecError
    from meshwright.launch.launched import launched_rank
    from meshwright.launch.local import run_local
    from meshwright.spec.text import read_run

    run = read_run(run_file, overrides).require_valid()
    if run.preference is None or not run.preference.has_reference:
        fact = "the run has no preference loss with a reference"
        raise SpecError(fact, where="preference", hint="set preference: {loss: sigmoid} or {loss: ipo}")
    if launched_rank() is not None or run.parallel.num_ranks == 1:
        _store_here(run, force=force, quiet=quiet)
        return
    flags = [name for name, is_set in {"--force": force, "--quiet": quiet}.items() if is_set]
    command = ["data", "logprobs", run_file, *overrides, *flags]
    sys.exit(run_local(command, num_ranks=run.parallel.num_ranks))


def _store_here(run: "RunSpec", *, force: bool, quiet: bool) -> None:
    """Compute as one rank; rank 0 prints."""
    from meshwright.cli.evaluate_as_rank import as_rank
    from meshwright.train.store_log_probs import store_log_probs

    def progress(done: int, total: int) -> None:
        if not quiet:
            print(f"{done:,} of {total:,} sequences", file=sys.stderr)

    count = as_rank(run.device, lambda: store_log_probs(run, force=force, progress=progress))
    if count is not None:
        what = f"the reference log-probs of {count:,} pairs"
        typer.echo(f"{run.data.path} has {what}; a run reads them with preference.reference=dataset")
