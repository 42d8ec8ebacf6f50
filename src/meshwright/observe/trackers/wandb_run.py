"""A run in Weights & Biases. The package reads `WANDB_MODE`, `WANDB_API_KEY`, `WANDB_BASE_URL` itself."""

import importlib
import secrets
from collections.abc import Sequence
from typing import Any

from meshwright.observe.trackers.tracker import Ending, Row, TrackedRun
from meshwright.spec.observe import WandbSpec


class WandbRun:
    """Continues the run of `run_id`, or starts one; its files are in `<run>/wandb`."""

    def __init__(self, spec: WandbSpec, run: TrackedRun, run_id: str | None) -> None:
        wandb: Any = importlib.import_module("wandb")
        self.run_id = run_id or secrets.token_hex(4)
        self._run: Any = wandb.init(
            project=spec.project,
            entity=spec.entity,
            id=self.run_id,
            name=run.name,
            dir=str(run.run_dir),
            resume="allow",
            config={**run.settings, **{f"system.{name}": value for name, value in run.facts.items()}},
            # The terminal is the run's own.
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, rows: Sequence[Row]) -> None:
        """Hand the scalars to the process of W&B, which sends them."""
        for row in rows:
            self._run.log(dict(row.scalars), step=row.step)

    def close(self, ending: Ending) -> None:
        """Write the outcome, and wait until everything is sent or on disk."""
        self._run.summary["outcome"] = ending
        self._run.finish(exit_code=1 if ending == "failed" else 0)
