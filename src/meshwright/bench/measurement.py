"""One measurement: rows are logged as they are measured, then printed, written to a folder, or both."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import torch

from meshwright.bench.machine_facts import machine_facts, sampled_clock
from meshwright.bench.measurement_report import KIND_OF, log_rows, prepare_folder, write_folder
from meshwright.bench.probe import catalogue_name
from meshwright.errors import SpecError
from meshwright.hardware import Device, find_device


class Measurement:
    """A context in which sections of rows are measured; on exit without error the results are written."""

    def __init__(
        self,
        bench: str,
        device: torch.device,
        *,
        log: Callable[[str], None],
        as_json: bool,
        output: Path | None,
    ) -> None:
        self.device, self.log = device, log
        self.sections: dict[str, list[dict[str, Any]]] = {}
        self._bench, self._as_json, self._output = bench, as_json, output
        if output is not None:
            prepare_folder(output)
        self._facts = machine_facts(device)
        self._sampling = sampled_clock(device)

    def section(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        """Measure the rows of one section and log each of them."""
        self.sections[name] = log_rows(KIND_OF[name], rows, self.log)

    def __enter__(self) -> Self:
        self.log(f"{self._facts['device']}, torch {self._facts['torch']}")
        self._clock = self._sampling.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Print and write the results, unless there was an error."""
        self._sampling.__exit__(kind, error, trace)
        if kind is None:
            self._finish()

    def _finish(self) -> None:
        document = {"bench": self._bench, **self._facts, **self._clock, "sections": self.sections}
        if self._as_json:
            print(json.dumps(document))
        if self._output is not None:
            written = write_folder(self._output, self._bench, document, self._catalogued())
            self.log("written: " + ", ".join(map(str, written)))

    def _catalogued(self) -> Device | None:
        """The catalogue's entry of the device, for the planner's tile model; None for an unknown device."""
        if self.device.type != "cuda":
            return None
        try:
            return find_device(catalogue_name(self._facts["device"], self.device))
        except SpecError:
            return None
