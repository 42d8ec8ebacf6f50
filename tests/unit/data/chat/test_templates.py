"""Rendering and masks equal those of transformers, for the templates of eight families."""

import datetime
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from tests.support.chat_templates import CHAT, FAMILIES, QWEN_2_5, THINKING, Family, chat_of, write_tokenizer
from transformers import PreTrainedTokenizerFast

from meshwright.data.chat.conversation import Completion, Conversation
from meshwright.data.chat.targets import ChatEncoder, Encoded, Trained
from meshwright.data.chat.template import open_template
from meshwright.data.chat.turns import Turn, read_turn
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
def test_special_tokens_at_the_end_of_an_answer_are_no_end_of_turn(family: Family, tmp_path: Path) -> None:
    """As text in the content, or as the end of a call of a tool before the end of turn."""
    folder = write_tokenizer(tmp_path, family, template=family.template)
    encoder = encoder_of(folder)
    special = next(each for each in (*family.special, family.bos) if each and each != family.end_of_turn)
    question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": f"x{special} \n y"}
    messages = [question, answer, question, {"role": "assistant", "content": f"x{special}\n"}]
    found = encode(encoder, messages)
    assert [encoder.tokenizer.token(token) for token in found.last_trained] == [family.end_of_turn] * 2
    theirs = reference(family, family.tagged, folder).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    assert found.weights.astype(int).tolist() == theirs["assistant_masks"]


def test_a_newline_inside_the_tag_hides_no_end_of_turn(tmp_path: Path) -> None:
    """TRL's training templates of Qwen, Gemma and Phi mark the newline after the end of turn too."""
    template = BY_NAME["qwen-2.5"].tagged
    template = template.replace(
        """+ '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}""",
        """+ '<|im_end|>\\n' }}
        {%- endgeneration %}""",
    )
    encoder = encoder_of(write_tokenizer(tmp_path, BY_NAME["qwen-2.5"], template=template))
    found = encode(encoder, chat_of(BY_NAME["qwen-2.5"]))
    assert encoder.tokenizer.decode_with_special(found.tokens[found.weights > 0]).count("<|im_end|>\n") == 2
    assert [encoder.tokenizer.token(token) for token in found.last_trained] == ["<|im_end|>"] * 2


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


CALL = {"type": "function", "function": {"name": "add", "arguments": {"ä": 2}}}
ASKED = {"role": "user", "content": "2 + 3?"}
WRITES_CONTENT = "{{ m.role }}: {% if 'content' in m %}{{ '' + m.content }}{% endif %}"
WRITES_ARGUMENTS = (
    "{% for call in m.tool_calls or [] %}{{ 'call ' + call.function.arguments }}{% endfor %}<|im_end|>"
)


@pytest.mark.parametrize(
    "answer",
    [
        {"tool_calls": [CALL]},
        {"content": None, "tool_calls": [CALL]},
        {"content": "Let me see.", "tool_calls": [CALL]},
    ],
    ids=["no content", "null", "text"],
)
def test_calls_are_given_as_the_template_takes_them(answer: dict, tmp_path: Path) -> None:
    """DeepSeek's template writes arguments as they are; that of gpt-oss looks into any content."""
    text = f"{{% for m in messages %}}{WRITES_CONTENT}{WRITES_ARGUMENTS}{{% endfor %}}"
    text += "{% if add_generation_prompt %}assistant: {% endif %}"
    encoder = encoder_of(write_tokenizer(tmp_path, BY_NAME["qwen-2.5"], template=text))
    turn = read_turn({"role": "assistant", **answer}, where="here", turn=1)
    (found,) = encoder.encode([(Conversation((Turn(ASKED), turn)), "here")])
    assert isinstance(found, Encoded)
    trained = encoder.tokenizer.decode_with_special(found.tokens[found.weights > 0])
    assert trained == f'{answer.get("content") or ""}call {{"ä": 2}}<|im_end|>'


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_reasoning_has_the_names_that_transformers_gives_it(read: str, field: str, tmp_path: Path) -> None:
    family = BY_NAME["qwen-2.5"]
    text = "{% for m in messages %}{{ m." + read + " }}|{{ m.content }}<|im_end|>{% endfor %}"
    folder = write_tokenizer(tmp_path, family, template=text)
    messages = [ASKED, {"role": "assistant", "content": "5", field: "add them"}]
    theirs = reference(family, text, folder).apply_chat_template(messages, tokenize=False)
    encoder = encoder_of(folder)
    assert encoder.tokenizer.decode_with_special(encode(encoder, messages).tokens) == theirs
    assert "add them|5" in str(theirs)


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": " "}])
def test_an_answer_of_calls_that_the_template_does_not_write_is_refused(
    content: dict, tmp_path: Path
) -> None:
    """Llama 3 would be trained to write `None`, ChatML to write nothing."""
    encoder = encoder_of(write_tokenizer(tmp_path, BY_NAME["llama-3"], template=BY_NAME["llama-3"].template))
    answer = {"role": "assistant", **content, "tool_calls": [CALL]}
    with pytest.raises(DataError, match="only calls of tools, and the template writes none") as refused:
        encode(encoder, [ASKED, answer])
    assert refused.value.where == "chats.jsonl:1, turn 2 (assistant)"
    messages = [ASKED, answer, ASKED, {"role": "assistant", "content": "5"}]
    assert encode(encoder, messages, turn_1=0.0).num_trained


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and enable_thinking is not "
    "defined %}<think>done</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is not defined %}<think>\n{% endif %}{% endif %}"
)


