"""`meshwright data`: tokenize, inspect and verify datasets. Needs no torch."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.check import AsJson, Quiet
from meshwright.cli.main import new_app

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.data.describe import Bar, Packing
    from meshwright.data.sources import TokenFile

app = new_app(help="Tokenize, inspect and verify datasets.")

_SHOWN_CHARACTERS = 600
_BAR_COLUMNS = 40

Folder = Annotated[
    Path, typer.Argument(metavar="PATH", help="A packed dataset: the folder that `data pack` wrote.")
]


class SplitAt(StrEnum):
    """Where a .txt file is split into documents."""

    FILE = "file"
    BLANK_LINE = "blank-line"


@app.command()
def pack(
    paths: Annotated[
        list[Path], typer.Argument(metavar="FILE", help=".txt and .jsonl files, or folders of them.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to create; it must not exist.")],
    tokenizer: Annotated[
        str, typer.Option(help="`bytes`, or a Hugging Face tokenizer.json or its folder.")
    ] = "bytes",
    split: Annotated[
        SplitAt | None, typer.Option(help="What one document of a .txt file is. [default: file]")
    ] = None,
    field: Annotated[
        str | None, typer.Option(help="The key of a .jsonl line with the text. [default: text]")
    ] = None,
    eos: Annotated[
        str | None, typer.Option(help="End-of-document token, where tokenizer.json does not name one.")
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Tokenize text files into a packed dataset for training.

    Each document is followed by the tokenizer's end-of-document token. The folder appears under its name
    only when it is complete, and nothing is overwritten.

    Example: meshwright data pack books/ -o books.tokens --split blank-line
    """
    from meshwright.data.pack import TextFormat, find_files
    from meshwright.data.pack import pack as pack_files
    from meshwright.data.tokenize import open_tokenizer
    from meshwright.data.write import require_absent

    require_absent(output)
    files = find_files(paths)
    _require_effect(files, split=split, field=field)
    text_format = TextFormat(split=(split or SplitAt.FILE).value, text_field=field or "text")
    chosen = open_tokenizer(tokenizer, eos=eos)
    with _progress("packing", sum(file.stat().st_size for file in files), quiet=quiet) as advance:
        packed = pack_files(files, output, tokenizer=chosen, text_format=text_format, progress=advance)
    facts = {"path": str(output), **packed.manifest.model_dump(), "empty_documents": packed.num_empty}
    if as_json:
        return _print_json(facts)
    return _print_table(_packed_rows(facts))


