"""`meshwright data`: tokenize, index, inspect and verify datasets. Only `logprobs` needs torch."""

import os
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli import data_chat
from meshwright.cli.check import AsJson, Overrides, Quiet, Run
from meshwright.cli.data_pack import (
    OutputFormat,
    SplitAt,
    packed_files,
    require_chat_output,
    require_effect,
    require_no_output,
    write_megatron_pair,
)
from meshwright.cli.data_text import (
    dataset_rows,
    first_documents,
    frequent_tokens,
    lengths_text,
    packed_rows,
    packing_rows,
    plain,
    print_columns,
    print_documents,
    print_histogram,
    print_json,
    print_table,
    progress_bar,
    token_counts,
)
from meshwright.cli.main import new_app

app = new_app(help="Tokenize, index, inspect and verify datasets.")

Dataset = Annotated[
    str, typer.Argument(metavar="PATH", help="A dataset of any format: file, folder or address (s3://...).")
]
Split = Annotated[str | None, typer.Option(help="A split of tar shards or of a Hugging Face dataset.")]
Processes = Annotated[int | None, typer.Option(min=1, help="Worker processes. [default: one per core]")]


@app.command()
def pack(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE", help=".txt, .jsonl and .parquet files, also .gz and .zst, or folders of them."
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to create; it must not exist.")],
    output_format: Annotated[
        OutputFormat, typer.Option("--format", help="Our folder, or Megatron's PATH.bin and PATH.idx.")
    ] = OutputFormat.TOKENS,
    tokenizer: Annotated[
        str, typer.Option(help="`bytes`, or a Hugging Face tokenizer.json or its folder.")
    ] = "bytes",
    split: Annotated[
        SplitAt | None, typer.Option(help="What one document of a .txt file is. [default: file]")
    ] = None,
    field: Annotated[
        str | None, typer.Option(help="The key or column with the text. [default: text]")
    ] = None,
    eos: Annotated[
        str | None, typer.Option(help="End-of-document token, where tokenizer.json does not name one.")
    ] = None,
    chat: data_chat.Chat = None,
    train: data_chat.Train = None,
    template: data_chat.Template = None,
    template_var: data_chat.Variables = None,
    date: data_chat.Date = None,
    seq: data_chat.Sequence = None,
    longer: data_chat.Longer = None,
    max_bad: data_chat.MaxBad = None,
    texts_as_turns: data_chat.Turns = False,
    dataset_split: data_chat.DatasetSplit = None,
    processes: Processes = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Tokenize text files or chats into a packed dataset for training.

    Each document is followed by the tokenizer's end-of-document token; chats end as their template says. The
    output appears under its name only when it is complete, and nothing is overwritten. After a kill, the same
    command continues.

    Example: meshwright data pack books/ -o books.tokens --split blank-line

    Example: meshwright data pack chats.jsonl --chat auto --tokenizer llama/ -o chats.tokens
    """
    from meshwright.data.text_input import TextFormat, find_files
    from meshwright.data.tokenize import open_tokenizer

    require_no_output(output, output_format)
    chat_options = data_chat.ChatOptions(
        chat, train, template, template_var, date, seq, longer, max_bad, texts_as_turns, dataset_split
    )
    chat_options.require_no_effect_without_chat()
    if chat is not None:
        require_chat_output(output_format, split=split, field=field)
        return data_chat.pack_chats(
            paths,
            output,
            chat_options,
            tokenizer=tokenizer,
            eos=eos,
            processes=processes,
            quiet=quiet,
            as_json=as_json,
        )
    files = find_files(paths)
    require_effect(files, split=split, field=field)
    text_format = TextFormat(split=(split or SplitAt.FILE).value, text_field=field or "text")
    chosen = open_tokenizer(tokenizer, eos=eos)
    target = output if output_format is OutputFormat.TOKENS else output.with_name(f".{output.name}.tokens")
    facts = packed_files(files, target, chosen, text_format, processes=processes, quiet=quiet)
    if output_format is OutputFormat.MEGATRON:
        write_megatron_pair(target, output)
    facts["path"] = str(output)
    if as_json:
        return print_json(facts)
    return print_table(packed_rows(facts))


@app.command()
def index(
    path: Annotated[Path, typer.Argument(help="A folder of .tar shards, or .jsonl files.")],
    sqlite: Annotated[
        bool, typer.Option(help="Write index.sqlite too, which Energon needs to join datasets by key.")
    ] = True,
    processes: Processes = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Make tar shards or lines random-access: one pass, done once. Energon reads the same files.

    A second call reads only shards that are new or changed, and so does a call after a kill.

    Example: meshwright data index shards/
    """
    from meshwright.cli import data_records
    from meshwright.data.readers.tar_index import TAR_SUFFIX, build_index

    if path.is_file() or not any(path.rglob(f"*{TAR_SUFFIX}")):
        return data_records.index_lines(path, as_json=as_json)
    total = sum(shard.stat().st_size for shard in path.rglob(f"*{TAR_SUFFIX}"))
    count = processes or os.cpu_count() or 1
    with progress_bar("indexing", total, quiet=quiet) as advance:
        result = build_index(path, num_processes=count, sqlite=sqlite, progress=advance)
    if as_json:
        return print_json({"path": str(path), **result._asdict()})
    rows = [
        ("dataset", str(path)),
        ("shards", f"{result.num_shards:,} ({result.num_reused:,} indexed before)"),
        ("samples", f"{result.num_samples:,}"),
    ]
    if result.unmarked:
        rows.append(("not closed", f"{', '.join(result.unmarked[:3])}: the writer did not end the archive"))
    return print_table(rows)


@app.command()
def inspect(
    path: Dataset,
    documents: Annotated[int, typer.Option("--documents", "--samples", min=0, help="How many to show.")] = 2,
    seq: Annotated[
        int | None, typer.Option("--seq", min=2, help="Chats: count what is longer than this many tokens.")
    ] = None,
    split: Split = None,
    page: Annotated[
        Path | None, typer.Option("--html", help="Write a page with samples decoded: images, texts, sounds.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what a dataset holds: format, counts, fields, and its first samples or documents.

    Example: meshwright data inspect shards/ --html samples.html --samples 40
    """
    from meshwright.cli import data_records

    if page is not None:
        data_records.write_page(path, page, split=split, samples=documents)
        typer.echo(str(page))
    elif data_records.is_packed(path):
        _inspect_tokens(Path(path), documents, seq, as_json=as_json)
    else:
        facts = data_records.inspect_facts(path, split=split, samples=documents)
        print_json(facts) if as_json else data_records.print_inspected(facts)


def _inspect_tokens(path: Path, documents: int, sequence_length: int | None, *, as_json: bool) -> None:
    from meshwright.data import describe
    from meshwright.data.sources import TokenFile
    from meshwright.errors import DataError

    dataset = TokenFile.open(path)
    if dataset.manifest.chat is not None:
        return data_chat.inspect_chats(dataset, documents, sequence_length, as_json=as_json)
    if sequence_length is not None:
        hint = f"`meshwright data stats {path} --seq {sequence_length}` shows how it packs documents"
        raise DataError("the dataset holds no chats, so --seq has no effect", where="--seq", hint=hint)
    lengths = describe.document_lengths(dataset)
    summary, bars = describe.describe_lengths(lengths), describe.histogram(lengths)
    texts = first_documents(dataset, documents)
    if as_json:
        facts = {
            "path": str(path),
            **dataset.manifest.model_dump(),
            "fingerprint": dataset.fingerprint,
            "document_tokens": plain(summary),
            "histogram": [plain(bar) for bar in bars],
            "first_documents": texts,
        }
        return print_json(facts)
    print_table(dataset_rows(dataset))
    print_histogram(bars)
    return print_documents(texts)


@app.command()
def stats(
    path: Dataset,
    sequence_length: Annotated[
        int, typer.Option("--seq", min=1, help="Tokens per sequence to pack the dataset into.")
    ] = 2048,
    split: Split = None,
    as_json: AsJson = False,
) -> None:
    """Print lengths, token frequencies, and how well a sequence length packs the documents.

    The unigram entropy is the loss of a model that ignores context: a trained model must get below it.
    """
    from meshwright.cli import data_records

    if data_records.is_packed(path):
        return _token_stats(Path(path), sequence_length, as_json=as_json)
    return _length_stats(path, split=split, as_json=as_json)


def _token_stats(path: Path, sequence_length: int, *, as_json: bool) -> None:
    from meshwright.data import describe
    from meshwright.data.sources import TokenFile

    dataset = TokenFile.open(path)
    lengths = describe.describe_lengths(describe.document_lengths(dataset))
    unigrams = describe.describe_unigrams(dataset)
    if dataset.manifest.chat is not None:
        from meshwright.data.chat.describe import whole_packing

        packing = whole_packing(dataset, sequence_length)
        rows_of_packing = data_chat.packing_rows(packing)
    else:
        packing = describe.describe_packing(dataset, sequence_length)
        rows_of_packing = packing_rows(packing)
    if as_json:
        parts = {
            "document_tokens": plain(lengths),
            "unigrams": plain(unigrams),
            "packing": plain(packing),
        }
        return print_json({"path": str(path), **token_counts(dataset), **parts})
    rows = [
        ("documents", f"{dataset.manifest.num_documents:,}"),
        ("tokens", f"{dataset.manifest.num_tokens:,}"),
        ("tokens per document", lengths_text(lengths)),
        ("distinct tokens", f"{unigrams.num_distinct:,} of {dataset.vocab_size:,}"),
        ("unigram entropy", f"{unigrams.entropy_nats:.4f} nats per token: the loss without any context"),
        ("most frequent", frequent_tokens(dataset, unigrams.most_frequent)),
        *rows_of_packing,
    ]
    return print_table(rows)


def _length_stats(path: str, *, split: str | None, as_json: bool) -> None:
    from meshwright.cli import data_records
    from meshwright.data import describe

    source, kind, lengths, unit = data_records.lengths_of(path, split=split)
    summary, bars = describe.describe_lengths(lengths), describe.histogram(lengths)
    if as_json:
        facts = {"path": path, "format": kind, "num_records": len(source), "unit": unit}
        return print_json({**facts, "lengths": plain(summary), "histogram": [plain(bar) for bar in bars]})
    print_table(
        [
            ("dataset", path),
            ("format", kind),
            ("records", f"{len(source):,}"),
            (unit, f"{int(lengths.sum()):,}"),
            (f"{unit} per record", lengths_text(summary)),
        ]
    )
    return print_histogram(bars, unit)


@app.command()
def verify(path: Dataset, as_json: AsJson = False) -> None:
    """Compare a dataset with its hashes or index; reads every byte. Exit code 2: it is damaged."""
    from meshwright.errors import EXIT_INPUT, DataError

    try:
        damage, intact = _damage(path)
    except DataError as error:
        if not as_json:
            raise
        damage, intact = [f"{error.where}: {error.fact}"], ""
    if as_json:
        print_json({"path": path, "intact": not damage, "damage": damage})
        raise typer.Exit(EXIT_INPUT if damage else 0)
    if damage:
        hint = "copy the dataset again from an intact copy, or write it again"
        raise DataError("the dataset is damaged: " + "; ".join(damage[:20]), where=path, hint=hint)
    typer.echo(f"{path}: intact ({intact})")


def _damage(path: str) -> tuple[list[str], str]:
    """(everything wrong, what was compared)."""
    from meshwright.cli import data_records
    from meshwright.data.sources import TokenFile

    if data_records.is_packed(path):
        dataset = TokenFile.open(path, check_content=False)
        return dataset.damage(), f"{len(dataset.manifest.sha256)} files match their sha256"
    return data_records.damage_of(path), "every record was read"


@app.command()
def blend(
    run: Run,
    overrides: Overrides = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps. [default: those of the run]")] = None,
    as_json: AsJson = False,
) -> None:
    """Print what a run reads of each of its datasets: exact share, samples, epochs and tokens.

    Example: meshwright data blend run.yaml --steps 1000
    """
    from meshwright.cli.data_blend import blend_facts, blend_rows, blend_summary
    from meshwright.spec.text import read_run

    loaded = read_run(run, overrides or [])
    loaded.require_valid()
    facts = blend_facts(loaded.run, steps)
    if as_json:
        return print_json(facts)
    print_columns(blend_rows(facts))
    return typer.echo(blend_summary(facts))


@app.command()
def logprobs(
    run: Run,
    overrides: Overrides = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite log-probs of other weights.")] = False,
    quiet: Quiet = False,
) -> None:
    """Compute the reference log-probs of a preference dataset once, and store them with it.

    The reference is the model at the start of RUN, on the run's mesh. Runs with preference.reference=dataset
    then start without that pass. After a kill the same command continues. Needs torch.
    """
    from meshwright.cli.data_logprobs import logprobs as store

    store(run, overrides or [], force=force, quiet=quiet)
