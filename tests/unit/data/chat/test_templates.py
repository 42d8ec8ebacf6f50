"""Rendering and masks equal those of transformers, for the templates of eight families."""

import datetime
import warnings
from pathlib import Path

import numpy as np
import pytest
from tests.support.chat_templates import FAMILIES, QWEN_2_5, THINKING, Family, chat_of, write_tokenizer
from transformers import PreTrainedTokenizerFast

from meshwright.data.chat.conversation import Conversation, Turn
from meshwright.data.chat.targets import ChatEncoder, Encoded, Trained
from meshwright.data.chat.template import open_template
from meshwright.data.tokenize import HuggingFaceTokenizer
from meshwright.errors import DataError

DATE = datetime.date(2024, 7, 26)
BY_NAME = {family.name: family for family in FAMILIES}
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def encoder_of(folder: Path, *, trained: Trained = "assistant") -> ChatEncoder:
    tokenizer = HuggingFaceTokenizer(folder / "tokenizer.json")
    return ChatEncoder(tokenizer, open_template(folder, date=DATE), trained)


def encode(encoder: ChatEncoder, messages: list[dict], **controls: float) -> Encoded:
    """`controls`: turn_N=weight."""
    weights = {int(name.removeprefix("turn_")): weight for name, weight in controls.items()}
    turns = tuple(Turn(message, weights.get(index)) for index, message in enumerate(messages))
    (found,) = encoder.encode([(Conversation(turns), "chats.jsonl:1")])
    if isinstance(found, DataError):
        raise found
    return found


def reference(family: Family, template: str, folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=family.bos,
        eos_token=family.eos,
        chat_template=template,
    )


def reference_masks(family: Family, folder: Path) -> tuple[list[int], list[int]]:
    tokenizer = reference(family, family.tagged, folder)
    found = tokenizer.apply_chat_template(
        chat_of(family), return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    return found["input_ids"], found["assistant_masks"]


@each_family
def test_rendering_equals_transformers(family: Family, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, family, template=family.template)
    theirs = reference(family, family.template, folder)
    template = open_template(folder, date=DATE)
    assert template is not None
    messages = chat_of(family)
    for prompt in (False, True):
        text = theirs.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=prompt)
        ours = template.render(messages[:-1], tools=None, where="", add_generation_prompt=prompt)
        assert ours.text == text
    tokens = theirs.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    assert encode(encoder_of(folder), messages).tokens.tolist() == tokens


@each_family
def test_masks_of_a_tagged_template_equal_transformers(family: Family, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, family, template=family.tagged)
    tokens, masks = reference_masks(family, folder)
    ours = encode(encoder_of(folder), chat_of(family))
    assert ours.tokens.tolist() == tokens
    assert ours.weights.astype(int).tolist() == masks


@each_family
def test_masks_by_prefix_rendering_equal_the_tag(family: Family, tmp_path: Path) -> None:
    """The template as the model has it, without the tag, gives the masks of the tagged one."""
    folder = write_tokenizer(tmp_path, family, template=family.template)
    tokens, masks = reference_masks(family, folder)
    ours = encode(encoder_of(folder), chat_of(family))
    assert ours.tokens.tolist() == tokens
    assert ours.weights.astype(int).tolist() == masks
    assert 0 < sum(masks) < len(masks)


@each_family
@pytest.mark.parametrize("is_tagged", [False, True], ids=["prefix", "tagged"])
def test_the_end_of_turn_is_trained_and_special_tokens_are_not_doubled(
    family: Family, is_tagged: bool, tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path, family, template=family.tagged if is_tagged else family.template)
    encoder = encoder_of(folder)
    found = encode(encoder, chat_of(family))
    assert [encoder.tokenizer.token(token) for token in found.last_trained] == [family.end_of_turn] * 2
    if family.bos is not None and family.bos in family.template + "bos_token" * (family.name != "phi-3"):
        bos = encoder.tokenizer._tokenizer.token_to_id(family.bos)
        assert not ((found.tokens[1:] == bos) & (found.tokens[:-1] == bos)).any()


