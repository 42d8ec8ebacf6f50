"""Packs small chats and reads what is trained."""

import datetime
import json
from pathlib import Path
from typing import Any

from meshwright.data.chat.describe import conversations
from meshwright.data.chat.job import ChatJob
from meshwright.data.chat.pack import PackedChats, pack_chats
from meshwright.data.chat.rows import find_chats
from meshwright.data.sources import TokenFile


def chats(count: int = 40) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": f"question {index} " * (1 + index % 5)},
                      {"role": "assistant", "content": f"answer {index} " * (1 + index % 3)}]}
        for index in range(count)
    ]  # fmt: skip


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def pack(
    path: Path, folder: Path, tokenizer: Path, *, split: str | None = None, processes: int = 1, **options: Any
) -> PackedChats:
    job = ChatJob(str(tokenizer / "tokenizer.json"), None, datetime.date(2024, 7, 26), **options)
    return pack_chats(find_chats([path], split=split), folder, job, num_processes=processes)


def trained_texts(folder: Path) -> list[list[str]]:
    dataset = TokenFile.open(folder)
    found = conversations(dataset, dataset.manifest.num_documents)
    return [[span.text for span in one.spans if span.weight] for one in found]
