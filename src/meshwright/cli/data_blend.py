"""What the data of a run file resolves to: samples, tokens and epochs of each dataset."""

from typing import Any

from meshwright.data.stream import Stream, open_stream
from meshwright.spec import DataSpec, RunSpec


def blend_facts(run: RunSpec, num_steps: int | None) -> dict[str, Any]:
    """Share, samples, tokens and epochs of each dataset over the steps of a run."""
    steps = num_steps or run.schedule.num_steps
    data = run.data
    stream = open_stream(data, seed=run.seed, vocab_size=run.model.vocab_size)
    total = data.num_sequences(steps)
    drawn = stream.drawn(total)
    return {
        "num_steps": steps,
        "num_samples": sum(drawn),
        "num_tokens": sum(drawn) * data.sequence_length,
        "ends_after": stream.num_samples,
        "datasets": [_dataset(data, stream, number, drawn) for number in range(len(drawn))],
    }


def blend_rows(facts: dict[str, Any]) -> list[tuple[str, ...]]:
    """The facts as a table, its first row the header."""
    rows = [("dataset", "weight", "share", "samples", "of", "epochs", "tokens")]
    for each in facts["datasets"]:
        rows.append(
            (
                each["name"],
                f"{each['weight']:g}",
                f"{each['share']:.2%}",
                f"{each['num_samples']:,}",
                f"{each['samples_per_epoch']:,}",
                f"{each['epochs']:.3g}",
                f"{each['num_tokens']:,}",
            )
        )
    return rows


def blend_summary(facts: dict[str, Any]) -> str:
    """The total in one line, and where the data ends before the run."""
    text = (
        f"{facts['num_steps']:,} steps read {facts['num_samples']:,} samples, {facts['num_tokens']:,} tokens"
    )
    if facts["ends_after"] is not None:
        text += f"; the data ends after {facts['ends_after']:,} samples"
    return text


def _dataset(data: DataSpec, stream: Stream, number: int, drawn: list[int]) -> dict[str, Any]:
    part = stream.parts[number]
    return {
        "name": part.source.name,
        "weight": data.sources[number].weight,
        "share": drawn[number] / max(1, sum(drawn)),
        "num_samples": drawn[number],
        "samples_per_epoch": part.num_training,
        "held_out_samples": len(part.samples) - part.num_training,
        "epochs": drawn[number] / max(1, part.num_training),
        "num_tokens": drawn[number] * data.sequence_length,
    }
