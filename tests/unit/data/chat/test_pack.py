"""Chats become a dataset with loss weights: the same from every format and on any number of processes."""

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset
from tests.support.chat_packing import chats, pack, trained_texts, write_lines
from tests.support.chat_templates import FAMILIES, write_tokenizer

from meshwright.data.chat import pack as packing
from meshwright.data.chat.describe import conversations, trained_share
from meshwright.data.chat.job import ChatCounts, ChatJob
from meshwright.data.packed_samples import PackedSamples
from meshwright.data.packing import plan_packing
from meshwright.data.sources import TokenFile
from meshwright.data.stream import open_stream
from meshwright.errors import DataError
from meshwright.spec import DataSpec

QWEN = next(family for family in FAMILIES if family.name == "qwen-2.5")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), QWEN, template=QWEN.template)


def test_answers_and_their_ends_are_trained(tmp_path: Path, tokenizer: Path) -> None:
    packed = pack(write_lines(tmp_path / "a.jsonl", chats(3)), tmp_path / "data", tokenizer)
    assert trained_texts(tmp_path / "data") == [
        ["answer 0 <|im_end|>"],
        ["answer 1 answer 1 <|im_end|>"],
        ["answer 2 answer 2 answer 2 <|im_end|>"],
    ]
    facts = packed.manifest.chat
    assert facts is not None
    assert (facts.kind, facts.masks, facts.end_tokens) == ("chats", "prefix rendering", {"<|im_end|>": 3})
    dataset = TokenFile.open(tmp_path / "data")
    assert dataset.damage() == [] and dataset.loss_weights is not None
    assert facts.num_trained == int((dataset.loss_weights != 0).sum())
    assert (tmp_path / "data" / "chat_template.jinja").read_text() == QWEN.template


def test_every_kind_of_file_gives_the_same_dataset(tmp_path: Path, tokenizer: Path) -> None:
    records = chats()
    write_lines(tmp_path / "a.jsonl", records)
    (tmp_path / "a.json").write_text(json.dumps(records))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    Dataset.from_list(records).save_to_disk(str(tmp_path / "saved"))
    prints = set()
    for name in ("a.jsonl", "a.json", "a.parquet", "saved"):
        pack(tmp_path / name, tmp_path / f"{name}.data", tokenizer)
        prints.add(TokenFile.open(tmp_path / f"{name}.data").fingerprint)
    assert len(prints) == 1


def test_processes_and_pieces_change_nothing(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "a.jsonl", chats())
    pack(path, tmp_path / "one", tokenizer)
    monkeypatch.setattr(packing, "PIECE_BYTES", 1500)
    pack(path, tmp_path / "two", tokenizer, processes=2)
    assert TokenFile.open(tmp_path / "one").fingerprint == TokenFile.open(tmp_path / "two").fingerprint
    assert not (tmp_path / ".two.packing").exists()
    lines = path.read_text().splitlines()
    lines[30] = "{"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError) as refused:
        pack(path, tmp_path / "three", tokenizer)
    assert refused.value.where == f"{path}:31"
    lines[30] = json.dumps({"messages": [{"role": "robot", "content": "x"}]})
    path.write_text("\n".join(lines))
    with pytest.raises(DataError) as refused:
        pack(path, tmp_path / "three", tokenizer)
    assert refused.value.where == f"{path}:31, turn 1"
    assert not (tmp_path / "three").exists()


