"""Data loading: ours and the installed peers on the same data, as a share of the raw limit of the same run.

    python -m bench.data --work DIR --out bench/results/data_<machine>_<date>.md
    python -m bench.data --work DIR --only bytes,tokens   (bytes images tokens start packing text readers)

The generated data (about 1 GB) is kept in DIR/meshwright-bench-data for the next run; nothing else in DIR is
touched. Rates in one process are per CPU second, because wall time means little on a machine with other
work; those with workers are per second of wall time. Contenders of a part take turns; the best of all rounds
counts for each. A peer that is not installed, or does not import, is named.
"""

import argparse
import importlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from bench import data_corpora, data_peers
from bench.data_readers import readers_part
from tokenizers import Tokenizer

from meshwright.bench.machine_facts import machine_facts, package_versions
from meshwright.data import pack_parts
from meshwright.data.batches import build_batches
from meshwright.data.decode import decode_image
from meshwright.data.loader import LoaderKeywords, open_loader
from meshwright.data.order import SampleOrder
from meshwright.data.readers.tar import TarShards
from meshwright.data.records import Record
from meshwright.data.sources import TokenFile
from meshwright.data.token_loader import TokenLoader
from meshwright.data.tokenize import open_tokenizer
from meshwright.spec import DataSpec

SEQUENCE, BATCH = 2048, 8
OWN_FOLDER = "meshwright-bench-data"
"""Where everything is written, inside of the folder that the user names."""
PEERS = (
    "webdataset",
    "litdata",
    "megatron-energon",
    "mosaicml-streaming",
    "simplejpeg",
    "pillow",
    "tokenizers",
)


class Row(NamedTuple):
    """One line of a table."""

    name: str
    rate: float
    unit: str
    share: float | None
    """Of the limit in the first line."""
    spread: float
    """The slowest round as a share of the best one."""


