"""The data that `bench.data` measures on: images in tar shards, tokens, texts, a sparse terabyte."""

import io
import json
import site
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.data.readers.tar_index import build_index
from meshwright.data.sources import DATASET_VERSION, Manifest, TokenizerFacts
from meshwright.data.tokenize import ByteTokenizer
from meshwright.data.write import new_dataset

NUM_SHARDS, SHARD_SAMPLES = 20, 1000
NUM_TOKENS, DOCUMENT_TOKENS = 100_000_000, 1000


def image_shards(folder: Path) -> Path:
    """20,000 JPEG images of about 10 KB with captions in 20 tar shards, indexed."""
    if (folder / ".nv-meta" / ".info.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)

    def jpeg() -> bytes:
        coarse = Image.fromarray(random.integers(0, 255, (20, 20, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((224, 224), Image.Resampling.BICUBIC)).astype(int)
        noisy = (smooth + random.integers(-18, 18, (224, 224, 1))).clip(0, 255).astype(np.uint8)
        stream = io.BytesIO()
        Image.fromarray(noisy).save(stream, "JPEG", quality=60)
        return stream.getvalue()

    pictures = [jpeg() for _ in range(400)]
    for shard in range(NUM_SHARDS):
        with tarfile.open(folder / f"shard-{shard:04d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(shard * SHARD_SAMPLES, (shard + 1) * SHARD_SAMPLES):
                fields = {"jpg": pictures[number % 400], "txt": f"caption number {number}".encode()}
                for field, content in fields.items():
                    member = tarfile.TarInfo(f"{number:08d}.{field}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    build_index(folder)
    return folder


def token_dataset(folder: Path) -> Path:
    """100 million tokens of 16 bits, in documents of 1000."""
    if folder.exists():
        return folder
    random = np.random.default_rng(1)
    with new_dataset(folder, ByteTokenizer()) as writer:
        lengths = np.full(1000, DOCUMENT_TOKENS, dtype=np.int64)
        for _ in range(NUM_TOKENS // int(lengths.sum())):
            tokens = random.integers(0, 257, int(lengths.sum()), dtype=np.uint16)
            writer.append_encoded([tokens.tobytes()], lengths)
        writer.finish(["random"])
    return folder


def sparse_terabyte(folder: Path) -> Path:
    """A packed dataset of 5 x 10^11 tokens whose file has no blocks on the disk."""
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    num_tokens, num_documents = 500_000_000_000, 1_000_000
    with (folder / "tokens.bin").open("wb") as file:
        file.truncate(2 * num_tokens)
    ends = np.arange(1, num_documents + 1, dtype=np.int64) * (num_tokens // num_documents)
    ends.tofile(folder / "documents.bin")
    manifest = Manifest(
        version=DATASET_VERSION,
        dtype="uint16",
        num_tokens=num_tokens,
        num_documents=num_documents,
        vocab_size=257,
        tokenizer=TokenizerFacts(name="bytes", hash=ByteTokenizer.hash, eos_id=256),
        sha256={"tokens.bin": "0" * 64, "documents.bin": "0" * 64},
        source_files=["sparse"],
        modified_ns={name: (folder / name).stat().st_mtime_ns for name in ("tokens.bin", "documents.bin")},
    )
    (folder / "dataset.json").write_text(json.dumps(manifest.model_dump()))
    return folder


def text_and_tokenizer(folder: Path, text_bytes: int) -> tuple[Path, Path]:
    """A .jsonl file of English and code (of the installed packages), and a BPE tokenizer trained on it."""
    lines, tokenizer_path = folder / "text.jsonl", folder / "tokenizer.json"
    if lines.is_file() and tokenizer_path.is_file():
        return lines, tokenizer_path
    folder.mkdir(parents=True, exist_ok=True)
    texts, total = [], 0
    for root in site.getsitepackages():
        for path in sorted(Path(root).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            if 2000 < len(text) < 200_000:
                texts.append(text)
                total += len(text)
            if total >= text_bytes:
                break
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:600], trainer)
    tokenizer.save(str(tokenizer_path))
    return lines, tokenizer_path
