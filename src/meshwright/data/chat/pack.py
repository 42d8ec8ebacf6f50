"""Chats to a packed dataset: tokens, ends and loss weights, on all cores.

Every unit of input is encoded into files of a hidden folder beside the dataset, `.NAME.packing`; at the end
they are joined in order. After a kill, the same command finds the finished units and encodes only the rest.
The dataset appears under its name only when it is complete.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.data.chat.conversation import Conversation, Pair, Sample, read_sample
from meshwright.data.chat.job import ChatCounts, ChatJob
from meshwright.data.chat.rows import ChatFiles, Row
from meshwright.data.chat.targets import ChatEncoder, Encoded
from meshwright.data.chat.template import TEMPLATE_FILE, ChatTemplate
from meshwright.data.chat.values import WRITTEN_FIELDS, names_of
from meshwright.data.pack_parts import end_with_parent, job_folder, writing_parts
from meshwright.data.sources import WEIGHTS_DTYPE, ChatFacts, Manifest, token_dtype
from meshwright.data.text_input import Piece
from meshwright.data.write import new_dataset, require_absent
from meshwright.errors import DataError

# Chats cost much more time per byte than plain text: a unit of this size takes about a second.
PIECE_BYTES, _MAX_PIECE_BYTES, _NUM_PIECES = 1 << 20, 1 << 25, 256
_GROUP_ROWS, _GROUP_BYTES = 256, 1 << 22
_COPY_BYTES = 1 << 24


class PackedChats(NamedTuple):
    """The result of packing chats."""

    manifest: Manifest
    counts: ChatCounts


def pack_chats(
    chats: ChatFiles,
    folder: Path,
    job: ChatJob,
    *,
    num_processes: int = 1,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> PackedChats:
    """Encode the chats into a new dataset with loss weights; `progress` gets the number of bytes read."""
    require_absent(folder)
    encoder = job.open_encoder()
    hidden = folder.with_name(f".{folder.name}.packing")
    piece_bytes = min(max(PIECE_BYTES, chats.num_bytes // _NUM_PIECES), _MAX_PIECE_BYTES)
    units = chats.pieces(piece_bytes)
    worker = _Worker(hidden, chats, job, encoder)
    with job_folder(hidden, _settings(chats, job, encoder, piece_bytes)):
        with writing_parts(hidden):
            try:
                counts = _encode_units(worker, units, num_processes=num_processes, progress=progress)
                counts.require_few_bad(job.max_bad)
                _require_samples(counts, chats)
            except DataError:  # the next call has other input or settings, and could not continue this one
                shutil.rmtree(hidden, ignore_errors=True)
                raise
        packed = PackedChats(_joined(worker, len(units), folder, counts), counts)
        shutil.rmtree(hidden, ignore_errors=True)
    return packed


def _joined(worker: "_Worker", num_units: int, folder: Path, counts: ChatCounts) -> Manifest:
    """The dataset, made of the files of all units."""
    hidden, job = worker.folder, worker.job
    template = worker.encoder.template if counts.num_rendered else None
    with new_dataset(folder, worker.encoder.tokenizer, is_weighted=True) as writer:
        for number in range(num_units):
            lengths = np.fromfile(hidden / f"{number}.lengths", dtype=np.int64)
            if len(lengths):
                writer.append_encoded(_chunks(hidden / f"{number}.tokens"), lengths)
                writer.append_weights([np.fromfile(hidden / f"{number}.weights", dtype=WEIGHTS_DTYPE)])
        if template is not None:
            writer.add_file(TEMPLATE_FILE, template.text().encode())
        sources = [str(file) for file in worker.chats.files]
        return writer.finish(sources, chat=_facts(job, template, counts))


def _facts(job: ChatJob, template: ChatTemplate | None, counts: ChatCounts) -> ChatFacts:
    masks = "none" if template is None else "generation tag" if template.is_tagged() else "prefix rendering"
    return ChatFacts(
        kind="pairs" if "pairs" in counts.kinds else "chats",
        trained=job.trained,
        masks=masks,
        template_hash=None if template is None else template.hash,
        date=str(job.date) if template is not None and template.reads_date else None,
        variables=job.variables,
        special_tokens={} if template is None else dict(template.special_tokens),
        num_trained=counts.num_trained,
        end_tokens=dict(counts.ends),
    )


def _require_samples(counts: ChatCounts, chats: ChatFiles) -> None:
    where = ", ".join(str(file) for file in chats.files[:3])
    if len(counts.kinds) > 1:
        fact = f"{counts.kinds['pairs']} records are pairs and {counts.kinds['chats']} are not"
        raise DataError(fact, where=where, hint="pack them into two datasets")
    if counts.num_samples == 0:
        left_out = counts.num_dropped + counts.num_without_targets
        if counts.bad and not left_out:
            fact, where, hint = counts.bad[0]
            raise DataError(f"every record is bad; the first: {fact}", where=where, hint=hint)
        fact = (
            f"no sample is left to train on: all {left_out} are left out"
            if left_out
            else "there is no record"
        )
        hint = "look at the input, --train and --seq" if left_out else "each line of a file is one chat"
        raise DataError(fact, where=where, hint=hint)


def _settings(chats: ChatFiles, job: ChatJob, encoder: ChatEncoder, piece_bytes: int) -> list[Any]:
    """Everything that the units of an earlier call must have in common with those of this one."""
    inside = [each for file in chats.files for each in (file.rglob("*") if file.is_dir() else [file])]
    states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(inside)]
    settings = asdict(job) | {"date": str(job.date)}
    tokenizer, template = encoder.tokenizer, encoder.template
    # Special tokens are named in files beside the tokenizer, which may change between two calls.
    rendering = [template.hash, dict(template.special_tokens)] if template else None
    return [states, chats.split, settings, tokenizer.hash, tokenizer.eos_id, rendering, piece_bytes]


def _encode_units(
    worker: "_Worker", units: Sequence[Piece], *, num_processes: int, progress: Callable[[int], object]
) -> ChatCounts:
    folder = worker.folder
    left = [number for number in range(len(units)) if not (folder / f"{number}.json").is_file()]
    done = set(range(len(units))).difference(left)
    progress(sum(worker.chats.bytes_of(units[number]) for number in done))
    if num_processes == 1 or len(left) == 1:
        for number in left:
            worker.encode_unit(number, units[number], progress).require_few_bad(worker.job.max_bad)
    else:
        _in_processes(worker, left, units, num_processes, progress)
    total = ChatCounts()
    for number in range(len(units)):
        total.add(ChatCounts.of(json.loads((folder / f"{number}.json").read_text())))
    return total


def _in_processes(
    worker: "_Worker",
    left: Sequence[int],
    units: Sequence[Piece],
    num_processes: int,
    progress: Callable[[int], object],
) -> None:
    # forkserver: the calling process may have threads, of which a fork would inherit only the locks.
    context = get_context("forkserver")
    opened = (worker.folder, worker.chats, worker.job)
    with ProcessPoolExecutor(min(num_processes, max(1, len(left))), context, _open_worker, opened) as pool:
        running = {pool.submit(_encode_in_process, number, units[number]): number for number in left}
        try:
            for future in as_completed(running):
                future.result().require_few_bad(worker.job.max_bad)
                progress(worker.chats.bytes_of(units[running[future]]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Process:
    """What a worker process keeps between its units."""

    worker: "_Worker"


def _open_worker(folder: Path, chats: ChatFiles, job: ChatJob) -> None:
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core for each process, not all for each
    _Process.worker = _Worker(folder, chats, job, job.open_encoder())


def _encode_in_process(number: int, piece: Piece) -> ChatCounts:
    return _Process.worker.encode_unit(number, piece, lambda num_bytes: None)


@dataclass(frozen=True)
class _Worker:
    """What encodes one unit."""

    folder: Path
    chats: ChatFiles
    job: ChatJob
    encoder: ChatEncoder

    def encode_unit(self, number: int, piece: Piece, progress: Callable[[int], object]) -> ChatCounts:
        """Write the files of one unit; its counts are written last, when it is complete."""
        counts, lengths = ChatCounts(), list[int]()
        dtype = token_dtype(self.encoder.tokenizer.vocab_size)
        paths = [self.folder / f"{number}.{name}" for name in ("tokens", "weights")]
        with paths[0].open("wb") as tokens, paths[1].open("wb") as weights:
            for rows in _groups(self.chats.rows(piece)):
                for each in self._encoded(rows, counts):
                    tokens.write(each.tokens.astype(dtype).tobytes())
                    weights.write(each.weights.astype(WEIGHTS_DTYPE).tobytes())
                    lengths.append(len(each.tokens))
                progress(sum(row.num_bytes for row in rows))
                if len(counts.bad) > self.job.max_bad:
                    return counts
        np.array(lengths, dtype=np.int64).tofile(self.folder / f"{number}.lengths")
        partial = self.folder / f"{number}.json.partial"
        partial.write_text(json.dumps(asdict(counts)))
        partial.rename(self.folder / f"{number}.json")
        return counts

    def _encoded(self, rows: list[Row], counts: ChatCounts) -> Iterator[Encoded]:
        """The documents of a group of records: one of each chat, chosen and rejected of each pair."""
        groups: list[tuple[Row, list[Sample]]] = []
        for row in rows:
            try:
                groups.append((row, self._samples(row)))
            except DataError as error:
                _note(counts, row.located(error))
        found = iter(self.encoder.encode([(sample, row.where) for row, group in groups for sample in group]))
        for row, group in groups:
            documents = [next(found) for _ in group]
            error = next((each for each in documents if isinstance(each, DataError)), None)
            if error is not None:
                _note(counts, row.located(error))
                continue
            ready = [each for each in documents if isinstance(each, Encoded)]
            try:
                kept = self._kept(ready, row, counts)
            except DataError as error:
                _note(counts, row.located(error))
                continue
            counts.num_rendered += bool(kept) and any(isinstance(each, Conversation) for each in group)
            for name in self._unread(group) | {name for each in ready for name in each.unwritten}:
                counts.unread[name] = counts.unread.get(name, 0) + 1
            yield from kept

    def _samples(self, row: Row) -> list[Sample]:
        if row.trouble is not None:
            raise row.trouble
        sample = self._sample(row)
        if isinstance(sample, Pair) and self.job.trained == "all":
            hint = "leave out --train: what follows the common prompt is trained"
            raise DataError("`--train all` would train the prompts of pairs", where=row.where, hint=hint)
        return [sample.chosen, sample.rejected] if isinstance(sample, Pair) else [sample]

    def _sample(self, row: Row) -> Sample | Pair:
        job = self.job
        try:
            return read_sample(
                row.record, chat_format=job.chat_format, where=row.where, texts_are_turns=job.texts_are_turns
            )
        except RecursionError:
            hint = "remove the record, or write the nested value as JSON text"
            raise DataError("the record is nested too deeply", where=row.where, hint=hint) from None

    def _unread(self, samples: list[Sample]) -> set[str]:
        """Fields of the conversations whose text the template leaves out."""
        template = self.encoder.template
        chats = [sample for sample in samples if isinstance(sample, Conversation)]
        if template is None or not chats:
            return set()
        fields = {name for chat in chats for message in chat.messages for name in message}
        fields |= {"tools"} if any(chat.tools for chat in chats) else set()
        return {name for name in fields & WRITTEN_FIELDS if not any(map(template.names, names_of(name)))}

    def _kept(self, documents: list[Encoded], row: Row, counts: ChatCounts) -> list[Encoded]:
        """The documents of a record, at most as long as a sequence, or none."""
        _require_difference(documents, row)
        limit = self.job.sequence_length
        length = sum(len(each.tokens) for each in documents)
        if limit is not None and length > limit:
            if self.job.longer == "refuse":
                raise _too_long(row, documents, limit)
            if self.job.longer == "drop":
                counts.num_dropped += 1
                return []
            counts.num_truncated += 1
            documents = _truncated(documents, limit)
        if not all(each.num_trained for each in documents):
            counts.num_without_targets += 1
            return []
        kind = "pairs" if len(documents) == 2 else "chats"
        counts.kinds[kind] = counts.kinds.get(kind, 0) + 1
        counts.num_samples += 1
        counts.num_trained += sum(each.num_trained for each in documents)
        tokenizer = self.encoder.tokenizer
        for token in (token for each in documents for token in each.last_trained):
            end = (tokenizer.token(token) or "") if token in tokenizer.special_ids else ""
            counts.ends[end] = counts.ends.get(end, 0) + 1
        return documents


def _note(counts: ChatCounts, error: DataError) -> None:
    counts.bad.append((error.fact, error.where, error.hint))


def _require_difference(documents: list[Encoded], row: Row) -> None:
    if len(documents) == 2 and np.array_equal(documents[0].tokens, documents[1].tokens):
        fact = "'chosen' and 'rejected' have the same tokens"
        hint = "remove the record: what differs is not written by the template"
        raise DataError(fact, where=row.where, hint=hint)


def _too_long(row: Row, documents: list[Encoded], limit: int) -> DataError:
    lengths = " + ".join(f"{len(each.tokens):,}" for each in documents)
    what = "the pair has" if len(documents) == 2 else "the sample has"
    hint = "use a longer --seq, or `--longer drop` or `--longer truncate`"
    return DataError(
        f"{what} {lengths} tokens, more than the {limit:,} of a sequence", where=row.where, hint=hint
    )


def _truncated(documents: list[Encoded], limit: int) -> list[Encoded]:
    """The first tokens of each document: of a pair, half the sequence each."""
    share = limit // len(documents)
    return [_first_tokens(each, share) if len(each.tokens) > share else each for each in documents]


def _first_tokens(document: Encoded, count: int) -> Encoded:
    """The document up to this token; an answer that is cut off there ends without its end of turn."""
    tokens, weights = document.tokens[:count], document.weights[:count]
    is_trained = document.weights != 0
    turn_ends = np.flatnonzero(is_trained & ~np.append(is_trained[1:], np.False_))
    complete = document.last_trained[: int((turn_ends < count).sum())]
    is_cut = is_trained[count - 1] and is_trained[count]
    return Encoded(tokens, weights, [*complete, int(tokens[-1])] if is_cut else complete)


def _groups(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Records that are encoded at once: some hundreds, or a few that are large."""
    group: list[Row] = []
    for row in rows:
        group.append(row)
        if len(group) == _GROUP_ROWS or sum(each.num_bytes for each in group) >= _GROUP_BYTES:
            yield group
            group = []
    if group:
        yield group


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_COPY_BYTES):
            yield chunk
