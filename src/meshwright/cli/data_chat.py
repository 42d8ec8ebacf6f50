"""`meshwright data pack --chat` and `meshwright data inspect` for chats."""

import datetime
import json
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from meshwright.cli.data_text import dataset_rows, plain, print_json, print_table, progress_bar

if TYPE_CHECKING:
    from meshwright.data.chat.describe import Conversation, Span, TrainedShare, WholePacking
    from meshwright.data.chat.job import ChatCounts, ChatJob
    from meshwright.data.sources import ChatFacts, TokenFile

# Below this, starting worker processes takes longer than it saves.
_MIN_BYTES_FOR_PROCESSES = 8 << 20
_SHOWN_BAD = 5
_OPEN, _CLOSE = "⟦", "⟧"
_BAR = "  | "
_FLAGS = {
    "variables": "--template-var",
    "sequence_length": "--seq",
    "split": "--dataset-split",
}


class ChatFormats(StrEnum):
    """Formats of chats; auto finds the format of each record by its keys."""

    AUTO = "auto"
    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    ALPACA = "alpaca"
    PROMPT_COMPLETION = "prompt-completion"
    PREFERENCE = "preference"
    TOKENS = "tokens"


class TrainOn(StrEnum):
    """The turns that are trained."""

    ASSISTANT = "assistant"
    LAST = "last"
    ALL = "all"


class LongerSamples(StrEnum):
    """What happens to samples longer than the sequence."""

    REFUSE = "refuse"
    DROP = "drop"
    TRUNCATE = "truncate"


Chat = Annotated[
    ChatFormats | None,
    typer.Option(help="Records are chats: render the tokenizer's chat template, train only the answers."),
]
Train = Annotated[TrainOn | None, typer.Option(help="Chats: turns that are trained. [default: assistant]")]
Template = Annotated[
    Path | None, typer.Option(help="Chats: a Jinja file instead of the tokenizer's own chat template.")
]
Variables = Annotated[
    list[str] | None,
    typer.Option("--template-var", metavar="NAME=VALUE", help="Chats: a variable of the template."),
]
Date = Annotated[
    str | None,
    typer.Option(help="Chats: the date for templates that print one, YYYY-MM-DD. [default: today]"),
]
Sequence = Annotated[
    int | None, typer.Option("--seq", min=2, help="Chats: tokens of one sequence of the training run.")
]
Longer = Annotated[
    LongerSamples | None, typer.Option(help="Chats: what to do with samples longer than --seq.")
]
MaxBad = Annotated[
    int | None, typer.Option(min=0, help="Chats: bad records that are left out and named. [default: 0]")
]
Turns = Annotated[
    bool, typer.Option("--texts-as-turns", help="Chats: texts of prompt and completion are turns of a chat.")
]
DatasetSplit = Annotated[
    str | None, typer.Option("--dataset-split", help="Chats: the split of a Hugging Face dataset on disk.")
]


class ChatOptions(NamedTuple):
    """The options of `data pack` that only chats have."""

    chat: ChatFormats | None
    train: TrainOn | None
    template: Path | None
    variables: list[str] | None
    date: str | None
    sequence_length: int | None
    longer: LongerSamples | None
    max_bad: int | None
    texts_as_turns: bool
    split: str | None

    def require_no_effect_without_chat(self) -> None:
        """DataError where an option of chats is given for plain text."""
        from meshwright.errors import DataError

        given = [name for name, value in zip(self._fields[1:], self[1:], strict=True) if value]
        if self.chat is None and given:
            flag = _FLAGS.get(given[0], f"--{given[0].replace('_', '-')}")
            raise DataError(
                "this is for chats, and --chat is not given", where=flag, hint="add `--chat auto`"
            )


