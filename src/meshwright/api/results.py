"""What `plan`, `predict` and `check` return: values with names, drawn by notebooks as tables and pictures."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.api import html
from meshwright.errors import SpecError
from meshwright.hardware.catalogue import Cluster
from meshwright.plan.draw.charts import Bar, stacked_bars
from meshwright.plan.draw.document import format_text, plan_document, run_file
from meshwright.plan.draw.memory import memory_chart
from meshwright.plan.draw.plan_report import report_html
from meshwright.plan.explain.failures import failure_sentences, with_checkpoints
from meshwright.plan.explain.gains import Gain, gains
from meshwright.plan.explain.neighbours import ITEM_NAMES, Neighbour, neighbours
from meshwright.plan.explain.reasons import explain
from meshwright.plan.explain.storage import checkpoint_sentences
from meshwright.plan.external import ExternalModel, module_runtime
from meshwright.plan.predict import Prediction
from meshwright.plan.search.candidate import Candidate, candidate_of, layout_text
from meshwright.plan.search.decision import Plan
from meshwright.plan.workload.formats import state_bytes
from meshwright.spec.advice import Advice
from meshwright.spec.run import RunSpec
from meshwright.units import show_bytes, show_count, show_range, show_seconds

LAYOUT_HEAD = ("", "layout", "step", "tokens/s/GPU", "MFU", "memory", "duration")


@dataclass(frozen=True)
class PlanResult:
    """The layouts that `plan` ranked, the chosen one first; `run` is the complete run of the choice."""

    plan: Plan
    tokens: int
    """Tokens of the whole run."""
    assumed: tuple[str, ...]
    """Values that were filled in, each with the setting that changes it."""
    external: ExternalModel | None = None
    """The traced model, where it is none of our families and is trained as a module."""
    finetune_reasons: tuple[str, ...] = ()
    """Why `finetune="auto"` chose its kind: what each kind before it would need."""

    @property
    def call(self) -> str | None:
        """The call of `meshwright.fit` that trains an external model; None for a model of ours."""
        return None if self.external is None else self.external.fit_text(self.run)

    @property
    def run(self) -> RunSpec:
        """The run of the chosen layout, as `train` takes it."""
        return with_checkpoints(self.plan)

    @property
    def best(self) -> Candidate:
        """The chosen layout with everything that is predicted about it."""
        return self.plan.best

    @property
    def top(self) -> tuple[Candidate, ...]:
        """The ranked layouts."""
        return self.plan.top

    @property
    def layout(self) -> str:
        """The chosen layout in one line: `dp_shard=8 zero=3 micro=2x32`."""
        return layout_text(self.run)

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of one step."""
        return self.best.step_seconds

    @cached_property
    def why(self) -> list[str]:
        """The reasons for the choice, one sentence for each technique."""
        return [*explain(self.plan), *checkpoint_sentences(self.plan.question), *failure_sentences(self.plan)]

    @cached_property
    def neighbours(self) -> list[Neighbour]:
        """The chosen layout with one setting changed, and what it would cost."""
        return list(neighbours(self.plan))

    @cached_property
    def gains(self) -> list[Gain]:
        """What changes of number formats would gain, if they were allowed."""
        return list(gains(self.plan)) if self.external is None else []

    def save(self, path: str | Path) -> Path:
        """Write the run file that `meshwright train` takes, with the reasons as comments."""
        self.require_run_file()
        Path(path).write_text(run_file(self.plan, [*self.finetune_reasons, *self.why]), encoding="utf-8")
        return Path(path)

    def require_run_file(self) -> None:
        """SpecError for an external model, which no run file can name."""
        if self.external is not None:
            fact = f"{self.external.name} is trained as a module: there is no run file of it"
            raise SpecError(fact, where="plan", hint=f"train it with {self.call}")

    def report(self, path: str | Path, *, price: float | None = None) -> Path:
        """Write the HTML report of `plan --report`; `price` is money per device-hour."""
        page = report_html(
            self.plan,
            tokens=self.tokens,
            why=[*self.finetune_reasons, *self.why],
            neighbours=self.neighbours,
            gains=self.gains,
            price=price,
        )
        Path(path).write_text(page, encoding="utf-8")
        return Path(path)

    def to_dict(self) -> dict[str, Any]:
        """The document of `plan --json`."""
        return plan_document(
            self.plan,
            tokens=self.tokens,
            assumed=self.assumed,
            why=[*self.finetune_reasons, *self.why],
            neighbours=self.neighbours,
            gains=self.gains,
        )

    @property
    def title(self) -> str:
        """Model, devices, tokens and number formats in one line."""
        cluster = self.plan.question.cluster
        devices = f"{cluster.num_devices} x {cluster.device.title}"
        return (
            f"{self.run.model.family} on {devices}, {show_count(self.tokens)} tokens; {format_text(self.run)}"
        )

    def __repr__(self) -> str:
        rows = [" ".join(row) for row in self._rows()]
        return "\n".join([self.title, *rows])

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                str(number),
                layout_text(candidate.run),
                show_seconds(candidate.step_seconds),
                f"{candidate.tokens_per_second / candidate.num_ranks:,.0f}",
                f"{candidate.mfu:.1%}",
                show_bytes(candidate.device_bytes),
                show_seconds(candidate.days(self.tokens) * 86400),
            )
            for number, candidate in enumerate(self.top, start=1)
        ]

    def _repr_html_(self) -> str:
        """The ranked layouts, the memory and the step of the choice, and the reasons."""
        return html.fragment(
            html.heading(self.title),
            html.table(LAYOUT_HEAD, self._rows(), text_columns=(1,)),
            memory_chart(self.best).inline(),
            _step_bar(self.best.seconds_items, self.step_seconds),
            html.heading("Why"),
            html.listing(self.why),
            html.heading("Assumed") if self.assumed else "",
            html.listing(self.assumed),
        )


