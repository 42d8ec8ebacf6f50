"""Tables, histograms and documents that `meshwright data` prints."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.data.describe import Bar, Lengths, Packing
    from meshwright.data.sources import TokenFile

_SHOWN_CHARACTERS = 600
_BAR_COLUMNS = 40


def token_counts(dataset: "TokenFile") -> dict[str, int]:
    """Counts of a packed dataset."""
    manifest = dataset.manifest
    return {
        "num_tokens": manifest.num_tokens,
        "num_documents": manifest.num_documents,
        "vocab_size": manifest.vocab_size,
    }


def packed_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows that `data pack` prints."""
    left_out = f" ({facts['empty_documents']:,} empty ones left out)" if facts["empty_documents"] else ""
    return [
        ("dataset", facts["path"]),
        ("documents", f"{facts['num_documents']:,} from {_number_of(facts['source_files'])}{left_out}"),
        ("tokens", f"{facts['num_tokens']:,} as {facts['dtype']}"),
        ("tokenizer", f"{facts['tokenizer']['name']}, vocabulary {facts['vocab_size']:,}"),
        ("use it with", f"data.path={facts['path']} (model.vocab_size {facts['vocab_size']} or more)"),
    ]


def _number_of(files: list[str]) -> str:
    return f"{len(files):,} file{'' if len(files) == 1 else 's'}"


def dataset_rows(dataset: "TokenFile") -> list[tuple[str, str]]:
    """The rows that `data inspect` prints."""
    from meshwright.units import show_bytes

    manifest, tokenizer = dataset.manifest, dataset.manifest.tokenizer
    files = manifest.source_files
    more = f" and {len(files) - 3:,} more" if len(files) > 3 else ""
    return [
        ("dataset", dataset.name),
        ("documents", f"{manifest.num_documents:,}"),
        ("tokens", f"{manifest.num_tokens:,} as {manifest.dtype} ({show_bytes(dataset.tokens.nbytes)})"),
        ("tokenizer", f"{tokenizer.name}, vocabulary {manifest.vocab_size:,}, hash {tokenizer.hash}"),
        ("end of document", f"token {tokenizer.eos_id}"),
        ("packed from", ", ".join(files[:3]) + more),
        ("fingerprint", dataset.fingerprint),
    ]


def packing_rows(packing: "Packing") -> list[tuple[str, str]]:
    """How one sequence length packs the documents."""
    if packing.num_sequences == 0:
        return [(f"in {packing.sequence_length:,}s", "the dataset is shorter than one sequence")]
    return [
        (
            f"in {packing.sequence_length:,}s",
            f"{packing.num_sequences:,} sequences, {packing.documents_per_sequence:.3g} documents each, "
            f"{packing.unused_tokens:,} tokens unused",
        ),
        ("targets", f"{packing.target_share:.2%} of positions, with separate documents (document masking)"),
        ("split documents", f"{packing.split_share:.1%} of documents continue in the next sequence"),
        (
            "whole documents",
            f"{packing.whole_share:.2%} of positions are tokens with packing: whole (best fit)",
        ),
        ("without packing", f"{packing.padded_share:.1%} of positions would be tokens, the rest padding"),
    ]


def frequent_tokens(dataset: "TokenFile", most: list[tuple[int, int]]) -> str:
    """The most frequent tokens as text, with their shares."""
    from meshwright.data.tokenize import HuggingFaceTokenizer, tokenizer_of

    tokenizer = tokenizer_of(dataset.folder, dataset.manifest.tokenizer)
    is_named = isinstance(tokenizer, HuggingFaceTokenizer)
    decode = tokenizer.decode_with_special if is_named else tokenizer.decode
    total = dataset.manifest.num_tokens
    return ", ".join(f"{decode([token])!r} {count / total:.1%}" for token, count in most)


def first_documents(dataset: "TokenFile", count: int) -> list[str]:
    """The first documents as text, shortened."""
    from meshwright.data.tokenize import tokenizer_of

    tokenizer = tokenizer_of(dataset.folder, dataset.manifest.tokenizer)
    shown = range(min(count, dataset.manifest.num_documents))
    # A character is at most four byte tokens: this many are enough, even of a huge document.
    tokens = (dataset.document(index)[: 4 * _SHOWN_CHARACTERS + 4] for index in shown)
    return [_shortened(tokenizer.decode(each.tolist())) for each in tokens]


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS].rstrip() + " ..."


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def print_table(rows: list[tuple[str, str]]) -> None:
    """Names and values in two columns."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")


def print_columns(rows: list[tuple[str, ...]]) -> None:
    """A table whose first row is the header; numbers are aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *others = (
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        typer.echo("  ".join([first, *others]))


def print_histogram(bars: "list[Bar]", unit: str = "tokens") -> None:
    """Bars of a histogram, with their counts."""
    from rich.text import Text

    most = max(bar.num_documents for bar in bars)
    labels = [f"{bar.at_least:,} to {bar.below - 1:,}" for bar in bars]
    console, width = _console(), max(len(label) for label in labels)
    what = "documents" if unit == "tokens" else "records"
    console.print(f"\n{what} by length in {unit}")
    for bar, label in zip(bars, labels, strict=True):
        eighths = round(8 * _BAR_COLUMNS * bar.num_documents / most)
        drawn = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
        line = Text.assemble(f"  {label:>{width}}  ", (drawn, "cyan"), f" {bar.num_documents:,}")
        console.print(line)


def print_documents(texts: list[str]) -> None:
    """Documents as text, one after the other."""
    for number, text in enumerate(texts):
        typer.echo(f"\ndocument {number}")
        for line in text.splitlines():
            # Control characters in the data must not reach the terminal.
            typer.echo("  | " + "".join(each if each.isprintable() else "·" for each in line))


def plain(value: Any) -> dict[str, Any]:
    """A dataclass as JSON values."""
    from dataclasses import asdict

    return asdict(value)


def print_json(facts: dict[str, Any]) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(facts, indent=2))


def lengths_text(lengths: "Lengths") -> str:
    """Shortest, longest, median, mean and 95th percentile in one line."""
    return (
        f"{lengths.shortest:,} to {lengths.longest:,}, median {lengths.median:,.0f}, "
        f"mean {lengths.mean:,.1f}, 95% below {lengths.percentile_95:,.0f}"
    )


@contextmanager
def progress_bar(what: str, total_bytes: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, if that is a terminal; yields a function to call with the bytes done."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        progress.TextColumn(what),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)
