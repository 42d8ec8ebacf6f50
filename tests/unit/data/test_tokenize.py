"""Tokenizers behind one small interface."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from meshwright.data.pack import pack
from meshwright.data.readers.megatron import write_megatron
from meshwright.data.sources import TokenFile
from meshwright.data.tokenize import (
    ByteTokenizer,
    has_other_tokenizer,
    open_tokenizer,
    tokenizer_for,
    tokenizer_of,
)
from meshwright.errors import DataError
from meshwright.spec import DataSpec, SyntheticSpec


def write_tokenizer(path: Path, *, end: str = "</s>", words: tuple[str, ...] = ("red", "kite", "?")) -> Path:
    vocabulary = {word: index for index, word in enumerate((*words, end))}
    library = LibraryTokenizer(WordLevel(vocabulary, unk_token="?"))
    library.pre_tokenizer = Whitespace()
    library.add_special_tokens([end])
    library.save(str(path))
    return path


@given(st.text())
def test_bytes_come_back_as_the_same_text(text: str) -> None:
    tokenizer = ByteTokenizer()
    (tokens,) = tokenizer.encode([text])
    assert tokenizer.decode([*tokens.tolist(), tokenizer.eos_id]) == text


def test_no_byte_is_the_end_of_document() -> None:
    assert ByteTokenizer.eos_id == 256
    assert ByteTokenizer.vocab_size == 257


def test_a_truncated_character_does_not_stop_decoding() -> None:
    assert ByteTokenizer().decode("né".encode()[:2]) == "n\ufffd"


def test_a_tokenizer_json_encodes_and_decodes(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(write_tokenizer(tmp_path / "tokenizer.json")))
    assert [tokens.tolist() for tokens in tokenizer.encode(["red kite", "kite"])] == [[0, 1], [1]]
    assert tokenizer.decode([0, 1, tokenizer.eos_id]) == "red kite"
    assert tokenizer.vocab_size == 4
    assert tokenizer.eos_id == 3


def test_a_folder_with_a_tokenizer_will_do(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    assert open_tokenizer(str(tmp_path)).vocab_size == 4


def test_the_end_of_document_is_taken_from_the_config_beside(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", end="<stop>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    assert open_tokenizer(str(tmp_path)).eos_id == 3


def test_an_unknown_end_of_document_is_asked_for(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", end="<stop>")
    with pytest.raises(DataError, match="has no known end-of-document token") as caught:
        open_tokenizer(str(path))
    assert "--eos" in caught.value.hint
    assert open_tokenizer(str(path), eos="<stop>").eos_id == 3
    with pytest.raises(DataError, match="has no token '<other>'"):
        open_tokenizer(str(path), eos="<other>")


def test_the_hash_tells_tokenizers_apart(tmp_path: Path) -> None:
    one = open_tokenizer(str(write_tokenizer(tmp_path / "one.json")))
    same = open_tokenizer(str(write_tokenizer(tmp_path / "same.json")))
    other = open_tokenizer(str(write_tokenizer(tmp_path / "other.json", words=("kite", "red", "?"))))
    assert one.hash == same.hash != other.hash


@pytest.mark.parametrize(
    ("content", "fact"),
    [(None, "no tokenizer here"), ("{}", "not a Hugging Face"), ("\x00", "not a Hugging")],
)
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: str | None, fact: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=fact) as caught:
        open_tokenizer(str(path))
    assert caught.value.hint


def test_an_end_of_document_for_bytes_has_no_effect_and_is_refused() -> None:
    with pytest.raises(DataError, match="no effect"):
        open_tokenizer("bytes", eos="x")


def test_a_dataset_carries_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("red kite")
    path = write_tokenizer(tmp_path / "tokenizer.json", end="<stop>")
    pack([tmp_path / "a.txt"], tmp_path / "data", tokenizer=open_tokenizer(str(path), eos="<stop>"))
    path.unlink()
    tokenizer = tokenizer_for(DataSpec(path=str(tmp_path / "data"), sequence_length=1, batch_sequences=1))
    assert tokenizer.decode(TokenFile.open(tmp_path / "data").document(0).tolist()) == "red kite"
    assert tokenizer.eos_id == 3


def test_another_tokenizer_in_its_place_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("red kite")
    tokenizer = open_tokenizer(str(write_tokenizer(tmp_path / "tokenizer.json")))
    pack([tmp_path / "a.txt"], tmp_path / "data", tokenizer=tokenizer)
    write_tokenizer(tmp_path / "data" / "tokenizer.json", words=("kite", "red", "?"))
    with pytest.raises(DataError, match="not the tokenizer that packed"):
        tokenizer_of(tmp_path / "data", TokenFile.open(tmp_path / "data").manifest.tokenizer)


def test_the_generated_corpus_is_bytes() -> None:
    spec = DataSpec(synthetic=SyntheticSpec(), sequence_length=8, batch_sequences=1)
    assert tokenizer_for(spec).name == "bytes"


def test_truncation_and_padding_of_a_tokenizer_have_no_effect(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    library = LibraryTokenizer.from_file(str(path))
    library.enable_truncation(4)
    library.enable_padding(length=32)
    library.save(str(path))
    [tokens, short] = open_tokenizer(str(path)).encode(["red kite " * 50, "red"])
    assert (len(tokens), len(short)) == (100, 1)


def test_an_empty_vocabulary_is_refused(tmp_path: Path) -> None:
    LibraryTokenizer(WordLevel({}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="vocabulary is empty"):
        open_tokenizer(str(tmp_path))


def test_a_megatron_pair_names_no_tokenizer(tmp_path: Path) -> None:
    write_megatron(tmp_path / "corpus", iter([np.arange(9)]), vocab_size=100)
    spec = DataSpec(path=str(tmp_path / "corpus"), sequence_length=4, batch_sequences=1)
    with pytest.raises(DataError, match="does not name its tokenizer") as caught:
        tokenizer_for(spec)
    assert "--tokenizer" in caught.value.hint
    (tmp_path / "a.txt").write_text("red kite")
    pack([tmp_path / "a.txt"], tmp_path / "data", tokenizer=ByteTokenizer())
    parts = [{"path": str(tmp_path / name), "weight": 1} for name in ("corpus", "data")]
    blend = {"blend": parts, "sequence_length": 4, "batch_sequences": 1}
    assert tokenizer_for(DataSpec.model_validate(blend)).name == "bytes"


def test_data_of_another_tokenizer_than_a_model_is_noticed(tmp_path: Path) -> None:
    """The same tokens in another file, and new tokens beside them, are those of the model."""
    models = {name: tmp_path / name for name in ("same", "again", "extended", "other", "bare")}
    for folder in models.values():
        folder.mkdir()
    write_tokenizer(models["same"] / "tokenizer.json")
    text = (models["same"] / "tokenizer.json").read_text()
    (models["again"] / "tokenizer.json").write_text(json.dumps(json.loads(text), indent=4))
    larger = LibraryTokenizer.from_str(text)
    larger.add_tokens(["<|new|>"])
    larger.save(str(models["extended"] / "tokenizer.json"))
    write_tokenizer(models["other"] / "tokenizer.json", words=("kite", "red", "?"))
    (tmp_path / "text.txt").write_text("red kite")
    for name in ("same", "extended"):
        tokenizer = open_tokenizer(str(models[name]))
        pack([tmp_path / "text.txt"], tmp_path / f"packed-{name}", tokenizer=tokenizer)
    data = DataSpec(path=str(tmp_path / "packed-extended"), sequence_length=8, batch_sequences=1)
    noticed = [has_other_tokenizer(data, folder) for folder in models.values()]
    assert noticed == [False, False, False, True, False]
    assert has_other_tokenizer(data.with_(path=str(tmp_path / "packed-same")), models["extended"])
    generated = data.with_(path=None, synthetic=SyntheticSpec())
    assert not has_other_tokenizer(generated, models["other"])