@dataclass(frozen=True)
class PredictionResult:
    """Memory, step time and MFU of one run on one cluster."""

    run: RunSpec
    cluster: Cluster
    prediction: Prediction
    external: ExternalModel | None = None
    """The traced model, where it is none of our families."""

    @property
    def fits(self) -> bool:
        """Whether the run fits the devices."""
        return self.prediction.fits

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of one step."""
        return self.prediction.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOP/s over the data sheet's dense peak."""
        return self.prediction.mfu

    @property
    def device_bytes(self) -> float:
        """Peak bytes on the device of the pipeline rank that needs most."""
        return self.prediction.peak_stage.device_bytes

    def _facts(self) -> Mapping[str, str]:
        found = self.prediction
        capacity = show_bytes(found.capacity_bytes)
        interval = show_range(found.low_seconds, found.high_seconds)
        verdict = "fits" if self.fits else "does NOT fit"
        return {
            "layout": layout_text(self.run),
            "step": f"{show_seconds(found.step_seconds)} (90%: {interval})",
            "tokens/s per device": f"{found.tokens_per_second_per_device:,.0f}",
            "TFLOP/s per device": f"{found.tflops_per_device:.3g}, MFU {found.mfu:.1%}",
            "memory": f"{show_bytes(self.device_bytes)} of {capacity}: {verdict}",
        }

    @property
    def title(self) -> str:
        """Model and devices in one line."""
        return f"{self.run.model.family} on {self.cluster.num_devices} x {self.cluster.device.title}"

    def __repr__(self) -> str:
        return "\n".join([self.title, *(f"{name}: {value}" for name, value in self._facts().items())])

    def _repr_html_(self) -> str:
        """The figures as a table, and the memory and the step as pictures."""
        return html.fragment(
            html.heading(self.title),
            html.table(("", ""), list(self._facts().items()), text_columns=(0, 1)),
            memory_chart(self._candidate()).inline(),
            _step_bar(self.prediction.seconds_by_item, self.step_seconds),
        )

    def _candidate(self) -> Candidate:
        external = self.external
        runtime = None if external is None else module_runtime(external, state_bytes(self.run.precision))
        return candidate_of(self.run, self.cluster, runtime)


@dataclass(frozen=True)
class CheckResult:
    """The rules that a run breaks, and notes on what wastes the hardware."""

    run: RunSpec | None
    """The run; None where it could not be read."""
    violations: tuple[SpecError, ...] = ()
    notes: tuple[Advice, ...] = ()

    @property
    def is_valid(self) -> bool:
        """Whether no rule is broken."""
        return not self.violations

    def __repr__(self) -> str:
        lines = [f"{kind}: {fact} ({where}): {hint}" for kind, fact, where, hint in self._rows()]
        return "\n".join(["valid" if self.is_valid else "not valid", *lines])

    def _rows(self) -> list[tuple[str, str, str, str]]:
        errors = [("error", each.fact, each.where, each.hint) for each in self.violations]
        return errors + [("note", each.fact, each.where, each.hint) for each in self.notes]

    def _repr_html_(self) -> str:
        """One row per violation and note."""
        head, rows = ("", "fact", "where", "hint"), self._rows()
        shown = html.table(head, rows, text_columns=(0, 1, 2, 3)) if rows else ""
        return html.fragment(html.heading("valid" if self.is_valid else "not valid"), shown)


def _step_bar(items: Mapping[str, float], total: float) -> str:
    """Where the step goes, as one stacked bar."""
    named = {ITEM_NAMES.get(name, name): seconds for name, seconds in items.items() if seconds > 0}
    bar = Bar("step", named, show_seconds(total))
    return stacked_bars([bar], full=1.02 * total, label="Step time by item").inline()
