"""Prompts of `sample --chat`: the tokens of training, whatever the model's folder has become."""

import json
from pathlib import Path

import pytest
from tests.support.chat_templates import FAMILIES, Family, write_tokenizer
from transformers import PreTrainedTokenizerFast

from meshwright.cli.main import run
from meshwright.data.chat.prompt import chat_prompt, text_prompt, was_trained_on_chats
from meshwright.data.tokenize import HuggingFaceTokenizer, open_tokenizer, tokenizer_for
from meshwright.errors import DataError
from meshwright.spec import DataSpec

QUESTION = "Which city is on the Seine?"
BY_NAME = {family.name: family for family in FAMILIES}


def packed(folder: Path, family: Family) -> DataSpec:
    model = write_tokenizer(folder / "model", family, template=family.template)
    chat = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "Paris."}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    command = ["data", "pack", str(folder / "chats.jsonl"), "--chat", "auto", "-o", str(folder / "chats")]
    assert run([*command, "--tokenizer", str(model)]) == 0
    return DataSpec(path=str(folder / "chats"), sequence_length=64, batch_sequences=1)


@pytest.mark.parametrize("name", ["llama-3", "qwen-2.5"])
def test_a_question_has_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    """Llama 3's template reads bos_token, which the dataset keeps; its turns do not end with eos."""
    family = BY_NAME[name]
    data = packed(tmp_path, family)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "model/tokenizer.json"),
        bos_token=family.bos,
        eos_token=family.eos,
        chat_template=family.template,
    )
    messages = [{"role": "user", "content": QUESTION}]
    expected = theirs.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    tokenizer = tokenizer_for(data)
    found = chat_prompt(tokenizer, QUESTION, data)
    assert found.tokens == expected
    ends = {theirs.convert_tokens_to_ids(token) for token in (family.end_of_turn, family.eos)}
    assert found.stop_ids == ends
    assert was_trained_on_chats(data)


def test_a_model_folder_has_its_own_template_and_ends(tmp_path: Path) -> None:
    family = BY_NAME["llama-3"]
    data = packed(tmp_path, family)
    folder = tmp_path / "model"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    tokenizer = open_tokenizer(str(folder))
    found = chat_prompt(tokenizer, QUESTION, None)
    assert found.tokens == chat_prompt(tokenizer, QUESTION, data).tokens
    assert found.stop_ids == {7, 8, tokenizer.eos_id}


def test_what_has_no_template_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", BY_NAME["llama-3"], template=None)
    tokenizer = HuggingFaceTokenizer(folder / "tokenizer.json")
    generated = DataSpec(sequence_length=8, batch_sequences=1)
    assert not was_trained_on_chats(generated)
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        chat_prompt(tokenizer, QUESTION, None)
    with pytest.raises(DataError, match="the run's data have no chat template"):
        chat_prompt(tokenizer, QUESTION, generated)
    with pytest.raises(DataError, match="the byte tokenizer has no special tokens"):
        chat_prompt(open_tokenizer("bytes"), QUESTION, generated)
    assert text_prompt(open_tokenizer("bytes"), "ab").tokens == [97, 98]