def main() -> None:
    """Measure the parts and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    sections: list[str] = []
    for name in arguments.only.split(","):
        sections.append(PARTS[name](arguments.work / OWN_FOLDER, arguments.rounds))
        print(sections[-1], flush=True)
        if arguments.out:
            arguments.out.write_text(_page(sections))


def bytes_part(work: Path, rounds: int) -> str:
    """Small images as bytes, globally shuffled, in one process."""
    folder = data_corpora.image_shards(work / "images")
    contenders: dict[str, Callable[[], int]] = {"indexed pread (the limit)": _indexed_pread(folder)}
    mapped, read = TarShards(folder, access="map"), TarShards(folder, access="read")
    _our_records(mapped)
    contenders["ours, mapped"] = lambda: _our_records(mapped)
    contenders["ours, mapped, opened anew: the first epoch"] = lambda: _our_records(
        TarShards(folder, access="map")
    )
    contenders["ours, pread"] = lambda: _our_records(read)
    missing: list[str] = []
    for name, (module, build) in data_peers.BYTES.items():
        if _imports(module, missing, name):
            contenders[name] = lambda build=build: sum(1 for _ in build(folder))
    rows = _rates(contenders, rounds, clock=time.process_time, unit="samples per CPU second")
    return _table("Tar of 10 KB images, bytes out, globally shuffled, in process", rows, missing)


def images_part(work: Path, rounds: int) -> str:
    """The same images decoded, with two workers."""
    folder = data_corpora.image_shards(work / "images")
    contenders: dict[str, Callable[[], int]] = {
        "ours, two threads": lambda: _our_images(folder),
        "torch DataLoader, our reader and decoder": lambda: _count(data_peers.our_decoder_in_torch(folder)),
    }
    missing: list[str] = []
    for name, (module, build) in data_peers.IMAGES.items():
        if _imports(module, missing, name):
            contenders[name] = lambda build=build: _count(build(folder))
    rows = _rates(contenders, rounds, clock=time.perf_counter, unit="images per second")
    return _table("JPEG decode to 224 x 224, batches of 50, two workers", rows, missing)


def tokens_part(work: Path, rounds: int) -> str:
    """Token rows of 2048, batches of 8, shuffled, int64 out."""
    dataset = TokenFile.open(data_corpora.token_dataset(work / "tokens"))
    loader = TokenLoader(DataSpec(path=dataset.name, sequence_length=SEQUENCE, batch_sequences=BATCH))
    contenders: dict[str, Callable[[], int]] = {
        "gather from a memory map (the limit)": lambda: _gathered(dataset),
        "ours, TokenLoader": lambda: _our_loader(loader),
        "ours, complete batches (targets, positions, loss weights)": lambda: _our_batches(work / "tokens"),
        "torch DataLoader, map-style": lambda: _torch_rows(dataset),
    }
    rows = _rates(contenders, rounds, clock=time.process_time, unit="tokens per CPU second")
    return _table("Tokens: sequences of 2048, batches of 8, shuffled, int64", rows, [])


def start_part(work: Path, rounds: int) -> str:
    """Seconds until the first batch of a terabyte."""
    folder = data_corpora.sparse_terabyte(work / "terabyte")
    seconds = min(_first_batch(folder) for _ in range(rounds))
    return (
        "## First batch of 1 TB\n\nOpening a packed dataset of 5 x 10^11 tokens and 10^6 documents (a sparse "
        f"file) and making the first shuffled batch of {BATCH} sequences: {1e3 * seconds:.1f} ms.\n"
    )


def packing_part(work: Path, rounds: int) -> str:
    """Fill and speed of whole-document packing."""
    try:
        packing = importlib.import_module("meshwright.data.packing")
    except ImportError:
        return "## Packing\n\nThere is no packing of whole documents in this version.\n"
    lengths = np.random.default_rng(2).lognormal(6.5, 1.3, 400_000).astype(np.int64).clip(8, 200_000)
    ends, best, plan = np.cumsum(lengths), float("inf"), None
    for _ in range(rounds):
        started = time.process_time()
        plan = packing.plan_packing(ends, 8192)
        best = min(best, time.process_time() - started)
    assert plan is not None
    return (
        f"## Packing\n\n{len(lengths):,} documents of log-normal lengths (mean {lengths.mean():.0f}, longest "
        f"{lengths.max():,}) into sequences of 8192: fill {plan.fill(8192):.4f}, "
        f"{len(lengths) / best / 1e6:.2f} M documents per CPU second.\n"
    )


def text_part(work: Path, rounds: int) -> str:
    """`data pack` against the tokenizer's own batch speed, both on all cores."""
    lines, tokenizer = data_corpora.text_and_tokenizer(work / "text", 8 << 20)
    texts = [json.loads(line)["text"] for line in lines.read_text().splitlines()]
    theirs = Tokenizer.from_file(str(tokenizer))
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    contenders: dict[str, Callable[[], int]] = {
        "tokenizer's encode_batch, all cores": lambda: (
            len(theirs.encode_batch(texts)) and int(megabytes * 1e6)
        ),
        "tokenizer's encode_batch_fast, all cores": lambda: (
            len(theirs.encode_batch_fast(texts)) and int(megabytes * 1e6)
        ),
        "meshwright data pack": lambda: _packed(lines, tokenizer, work / "packed") and int(megabytes * 1e6),
    }
    rows = _rates(contenders, rounds, clock=_cpu_seconds, unit="bytes of text per CPU second")
    return _table(f"Text to tokens: {megabytes:.0f} MB of .jsonl, BPE of 32,000 tokens", rows, [])


PARTS: dict[str, Callable[[Path, int], str]] = {
    "bytes": bytes_part,
    "images": images_part,
    "tokens": tokens_part,
    "start": start_part,
    "packing": packing_part,
    "text": text_part,
    "readers": readers_part,
}


def _indexed_pread(folder: Path) -> Callable[[], int]:
    """Reads of every sample's byte range by an index in memory: what the storage gives."""
    source = TarShards(folder)
    names = sorted(path.name for path in folder.glob("*.tar"))
    files = [os.open(folder / name, os.O_RDONLY) for name in names]
    offsets = [np.fromfile(folder / f"{name}.idx", dtype="<u8").astype(int).tolist() for name in names]
    ranges = [
        (file, end - start, start)
        for file, at in zip(files, offsets, strict=True)
        for start, end in pairwise(at)
    ]
    order = SampleOrder(len(source), seed=0).sample_ids(0, len(source)).tolist()

    def read() -> int:
        pread = os.pread
        for index in order:
            file, count, start = ranges[index]
            pread(file, count, start)
        return len(order)

    return read


def _our_records(source: TarShards) -> int:
    record = source.record
    for index in SampleOrder(len(source), seed=0).sample_ids(0, len(source)).tolist():
        record(index)
    return len(source)


def _our_images(folder: Path) -> int:
    """Two threads of our loader; the decoder releases the interpreter lock."""
    settings: LoaderKeywords = {"transform": _image, "num_workers": 2, "workers": "threads", "max_epochs": 1}
    loader = open_loader(folder, batch_samples=data_peers.BATCH, **settings)
    count = sum(len(images) for images in loader)
    loader.close()
    return count