@each_family
@pytest.mark.parametrize("is_tagged", [False, True], ids=["prefix", "tagged"])
def test_turns_are_weighted_alone(family: Family, is_tagged: bool, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, family, template=family.tagged if is_tagged else family.template)
    messages = chat_of(family)
    both = encode(encoder_of(folder), messages).weights
    first, last = len(messages) - 3, len(messages) - 1
    only_last = encode(encoder_of(folder, trained="last"), messages).weights
    without_first = encode(encoder_of(folder), messages, **{f"turn_{first}": 0.0}).weights
    half = encode(encoder_of(folder), messages, **{f"turn_{last}": 0.5}).weights
    assert np.array_equal(only_last, without_first)
    assert 0 < only_last.sum() < both.sum()
    assert np.array_equal(half, both - 0.5 * only_last)
    everything = encode(encoder_of(folder, trained="all"), messages, **{f"turn_{first}": 0.0}).weights
    assert np.array_equal(everything, 1 - (both - only_last))


def test_tool_calls_equal_transformers(tmp_path: Path) -> None:
    family = BY_NAME["qwen-2.5"]
    folder = write_tokenizer(tmp_path, family, template=QWEN_2_5)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"a": "<int> & b"}}}]
    messages = [
        {"role": "user", "content": "2 + 3?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}],
        },
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    ]
    theirs = reference(family, QWEN_2_5, folder).apply_chat_template(messages, tools=tools, tokenize=False)
    encoder = encoder_of(folder)
    conversation = Conversation(tuple(Turn(message) for message in messages), tools)
    (found,) = encoder.encode([(conversation, "here")])
    assert isinstance(found, Encoded)
    assert encoder.tokenizer._tokenizer.decode(found.tokens, skip_special_tokens=False) == theirs
    trained = encoder.tokenizer._tokenizer.decode(found.tokens[found.weights > 0], skip_special_tokens=False)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
    assert trained == f"{call}It is 5.<|im_end|>"


def test_a_template_that_rewrites_turns_is_refused_with_the_turn(tmp_path: Path) -> None:
    family = BY_NAME["qwen-2.5"]
    folder = write_tokenizer(tmp_path, family, template=THINKING)
    with pytest.raises(DataError, match="change when later turns follow") as refused:
        encode(encoder_of(folder), chat_of(family))
    assert refused.value.where == "chats.jsonl:1, turn 3 (assistant)"
    assert "--train last" in refused.value.hint
    last = encode(encoder_of(folder, trained="last"), chat_of(family))
    decoded = encoder_of(folder).tokenizer._tokenizer.decode(
        last.tokens[last.weights > 0], skip_special_tokens=False
    )
    assert decoded == "<think>\n\n</think>\n\n" + chat_of(family)[-1]["content"] + "<|im_end|>"


def test_the_date_is_frozen(tmp_path: Path) -> None:
    family = BY_NAME["qwen-2.5"]
    folder = write_tokenizer(
        tmp_path, family, template="{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}"
    )
    template = open_template(folder, date=DATE)
    assert template is not None and template.reads_date
    assert template.render([{"content": "."}], tools=None, where="").text == "26 Jul 2024."


def test_templates_are_found_where_tokenizers_keep_them(tmp_path: Path) -> None:
    family = BY_NAME["qwen-2.5"]
    folder = write_tokenizer(tmp_path / "none", family, template=None)
    assert open_template(folder, date=DATE) is None
    listed = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = write_tokenizer(tmp_path / "list", family, template=listed)  # pyright: ignore[reportArgumentType]
    template = open_template(folder, date=DATE)
    assert template is not None
    assert template.render([], tools=None, where="").text == "plain"
    assert template.render([], tools=[{}], where="").text == "tools"
    (folder / "chat_template.jinja").write_text("file {{ eos_token }}{{ extra }}")
    template = open_template(folder, date=DATE, variables={"extra": 1})
    assert template is not None
    assert template.render([], tools=None, where="").text == "file <|im_end|>1"


@pytest.mark.parametrize(
    ("template", "fact"),
    [
        ("{% for %}", "no valid Jinja"),
        ("{{ raise_exception('no system') }}", "refuses the messages: no system"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].content.nothing.at_all }}", "refuses the messages"),
    ],
)
def test_bad_templates_are_refused(template: str, fact: str, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, BY_NAME["qwen-2.5"], template=template)
    with warnings.catch_warnings(), pytest.raises(DataError, match=fact):
        opened = open_template(folder, date=DATE)
        assert opened is not None
        opened.render([{"role": "user", "content": "x"}], tools=None, where="chats.jsonl:3")