def test_input_of_a_few_megabytes_has_units_for_many_cores(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them one core would work alone, progress stand still, and a kill lose everything."""
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps(chats(1)[0]) + " " * 99_999 + "\n") * 84)
    units: list[int] = []
    encode_unit = packing._Worker.encode_unit

    def counted(worker: packing._Worker, number: int, *rest: Any) -> ChatCounts:
        units.append(number)
        return encode_unit(worker, number, *rest)

    monkeypatch.setattr(packing._Worker, "encode_unit", counted)
    pack(path, tmp_path / "data", tokenizer)
    assert len(units) >= 8


def test_long_samples_are_refused_dropped_or_truncated(tmp_path: Path, tokenizer: Path) -> None:
    long = {"messages": [{"role": "user", "content": "word " * 99}, {"role": "assistant", "content": "late"}]}
    path = write_lines(tmp_path / "a.jsonl", [*chats(3), long])
    with pytest.raises(DataError, match="more than the 200 of a sequence") as refused:
        pack(path, tmp_path / "refused", tokenizer, sequence_length=200)
    assert refused.value.where == f"{path}:4"
    assert "--longer drop" in refused.value.hint
    assert not (tmp_path / "refused").exists()
    dropped = pack(path, tmp_path / "dropped", tokenizer, sequence_length=200, longer="drop").counts
    assert (dropped.num_samples, dropped.num_dropped) == (3, 1)
    cut = pack(path, tmp_path / "cut", tokenizer, sequence_length=200, longer="truncate").counts
    assert (cut.num_samples, cut.num_truncated, cut.num_without_targets) == (3, 1, 1)
    pack(path, tmp_path / "all", tokenizer)
    share = trained_share(TokenFile.open(tmp_path / "all"), 200)
    assert (share.num_longer, share.num_without_targets) == (1, 1)


def test_an_answer_that_is_truncated_does_not_count_as_ended(tmp_path: Path, tokenizer: Path) -> None:
    long = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "word " * 99}]}
    path = write_lines(tmp_path / "a.jsonl", [*chats(3), long])
    cut = pack(path, tmp_path / "cut", tokenizer, sequence_length=200, longer="truncate").counts
    assert cut.num_truncated == 1
    assert cut.ends[""] == 1
    assert sum(cut.ends.values()) == 1 + pack(path, tmp_path / "all", tokenizer).counts.ends["<|im_end|>"] - 1


def test_turns_before_a_truncated_answer_keep_their_ends(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
        "{% endfor %}"
    )
    tokenizer = write_tokenizer(tmp_path / "tokenizer", QWEN, template=template)
    short, long = chats(1)[0]["messages"], [{"role": "user", "content": "?"}]
    long.append({"role": "assistant", "content": "word " * 99})
    path = write_lines(tmp_path / "a.jsonl", [{"messages": [*short, *short, *long]}])
    counts = pack(path, tmp_path / "cut", tokenizer, sequence_length=200, longer="truncate").counts
    assert counts.ends == {"<|im_end|>": 2, "": 1}


def test_pairs_are_two_documents_each(tmp_path: Path, tokenizer: Path) -> None:
    prompt = [{"role": "user", "content": "?"}]
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": prompt, "chosen": "good", "rejected": "bad"}] * 2)
    packed = pack(path, tmp_path / "data", tokenizer)
    assert packed.manifest.chat is not None and packed.manifest.chat.kind == "pairs"
    assert packed.manifest.num_documents == 4
    assert trained_texts(tmp_path / "data") == [["good<|im_end|>"], ["bad<|im_end|>"]] * 2
    write_lines(path, [{"prompt": prompt, "chosen": "good", "rejected": "bad"}, *chats(1)])
    with pytest.raises(DataError, match="1 records are pairs and 1 are not"):
        pack(path, tmp_path / "mixed", tokenizer)


def test_a_pair_that_the_template_makes_equal_is_refused(tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == "llama-2")  # its template strips texts
    tokenizer = write_tokenizer(tmp_path / "tokenizer", family, template=family.template)
    pair = {"prompt": [{"role": "user", "content": "?"}], "chosen": "4", "rejected": "4 "}
    path = write_lines(tmp_path / "a.jsonl", [pair])
    with pytest.raises(DataError, match="'chosen' and 'rejected' have the same tokens") as refused:
        pack(path, tmp_path / "data", tokenizer)
    assert refused.value.where == f"{path}:1"


def test_prompts_of_pairs_are_not_trained(tmp_path: Path, tokenizer: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}])
    with pytest.raises(DataError, match="would train the prompts of pairs"):
        pack(path, tmp_path / "data", tokenizer, trained="all")
    pack(path, tmp_path / "data", tokenizer, trained="last")
    assert trained_texts(tmp_path / "data") == [["4<|im_end|>"], ["5<|im_end|>"]]


@pytest.mark.parametrize(
    "record", [{"prompt": "Once upon", "completion": " a time"}, {"input_ids": [5, 6], "weights": [0, 1]}]
)
def test_what_is_not_rendered_has_no_template(
    record: dict[str, Any], tmp_path: Path, tokenizer: Path
) -> None:
    facts = pack(write_lines(tmp_path / "a.jsonl", [record]), tmp_path / "data", tokenizer).manifest.chat
    assert facts is not None
    assert (facts.masks, facts.template_hash, facts.special_tokens) == ("none", None, {})
    assert "" not in facts.end_tokens
    assert not (tmp_path / "data" / "chat_template.jinja").exists()


def test_turns_that_the_template_leaves_out_are_counted(tmp_path: Path, tokenizer: Path) -> None:
    """Qwen 2.5 writes no turn of the developer."""
    records = chats(3)
    records[1]["messages"].insert(0, {"role": "developer", "content": "Answer briefly."})
    found = pack(write_lines(tmp_path / "a.jsonl", records), tmp_path / "data", tokenizer)
    assert found.counts.unread == {"developer turns": 1}


def test_spans_are_shown_with_the_space_before_their_first_word(tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == "llama-2")
    tokenizer = write_tokenizer(tmp_path / "tokenizer", family, template=family.template)
    pack(write_lines(tmp_path / "a.jsonl", chats(1)), tmp_path / "data", tokenizer)
    assert trained_texts(tmp_path / "data") == [[" answer 0 </s>"]]


def test_completions_end_with_the_end_of_document(tmp_path: Path, tokenizer: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "Once upon", "completion": " a time"}])
    pack(path, tmp_path / "data", tokenizer)
    assert trained_texts(tmp_path / "data") == [[" a time<|im_end|>"]]


def test_given_tokens_keep_their_weights(tmp_path: Path, tokenizer: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"input_ids": [5, 6, 7], "weights": [0, 0.5, -2]}])
    pack(path, tmp_path / "data", tokenizer)
    dataset = TokenFile.open(tmp_path / "data")
    assert dataset.tokens.tolist() == [5, 6, 7]
    assert dataset.loss_weights is not None and dataset.loss_weights.tolist() == [0, 0.5, -2]
    samples = PackedSamples(dataset, 4, plan_packing(dataset.document_ends, 4))
    rows = samples.rows(np.array([0]))
    assert rows.counts_BS.tolist() == [[True, True, False, False]]
    assert samples.targets(np.array([0])) == (
        2,
        2.5,
    )  # two targets, and the sum of the sizes of their weights
    write_lines(path, [{"input_ids": [5, 10**6], "weights": [0, 1]}])
    with pytest.raises(DataError, match="token 1000000 is outside the vocabulary"):
        pack(path, tmp_path / "outside", tokenizer)


def test_packed_conversations_are_whole_and_restart(tmp_path: Path, tokenizer: Path) -> None:
    pack(write_lines(tmp_path / "a.jsonl", chats()), tmp_path / "data", tokenizer)
    dataset = TokenFile.open(tmp_path / "data")
    samples = PackedSamples(dataset, 512, plan_packing(dataset.document_ends, 512))
    rows = samples.rows(np.arange(len(samples)))
    assert rows.documents_BS is not None and rows.loss_weights_BS is not None
    begins = np.diff(rows.documents_BS, axis=1, prepend=-1) != 0
    assert (rows.positions_BS[begins] == 0).all()
    # Every first token of a conversation is <|im_start|>, and nothing before it is trained to predict it.
    start = int(dataset.tokens[0])
    used = begins & (rows.tokens_BS == start)
    assert used.sum() == dataset.manifest.num_documents
    assert not rows.counts_BS[:, :-1][begins[:, 1:]].any()
    assert dataset.manifest.chat is not None
    assert int(rows.counts_BS.sum()) == dataset.manifest.chat.num_trained


def test_a_run_that_would_split_conversations_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    pack(write_lines(tmp_path / "a.jsonl", chats()), tmp_path / "data", tokenizer)
    spec = DataSpec(path=str(tmp_path / "data"), sequence_length=512, batch_sequences=1)
    with pytest.raises(DataError, match="cut would cut them") as refused:
        open_stream(spec, seed=0, vocab_size=2000)
    assert refused.value.hint == "set data.packing: whole"
    short = spec.with_(packing="whole", sequence_length=64)
    with pytest.raises(DataError, match=r"of 40 conversations are longer than data.sequence_length=64"):
        open_stream(short, seed=0, vocab_size=2000)
    open_stream(spec.with_(packing="whole"), seed=0, vocab_size=2000)


def test_fields_that_the_template_does_not_read_are_counted(tmp_path: Path, tokenizer: Path) -> None:
    """Qwen 2.5 writes calls of tools and no reasoning."""
    records = chats(3)
    records[0]["messages"][1]["reasoning_content"] = "thinking"
    records[1]["messages"][1] |= {"tool_calls": [{"function": {"name": "f", "arguments": {}}}], "id": "1"}
    found = pack(write_lines(tmp_path / "a.jsonl", records), tmp_path / "data", tokenizer)
    assert found.counts.unread == {"reasoning_content": 1}


def test_a_variable_of_the_template_is_no_field_that_it_writes(tmp_path: Path) -> None:
    template = QWEN.template + "{% if enable_thinking %}{% endif %}"
    tokenizer = write_tokenizer(tmp_path / "tokenizer", QWEN, template=template)
    records = chats(2)
    records[0]["messages"][1]["reasoning"] = "thinking"
    path = write_lines(tmp_path / "a.jsonl", records)
    assert pack(path, tmp_path / "data", tokenizer).counts.unread == {"reasoning": 1}
    template += "{{ messages[0].reasoning_content }}"
    tokenizer = write_tokenizer(tmp_path / "other", QWEN, template=template)
    assert pack(path, tmp_path / "read", tokenizer).counts.unread == {}


def test_an_end_of_document_in_the_text_is_not_doubled(tmp_path: Path, tokenizer: Path) -> None:
    """As in texts that another program has rendered."""
    record = {"prompt": "<|im_start|>user\nA?<|im_end|>\n", "completion": "B<|im_end|>"}
    packed = pack(write_lines(tmp_path / "a.jsonl", [record]), tmp_path / "data", tokenizer)
    assert trained_texts(tmp_path / "data") == [["B<|im_end|>"]]
    assert packed.counts.ends == {"<|im_end|>": 1}


@pytest.mark.parametrize("name", ["llama-2", "qwen-2.5"])
def test_spans_of_long_conversations_are_their_whole_text(name: str, tmp_path: Path) -> None:
    """Each span is decoded with a few tokens before it, also where these end inside a character."""
    family = next(family for family in FAMILIES if family.name == name)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", family, template=family.template)
    turns = [
        {"role": role, "content": f" {index} 日本 😀"}
        for index in range(30)
        for role in ("user", "assistant")
    ]
    pack(write_lines(tmp_path / "a.jsonl", [{"messages": turns}]), tmp_path / "data", tokenizer)
    dataset = TokenFile.open(tmp_path / "data")
    opened = ChatJob(str(tokenizer / "tokenizer.json"), None, datetime.date.today()).open_tokenizer()
    (shown,) = conversations(dataset, 1)
    assert "".join(span.text for span in shown.spans) == opened.decode_with_special(dataset.tokens.tolist())
    assert len(shown.spans) >= 60