def _image(record: Record, rng: np.random.Generator) -> torch.Tensor:
    content = record["jpg"]
    assert isinstance(content, bytes)
    return torch.from_numpy(decode_image(content))


def _count(batches: Iterator[Any]) -> int:
    return sum(len(batch[0] if isinstance(batch, (tuple, list)) else batch) for batch in batches)


def _gathered(dataset: TokenFile) -> int:
    rows = dataset.tokens[: len(dataset.tokens) // SEQUENCE * SEQUENCE].reshape(-1, SEQUENCE)
    order = np.random.default_rng(0).permutation(len(rows))[:16_000].reshape(-1, BATCH)
    return sum(torch.from_numpy(rows[ids].astype(np.int64)).numel() for ids in order)


def _our_loader(loader: TokenLoader) -> int:
    return sum(next(loader)[:, :-1].numel() for _ in range(2000))


def _our_batches(folder: Path) -> int:
    spec = DataSpec(
        path=str(folder),
        sequence_length=SEQUENCE,
        batch_sequences=BATCH,
        microbatch_sequences=BATCH,
        documents="joined",
    )
    batches = build_batches(spec, seed=0, vocab_size=257)
    tokens = sum(next(batches).microbatches[0].tokens_BS.numel() for _ in range(2000))
    batches.close()
    return tokens


def _torch_rows(dataset: TokenFile) -> int:
    rows = dataset.tokens[: len(dataset.tokens) // SEQUENCE * SEQUENCE].reshape(-1, SEQUENCE)

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: int) -> Any:
            return torch.from_numpy(rows[index].astype(np.int64))

    order = np.random.default_rng(0).permutation(len(rows))[:16_000].tolist()
    loader = torch.utils.data.DataLoader(Rows(), batch_size=BATCH, sampler=order)
    return sum(batch.numel() for batch in loader)


def _first_batch(folder: Path) -> float:
    spec = DataSpec(
        path=str(folder), sequence_length=SEQUENCE, batch_sequences=BATCH, microbatch_sequences=BATCH
    )
    started = time.perf_counter()
    batches = build_batches(spec, seed=0, vocab_size=257)
    next(batches)
    seconds = time.perf_counter() - started
    batches.close()
    return seconds


def _packed(lines: Path, tokenizer: Path, target: Path) -> int:
    shutil.rmtree(target, ignore_errors=True)
    pack_parts.split_input.__defaults__ = (2 << 20,)  # enough pieces for a small file
    packed = pack_parts.pack_in_parts(
        [lines], target, tokenizer=open_tokenizer(str(tokenizer)), num_processes=os.cpu_count() or 1
    )
    return packed.manifest.num_tokens


def _imports(module: str, missing: list[str], name: str) -> bool:
    try:
        importlib.import_module(module)
    except Exception as error:
        missing.append(f"{name}: skipped, {type(error).__name__}: {str(error).splitlines()[0]}")
        return False
    return True


def _rates(
    contenders: dict[str, Callable[[], int]], rounds: int, *, clock: Callable[[], float], unit: str
) -> list[Row]:
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            started = clock()
            count = run()
            found[name].append(count / max(1e-9, clock() - started))
    limit = max(next(iter(found.values())))
    return [
        Row(name, max(rates), unit, max(rates) / limit, min(rates) / max(rates))
        for name, rates in found.items()
    ]


def _cpu_seconds() -> float:
    """CPU time of this process and of its worker processes that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _table(title: str, rows: list[Row], missing: list[str]) -> str:
    head = f"| | {rows[0].unit} | share of the first line | slowest round / best |"
    lines = [f"## {title}\n", head, "|---|---|---|---|"]
    lines += [f"| {row.name} | {_shown(row.rate)} | {row.share:.0%} | {row.spread:.0%} |" for row in rows]
    return "\n".join(lines + [""] + [f"- {each}" for each in missing]) + "\n"


def _shown(rate: float) -> str:
    return f"{rate / 1e6:,.1f} M" if rate >= 1e7 else f"{rate:,.0f}"


def _page(sections: list[str]) -> str:
    facts = machine_facts(torch.device("cpu"))
    versions = package_versions(PEERS)
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    head = (
        f"# Data loading\n\n{facts['device']}, {os.cpu_count()} cores (shared with other work), page cache "
        f"warm; Python {facts['python']}, torch {facts['torch']}; {shown}; {facts['date']}. "
        "Best of the rounds; contenders take turns. `python -m bench.data`.\n"
    )
    return "\n".join([head, *sections])


if __name__ == "__main__":
    main()