def pack_chats(
    paths: list[Path],
    output: Path,
    options: ChatOptions,
    *,
    tokenizer: str,
    eos: str | None,
    processes: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Pack chats and print what was packed."""
    from meshwright.data.chat.describe import trained_share
    from meshwright.data.chat.pack import pack_chats as pack
    from meshwright.data.chat.rows import find_chats
    from meshwright.data.sources import TokenFile

    job = _job(options, tokenizer=tokenizer, eos=eos)
    chats = find_chats(paths, split=options.split)
    total = chats.num_bytes
    count = processes or (os.cpu_count() or 1 if total >= _MIN_BYTES_FOR_PROCESSES else 1)
    with progress_bar("packing", total, quiet=quiet) as advance:
        packed = pack(chats, output, job, num_processes=count, progress=advance)
    facts = packed.manifest.model_dump() | {"path": str(output), **plain(packed.counts)}
    if as_json:
        return print_json(facts)
    longest = trained_share(TokenFile.open(output), None).longest
    return print_table(_packed_rows(facts, packed.manifest.chat, packed.counts, job, longest=longest))


def _job(options: ChatOptions, *, tokenizer: str, eos: str | None) -> "ChatJob":
    from meshwright.data.chat.job import ChatJob
    from meshwright.data.tokenize import HuggingFaceTokenizer, open_tokenizer
    from meshwright.errors import DataError

    opened = open_tokenizer(tokenizer, eos=eos)
    if not isinstance(opened, HuggingFaceTokenizer):
        hint = "pass the folder of the model: --tokenizer path/to/model"
        raise DataError("the byte tokenizer has no special tokens for turns", where="--tokenizer", hint=hint)
    chosen = options.chat
    job = ChatJob(
        tokenizer=str(opened.path),
        eos=eos,
        date=_date(options.date),
        chat_format=None if chosen in (None, ChatFormats.AUTO) else chosen.value,
        trained=(options.train or TrainOn.ASSISTANT).value,
        template=None if options.template is None else str(options.template),
        variables=dict(_variable(each) for each in options.variables or []),
        texts_are_turns=options.texts_as_turns,
        sequence_length=options.sequence_length,
        longer=_longer(options),
        max_bad=options.max_bad or 0,
    )
    _require_read(job)
    return job


def _require_read(job: "ChatJob") -> None:
    """Refuse a variable that the template does not read."""
    from meshwright.errors import DataError

    template = job.open_template() if job.variables else None
    unread = template.unread(job.variables) if template is not None else []
    if template is not None and unread:
        fact = f"the chat template reads no variable {unread[0]!r}"
        raise DataError(fact, where="--template-var", hint=f"look for its name in {template.where}")


def _longer(options: ChatOptions) -> Any:
    from meshwright.errors import DataError

    if options.longer is not None and options.sequence_length is None:
        raise DataError("without --seq no sample is too long", where="--longer", hint="add --seq")
    return (options.longer or LongerSamples.REFUSE).value


def _date(text: str | None) -> datetime.date:
    from meshwright.errors import DataError

    try:
        return datetime.date.fromisoformat(text) if text else datetime.date.today()
    except ValueError as error:
        raise DataError(f"{text!r} is no date", where="--date", hint="write YYYY-MM-DD") from error


def _variable(text: str) -> tuple[str, Any]:
    from meshwright.errors import DataError

    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        hint = "write NAME=VALUE, such as enable_thinking=false"
        raise DataError(f"{text!r} is no variable", where="--template-var", hint=hint)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _packed_rows(
    facts: dict[str, Any],
    chat: "ChatFacts | None",
    counts: "ChatCounts",
    job: "ChatJob",
    *,
    longest: int,
) -> list[tuple[str, str]]:
    assert chat is not None
    kind = "pairs" if chat.kind == "pairs" else "samples"
    files = len(facts["source_files"])
    rows = [
        ("dataset", facts["path"]),
        (kind, f"{counts.num_samples:,} from {files:,} file{'' if files == 1 else 's'}"),
        ("tokens", f"{facts['num_tokens']:,} as {facts['dtype']}"),
        ("trained", _share(chat.num_trained, facts["num_tokens"])),
        ("masks", _masks(chat)),
        ("end of turn", _end_of_turn(chat)),
        ("longest", f"{longest:,} tokens{' (both answers)' if kind == 'pairs' else ''}"),
    ]
    rows += _left_out(counts, job)
    rows += [("bad record", f"{where}: {fact}") for fact, where, _ in counts.bad[:_SHOWN_BAD]]
    length = job.sequence_length or longest
    use = f"data.path={facts['path']} data.packing=whole data.sequence_length={length}"
    return [*rows, ("use it with", use)]


def _left_out(counts: "ChatCounts", job: "ChatJob") -> list[tuple[str, str]]:
    numbers = [
        (counts.num_dropped, "sample", f" longer than {job.sequence_length} tokens"),
        (counts.num_without_targets, "sample", " without any trained token"),
        (len(counts.bad), "bad record", ""),
    ]
    rows = [("left out", f"{_counted(count, what)}{rest}") for count, what, rest in numbers if count]
    if counts.num_truncated:
        rows.append(
            ("truncated", f"{_counted(counts.num_truncated, 'sample')} to {job.sequence_length} tokens")
        )
    rows += [
        ("not written", f"{name} of {_counted(count, 'sample')}: left out by the template")
        for name, count in sorted(counts.unread.items())
    ]
    template = job.open_template() if counts.num_rendered else None
    unnamed = template.unnamed_tokens() if template is not None else []
    return rows + [("not written", f"{name}: tokenizer_config.json names none") for name in unnamed]


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _share(num_trained: int, num_tokens: int) -> str:
    return f"{_counted(num_trained, 'token')}, {num_trained / num_tokens:.1%} of all"


def _masks(chat: "ChatFacts") -> str:
    if chat.masks == "none":
        return "texts and tokens as given, without a chat template"
    turns = {"assistant": "every answer", "last": "the last answer", "all": "every token"}[chat.trained]
    date = f", date {chat.date}" if chat.date else ""
    return f"{turns} is trained; {chat.masks}, chat template {chat.template_hash}{date}"


def _end_of_turn(chat: "ChatFacts") -> str:
    total = sum(chat.end_tokens.values())
    special = [
        f"{token} is trained ({_counted(count, 'turn')})" for token, count in chat.end_tokens.items() if token
    ]
    missing = chat.end_tokens.get("", 0)
    if missing:
        special.append(
            f"{missing:,} of {total:,} turns end with text: the model does not learn to stop there"
        )
    return "; ".join(special) or "no trained turn ends with a special token"


def inspect_chats(dataset: "TokenFile", count: int, sequence_length: int | None, *, as_json: bool) -> None:
    """Print conversations with their trained spans, and what a sequence length loses."""
    from meshwright.data.chat.describe import conversations, trained_share

    chat = dataset.manifest.chat
    assert chat is not None
    share, shown = trained_share(dataset, sequence_length), conversations(dataset, count)
    if as_json:
        facts = {"path": dataset.name, **dataset.manifest.model_dump(), "fingerprint": dataset.fingerprint}
        return print_json({**facts, "share": plain(share), "conversations": [_as_json(one) for one in shown]})
    rows = dataset_rows(dataset)
    rows += [
        ("kind", chat.kind),
        ("trained", _share(chat.num_trained, share.num_tokens)),
        ("masks", _masks(chat)),
        ("end of turn", _end_of_turn(chat)),
        *_length_rows(share, sequence_length),
    ]
    print_table(rows)
    return _print_conversations(shown)


def _length_rows(share: "TrainedShare", sequence_length: int | None) -> list[tuple[str, str]]:
    longest = ("longest", f"{share.longest:,} tokens")
    if sequence_length is None:
        return [longest]
    longer = f"{_counted(share.num_longer, 'sample')} {'is' if share.num_longer == 1 else 'are'} longer"
    lost = f"{longer}; {share.num_without_targets:,} would lose all targets"
    return [longest, (f"at {sequence_length:,}", lost)]


def packing_rows(packing: "WholePacking") -> list[tuple[str, str]]:
    """How one sequence length packs whole samples, the only packing of chats."""
    at = f"in {packing.sequence_length:,}s"
    longer = _counted(packing.num_longer, "sample")
    refused = [("longer", f"{longer}, left out of these numbers: a run refuses them")]
    if packing.num_sequences == 0:
        return [(at, "every sample is longer")]
    return [
        (at, f"{_counted(packing.num_sequences, 'sequence')} of whole samples (best fit)"),
        *(refused if packing.num_longer else []),
        ("whole samples", f"{packing.whole_share:.2%} of positions are tokens, the rest padding"),
        ("trained", f"{packing.trained_share:.2%} of positions have a trained target"),
        ("without packing", f"{packing.padded_share:.1%} of positions would be tokens"),
    ]


def _as_json(one: "Conversation") -> dict[str, Any]:
    spans = [span._asdict() for span in one.spans]
    return {"name": one.name, "num_tokens": one.num_tokens, "num_trained": one.num_trained, "spans": spans}


def _print_conversations(shown: "list[Conversation]") -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for one in shown:
        share = f"{one.num_trained:,} of {one.num_tokens:,} tokens trained"
        console.print(f"\n{one.name}: {share}, marked {_OPEN}so{_CLOSE}", markup=False)
        text = Text()
        for span in one.spans:
            text.append(_printable(_marked(span)), style="green" if span.weight else "")
        for line in text.split("\n"):
            # A file keeps the lines of the conversation; a terminal gets them wrapped behind the bar.
            parts = line.wrap(console, console.width - len(_BAR)) if console.is_terminal else []
            for part in parts or [line]:
                console.print(Text(_BAR) + part)


def _marked(span: "Span") -> str:
    if not span.weight:
        return span.text
    weight = "" if span.weight == 1 else f"{span.weight:g}: "
    return f"{_OPEN}{weight}{span.text}{_CLOSE}"


def _printable(text: str) -> str:
    """Text without control characters, which must not reach the terminal."""
    return "".join(each if each.isprintable() or each == "\n" else "·" for each in text)
