"""What the datasets of a run resolve to: samples, tokens and epochs of each."""

from dataclasses import dataclass

from meshwright.data.packed_samples import PackedSamples
from meshwright.data.stream import Stream, open_stream
from meshwright.spec import RunSpec
from meshwright.units import show_count


@dataclass(frozen=True)
class SourceReport:
    """One dataset of a run."""

    name: str
    weight: float | None
    """Share of the samples in the blend; None for the only dataset."""
    num_samples: int
    """Sequences of one epoch, without those that are held out."""
    num_tokens: int
    """Tokens of the dataset."""
    epochs: float
    """How often the run reads it."""
    fill: float | None
    """Share of positions that are tokens, with whole documents."""
    num_held_out: int = 0
    """Sequences that are kept for evaluation."""

    @property
    def line(self) -> str:
        """`books: 70%, 1,000 sequences, 512K tokens, 1.20 epochs`."""
        share = "" if self.weight is None else f" {self.weight:.3g}%,"
        fill = "" if self.fill is None else f", {self.fill:.1%} full"
        held_out = f", {self.num_held_out:,} held out" if self.num_held_out else ""
        return (
            f"{self.name}:{share} {self.num_samples:,} sequences{fill}, "
            f"{show_count(self.num_tokens)} tokens, {self.epochs:,.2f} epochs{held_out}"
        )


def report_stream(run: RunSpec) -> list[SourceReport]:
    """The datasets of a run; DataError where one is missing or does not fit."""
    stream = open_stream(run.data, seed=run.seed, vocab_size=run.model.vocab_size)
    return [_report(run, stream, number) for number in range(len(stream.parts))]


def _report(run: RunSpec, stream: Stream, number: int) -> SourceReport:
    part, data = stream.parts[number], run.data
    drawn = stream.drawn(data.num_sequences(run.schedule.num_steps))[number]
    total = sum(one.weight for one in data.sources)
    samples = part.samples
    return SourceReport(
        name=part.source.name,
        weight=100 * data.blend[number].weight / total if data.blend else None,
        num_samples=part.num_training,
        num_tokens=len(part.source.tokens),
        epochs=drawn / part.num_training,
        fill=samples.plan.fill(data.sequence_length) if isinstance(samples, PackedSamples) else None,
        num_held_out=len(part.held_out),
    )