def test_hints_name_only_what_helps_at_this_turn(tmp_path: Path) -> None:
    """A prompt that begins to think is no begin of an answer without thinking, whichever turn is trained."""
    folder = write_tokenizer(tmp_path, BY_NAME["qwen-2.5"], template=THINKS)
    for trained, helps in (("assistant", "--train last"), ("last", "--template-var enable_thinking=false")):
        with pytest.raises(DataError, match="renders the turns before differently") as refused:
            encode(encoder_of(folder, trained=trained), chat_of(BY_NAME["qwen-2.5"]))
        assert "{% generation %}" in refused.value.hint
        assert [way in refused.value.hint for way in ("--train last", "--template-var")] == [
            way in helps for way in ("--train last", "--template-var")
        ]
    template = open_template(folder, variables={"enable_thinking": False}, date=DATE)
    encoder = ChatEncoder(HuggingFaceTokenizer(folder / "tokenizer.json"), template)
    assert encode(encoder, chat_of(BY_NAME["qwen-2.5"])).num_trained


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


@pytest.mark.parametrize(
    ("template", "answer", "fact"),
    [
        (None, "\nParis.", r"a token reaches from the prompt into the answer, which begins with '\\nParis"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "Paris.",
            "writes nothing",
        ),
    ],
)
def test_an_answer_without_tokens_of_its_own_is_refused_with_the_reason(
    template: str | None, answer: str, fact: str, tmp_path: Path
) -> None:
    """A newline that ends the prompt and one that begins the answer are one token of Qwen's."""
    family = BY_NAME["qwen-2.5"]
    encoder = encoder_of(write_tokenizer(tmp_path, family, template=template or family.template))
    encoder.tokenizer._tokenizer.add_tokens(["\n\n"])
    with pytest.raises(DataError, match=fact) as refused:
        encode(encoder, [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": answer}])
    assert refused.value.where == "chats.jsonl:1, turn 2 (assistant)"


@each_family
def test_long_conversations_are_not_encoded_from_their_begin_for_each_turn(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens from a special token on do not depend on what is before it; masks stay the same."""
    encoder = encoder_of(write_tokenizer(tmp_path, family, template=family.template))
    pair = chat_of(family)[-2:]
    messages = [*chat_of(family)[:-2], *(pair * 20)]
    num_characters, encodings = [], encoder.tokenizer.encodings

    def counted(texts: list[str], **options: bool) -> list:
        num_characters.append(sum(map(len, texts)))
        return encodings(texts, **options)

    monkeypatch.setattr(encoder.tokenizer, "encodings", counted)
    short = encode(encoder, messages)
    assert num_characters[2] < 3 * num_characters[0]
    monkeypatch.setattr(encoder.tokenizer, "divider_ids", np.array([], dtype=np.uint32))
    complete = encode(encoder, messages)
    assert num_characters[5] > 10 * num_characters[2]
    assert np.array_equal(short.tokens, complete.tokens)
    assert np.array_equal(short.weights, complete.weights)


def test_an_end_of_turn_that_is_not_marked_special_is_one_as_end_of_document(tmp_path: Path) -> None:
    family = BY_NAME["qwen-2.5"]
    folder = write_tokenizer(tmp_path, family, template=family.template)
    expected = encode(encoder_of(folder), chat_of(family))
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    for token in content["added_tokens"]:
        token["special"] = False
    file.write_text(json.dumps(content))
    found = encode(encoder_of(folder), chat_of(family))
    assert np.array_equal(found.weights, expected.weights)
    assert found.last_trained == expected.last_trained


@pytest.mark.parametrize("name", ["llama-2", "gemma", "llama-3"])
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("Answer in one li", "ne. Paris"), ("Q: ", "Paris"), ("Q:", " Paris"), ("a\n", "\nb")],
)
def test_a_completion_continues_its_prompt_without_another_space(
    name: str, prompt: str, completion: str, tmp_path: Path
) -> None:
    """SentencePiece puts a space before a text; the completion of a prompt is none by itself."""
    encoder = encoder_of(write_tokenizer(tmp_path, BY_NAME[name], template=None))
    (found,) = encoder.encode([(Completion(prompt, completion), "here")])
    assert isinstance(found, Encoded)
    assert encoder.tokenizer.decode(found.tokens) == prompt + completion
    asked = encoder.tokenizer._tokenizer.encode(prompt).ids
    assert found.tokens[found.weights == 0].tolist() == asked


def test_a_conversation_that_begins_with_an_answer_is_refused_where_the_template_has_no_prompt(
    tmp_path: Path,
) -> None:
    family = BY_NAME["qwen-2.5"]
    encoder = encoder_of(write_tokenizer(tmp_path, family, template=family.template))
    messages = [{"role": "assistant", "content": "Hello."}, *chat_of(family)[1:]]
    with pytest.raises(DataError, match="begins with an answer") as refused:
        encode(encoder, messages)
    assert refused.value.where == "chats.jsonl:1, turn 1 (assistant)"
    assert encode(encoder, messages, turn_0=0.0).num_trained


def test_a_variable_that_no_template_reads_is_known(tmp_path: Path) -> None:
    text = (
        "{% set a = 1 %}{% if enable_thinking is defined %}{{ a }}{% endif %}"
        "{% generation %}{{ b }}{% endgeneration %}"
    )
    template = open_template(write_tokenizer(tmp_path, BY_NAME["qwen-2.5"], template=text), date=DATE)
    assert template is not None
    assert template.unread(["enable_thinking", "a", "b", "enable_thinkng"]) == ["a", "enable_thinkng"]


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


@pytest.mark.parametrize("name", ["qwen-2.5", "llama-2"])
@pytest.mark.parametrize("answer", ["ok 😀", "日本", "é", "👨‍👩‍👧"])
def test_a_tag_may_end_with_a_character_of_several_tokens(name: str, answer: str, tmp_path: Path) -> None:
    template = THINKING.replace(
        "{{ message.content }}", "{% generation %}{{ message.content }}{% endgeneration %}"
    )
    encoder = encoder_of(write_tokenizer(tmp_path, BY_NAME[name], template=template))
    found = encode(encoder, [{"role": "assistant", "content": answer}])
    assert encoder.tokenizer.decode_with_special(found.tokens[found.weights > 0]).strip() == answer


def test_a_tag_in_a_comment_marks_nothing(tmp_path: Path) -> None:
    family = BY_NAME["qwen-2.5"]
    folder = write_tokenizer(tmp_path, family, template="{# no {% generation %} here #}" + family.template)
    expected = encode(encoder_of(write_tokenizer(tmp_path / "a", family, template=family.template)), CHAT)
    assert np.array_equal(encode(encoder_of(folder), CHAT).weights, expected.weights)


@each_family
@pytest.mark.parametrize("is_tagged", [False, True], ids=["prefix", "tagged"])
def test_ends_are_known_where_every_token_is_trained(family: Family, is_tagged: bool, tmp_path: Path) -> None:
    """They are printed, and an exported model stops at them."""
    folder = write_tokenizer(tmp_path, family, template=family.tagged if is_tagged else family.template)
    encoder = encoder_of(folder, trained="all")
    found = encode(encoder, chat_of(family))
    assert {encoder.tokenizer.token(token) for token in found.last_trained} == {family.end_of_turn}
    last = len(chat_of(family)) - 1
    assert not is_tagged or encode(encoder, chat_of(family), **{f"turn_{last}": 0.0}).last_trained
