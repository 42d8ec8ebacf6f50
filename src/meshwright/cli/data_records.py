"""`meshwright data` for sources that are not packed tokens: tar shards, tables, folders, object stores."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from meshwright.data.records import RecordSource


def is_packed(address: str) -> bool:
    """Whether a path is for the verbs of packed tokens: such a dataset, or what claims to be one."""
    from meshwright.data.readers.door import format_of
    from meshwright.data.readers.object_store import is_address

    if is_address(address):
        return False
    path = Path(address)
    return (path / "dataset.json").is_file() or format_of(path) is None


def inspect_facts(address: str, *, split: str | None, samples: int) -> dict[str, Any]:
    """Counts and the first records of a source, as JSON values."""
    from meshwright.data.decode import missing_decoder, shown_field
    from meshwright.data.readers.door import open_and_name

    source, kind = open_and_name(address, split=split)
    shown = [dict(source.record(index)) for index in range(min(samples, len(source)))]
    notes = {note for record in shown for name in record if (note := missing_decoder(name))}
    return {
        "path": address,
        "format": kind,
        "num_records": len(source),
        "fingerprint": source.fingerprint,
        "fields": sorted({name for record in shown for name in record}),
        "notes": sorted(notes),
        "first_records": [
            {name: shown_field(_text(name, value)) for name, value in record.items()} for record in shown
        ],
    }


def write_page(address: str, page: Path, *, split: str | None, samples: int) -> None:
    """An HTML page with evenly spaced records, decoded."""
    import numpy as np

    from meshwright.data.inspect_page import inspect_page
    from meshwright.data.readers.door import open_and_name

    source, kind = open_and_name(address, split=split)
    count = min(max(1, samples), len(source))
    indices = np.linspace(0, len(source) - 1, num=count).round().astype(int).tolist()
    page.write_text(inspect_page(source, kind=kind, indices=indices), encoding="utf-8")


def print_inspected(facts: dict[str, Any]) -> None:
    """The facts as a table, then the first records."""
    rows = [
        ("dataset", facts["path"]),
        ("format", facts["format"]),
        ("records", f"{facts['num_records']:,}"),
        ("fields", ", ".join(facts["fields"])),
        ("fingerprint", facts["fingerprint"]),
        *(("note", note) for note in facts["notes"]),
    ]
    for name, value in rows:
        typer.echo(f"{name:<11}  {value}")
    for number, record in enumerate(facts["first_records"]):
        typer.echo(f"\nrecord {number}")
        for name, value in record.items():
            # Control characters in the data must not reach the terminal.
            line = "".join(each if each.isprintable() else "·" for each in value)
            typer.echo(f"  {name}: {line}")


def lengths_of(address: str, *, split: str | None) -> "tuple[RecordSource, str, Any, str]":
    """(source, format, length of each record, unit of the lengths); DataError where there are none."""
    from meshwright.data.readers.door import open_and_name
    from meshwright.errors import DataError

    source, kind = open_and_name(address, split=split)
    lengths = source.lengths()
    if lengths is None:
        fact = f"{kind} have no lengths without reading every record"
        raise DataError(fact, where=address, hint="pack the text first: `meshwright data pack`")
    return source, kind, lengths, "tokens" if kind.endswith("tokens") else "bytes"


def damage_of(address: str) -> list[str]:
    """Everything wrong with a source, as facts; reads every record, or every header of tar shards."""
    from meshwright.data.readers.door import open_and_name
    from meshwright.data.readers.megatron import MegatronTokens
    from meshwright.data.readers.tar import TarShards
    from meshwright.data.readers.tar_index import find_shards, index_differences
    from meshwright.errors import DataError

    source, _ = open_and_name(address)
    path = Path(address)
    if isinstance(source, MegatronTokens):
        return source.damage()
    if isinstance(source, TarShards) and path.is_dir():
        return [fact for name in find_shards(path) for fact in index_differences(path, name)]
    facts: list[str] = []
    for index in range(len(source)):
        try:
            source.record(index)
        except DataError as error:
            facts.append(f"record {index}: {error.where}: {error.fact}")
    return facts


def _text(name: str, value: Any) -> Any:
    from meshwright.data.decode import TEXT_FIELDS, decode_text

    if isinstance(value, bytes) and name.rpartition(".")[2].lower() in (*TEXT_FIELDS, "json"):
        return decode_text(value)
    return value


def index_lines(path: Path, *, as_json: bool) -> None:
    """Write the offsets of the lines of .jsonl files beside them, and print how many there are."""
    from meshwright.cli.data_text import print_json, print_table
    from meshwright.data.readers.file_list import files_with
    from meshwright.data.readers.json_lines import SUFFIX, write_line_index

    files = [file for file in files_with(path, SUFFIX) if file.name.endswith(SUFFIX)]
    _require_lines(files, path)
    counts = {str(file): write_line_index(file) for file in files}
    if as_json:
        return print_json({"path": str(path), "num_lines": counts})
    return print_table([(file, f"{count:,} lines") for file, count in counts.items()])


def _require_lines(files: list[Path], path: Path) -> None:
    from meshwright.errors import DataError

    if not files:
        raise DataError(
            "the file is neither .tar nor .jsonl", where=str(path), hint="name a folder of shards"
        )


def check_records(path: str, *, as_json: bool) -> None:
    """Print what the sources of a records file resolve to: share, records, groups."""
    from dataclasses import asdict

    from meshwright.cli.data_text import print_json
    from meshwright.data.record_file import report_records
    from meshwright.spec.records_file import read_records

    reports = report_records(read_records(path))
    if as_json:
        return print_json({"valid": True, "sources": [asdict(report) for report in reports]})
    return typer.echo("\n".join([f"{path}: valid", *(f"  {report.line}" for report in reports)]))