@app.command()
def inspect(
    path: Folder,
    documents: Annotated[int, typer.Option(min=0, help="Number of documents to show, from the first.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Print a dataset's counts, tokenizer and document lengths, and its first documents as text."""
    from meshwright.data import describe
    from meshwright.data.sources import TokenFile

    dataset = TokenFile.open(path)
    lengths = describe.document_lengths(dataset)
    summary, bars = describe.describe_lengths(lengths), describe.histogram(lengths)
    texts = _first_documents(dataset, documents)
    if as_json:
        facts = {
            "path": str(path),
            **dataset.manifest.model_dump(),
            "fingerprint": dataset.fingerprint,
            "document_tokens": _plain(summary),
            "histogram": [_plain(bar) for bar in bars],
            "first_documents": texts,
        }
        return _print_json(facts)
    _print_table(_dataset_rows(dataset))
    _print_histogram(bars)
    return _print_documents(texts)


@app.command()
def stats(
    path: Folder,
    sequence_length: Annotated[
        int, typer.Option("--seq", min=1, help="Tokens per sequence to pack the dataset into.")
    ] = 2048,
    as_json: AsJson = False,
) -> None:
    """Print document lengths, token frequencies, and how well a sequence length packs the documents.

    The unigram entropy is the loss of a model that ignores context: a trained model must get below it.
    """
    from meshwright.data import describe
    from meshwright.data.sources import TokenFile

    dataset = TokenFile.open(path)
    lengths = describe.describe_lengths(describe.document_lengths(dataset))
    unigrams = describe.describe_unigrams(dataset)
    packing = describe.describe_packing(dataset, sequence_length)
    if as_json:
        parts = {
            "document_tokens": _plain(lengths),
            "unigrams": _plain(unigrams),
            "packing": _plain(packing),
        }
        return _print_json({"path": str(path), **_counts(dataset), **parts})
    rows = [
        ("documents", f"{dataset.manifest.num_documents:,}"),
        ("tokens", f"{dataset.manifest.num_tokens:,}"),
        (
            "tokens per document",
            f"{lengths.shortest:,} to {lengths.longest:,}, median {lengths.median:,.0f}, "
            f"mean {lengths.mean:,.1f}, 95% below {lengths.percentile_95:,.0f}",
        ),
        ("distinct tokens", f"{unigrams.num_distinct:,} of {dataset.vocab_size:,}"),
        ("unigram entropy", f"{unigrams.entropy_nats:.4f} nats per token: the loss without any context"),
        ("most frequent", _frequent(dataset, unigrams.most_frequent)),
        *_packing_rows(packing),
    ]
    return _print_table(rows)


@app.command()
def verify(path: Folder, as_json: AsJson = False) -> None:
    """Compare a dataset with its hashes; reads every byte. Exit code 2: a file is damaged."""
    from meshwright.data.sources import TokenFile
    from meshwright.errors import EXIT_INPUT, DataError

    try:
        dataset = TokenFile.open(path, check_content=False)
        damage = dataset.damage()
    except DataError as error:
        if not as_json:
            raise
        damage = [f"{error.where}: {error.fact}"]
    if as_json:
        _print_json({"path": str(path), "intact": not damage, "damage": damage})
        raise typer.Exit(EXIT_INPUT if damage else 0)
    if damage:
        hint = "copy the dataset again from an intact copy, or pack it again"
        raise DataError("the dataset is damaged: " + "; ".join(damage), where=str(path), hint=hint)
    typer.echo(f"{path}: intact ({len(dataset.manifest.sha256)} files match their sha256)")


def _require_effect(files: list[Path], *, split: SplitAt | None, field: str | None) -> None:
    from meshwright.data.pack import JSON_LINES_SUFFIX, TEXT_SUFFIX
    from meshwright.errors import DataError

    kinds = {file.suffix for file in files}
    if split is not None and TEXT_SUFFIX not in kinds:
        raise DataError("no .txt file is packed, so --split has no effect", where="--split")
    if field is not None and JSON_LINES_SUFFIX not in kinds:
        raise DataError("no .jsonl file is packed, so --field has no effect", where="--field")


@contextmanager
def _progress(what: str, total_bytes: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
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


def _counts(dataset: "TokenFile") -> dict[str, int]:
    manifest = dataset.manifest
    return {
        "num_tokens": manifest.num_tokens,
        "num_documents": manifest.num_documents,
        "vocab_size": manifest.vocab_size,
    }


def _packed_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
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


def _dataset_rows(dataset: "TokenFile") -> list[tuple[str, str]]:
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


def _packing_rows(packing: "Packing") -> list[tuple[str, str]]:
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
        ("without packing", f"{packing.padded_share:.1%} of positions would be tokens, the rest padding"),
    ]


def _frequent(dataset: "TokenFile", most: list[tuple[int, int]]) -> str:
    from meshwright.data.tokenize import tokenizer_of

    tokenizer = tokenizer_of(dataset.folder, dataset.manifest.tokenizer)
    total = dataset.manifest.num_tokens
    return ", ".join(f"{tokenizer.decode([token])!r} {count / total:.1%}" for token, count in most)


def _first_documents(dataset: "TokenFile", count: int) -> list[str]:
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


def _print_table(rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")


def _print_histogram(bars: "list[Bar]") -> None:
    from rich.text import Text

    most = max(bar.num_documents for bar in bars)
    labels = [f"{bar.at_least:,} to {bar.below - 1:,}" for bar in bars]
    console, width = _console(), max(len(label) for label in labels)
    console.print("\ndocuments by length in tokens")
    for bar, label in zip(bars, labels, strict=True):
        eighths = round(8 * _BAR_COLUMNS * bar.num_documents / most)
        drawn = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
        line = Text.assemble(f"  {label:>{width}}  ", (drawn, "cyan"), f" {bar.num_documents:,}")
        console.print(line)


def _print_documents(texts: list[str]) -> None:
    for number, text in enumerate(texts):
        typer.echo(f"\ndocument {number}")
        for line in text.splitlines():
            # Control characters in the data must not reach the terminal.
            typer.echo("  | " + "".join(each if each.isprintable() else "·" for each in line))


def _plain(value: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(value)


def _print_json(facts: dict[str, Any]) -> None:
    typer.echo(json.dumps(facts, indent=2))
