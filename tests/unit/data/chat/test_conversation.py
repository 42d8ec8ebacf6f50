# ruff: noqa: E501  a record per line
"""Records of every chat format as turns; malformed ones are refused with their place."""

import json
from typing import Any

import pytest

from meshwright.data.chat.conversation import Completion, Conversation, Pair, WeightedTokens, read_sample
from meshwright.errors import DataError


def read(record: dict[str, Any], **options: Any) -> Any:
    return read_sample(record, chat_format=None, where="chats.jsonl:7", **options)


def turns(record: dict[str, Any], **options: Any) -> list[tuple[str, Any]]:
    found = read(record, **options)
    assert isinstance(found, Conversation)
    return [(turn.role, turn.message["content"]) for turn in found.turns]


QUESTION, ANSWER = ("user", "2 + 2?"), ("assistant", "4")


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]},
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
        {"instruction": "2 + 2?", "input": "", "output": "4"},
        {"prompt": [{"role": "user", "content": "2 + 2?"}], "completion": [{"role": "assistant", "content": "4"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]},
                      {"role": "assistant", "content": "4"}]},
    ],
    ids=["messages", "sharegpt", "alpaca", "prompt-completion", "parts"],
)  # fmt: skip
def test_formats_give_the_same_turns(record: dict[str, Any]) -> None:
    assert turns(record) == [QUESTION, ANSWER]


def test_alpaca_has_input_system_and_history() -> None:
    record = {"instruction": "add", "input": "2, 2", "output": "4", "system": "s", "history": [["a", "b"]]}
    assert turns(record) == [
        ("system", "s"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "add\n2, 2"),
        ANSWER,
    ]


def test_sharegpt_has_tools() -> None:
    call = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'}
    record = {
        "conversations": [
            {"from": "human", "value": "?"},
            call,
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "4"},
        ],
        "tools": '[{"name": "add"}]',
    }
    found = read(record)
    assert [turn.role for turn in found.turns] == ["user", "assistant", "tool", "assistant"]
    assert found.turns[1].message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}
    assert found.tools == [{"name": "add"}]


def test_arguments_of_tool_calls_are_objects_and_nulls_of_tables_are_left_out() -> None:
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    record = {
        "messages": [
            {"role": "user", "content": "?", "tool_calls": None, "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    }
    found = read(record)
    assert dict(found.turns[0].message) == {"role": "user", "content": "?"}
    expected = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert found.turns[1].message["tool_calls"] == [expected]


def test_texts_are_completions_or_turns() -> None:
    record = {"prompt": "2 + 2?", "completion": "4"}
    assert read(record) == Completion("2 + 2?", "4")
    assert turns(record, texts_are_turns=True) == [QUESTION, ANSWER]


def test_turns_have_weights() -> None:
    answers = [
        {"role": "assistant", "content": "x", **each} for each in ({}, {"train": False}, {"weight": -0.5})
    ]
    found = read({"messages": [{"role": "user", "content": "?", "weight": 0}, *answers]})
    assert [turn.weight for turn in found.turns] == [None, None, 0.0, -0.5]


def test_pairs_share_a_prompt() -> None:
    prompt = [{"role": "user", "content": "?"}]
    good, bad = ([{"role": "assistant", "content": text}] for text in ("good", "bad"))
    for record in (
        {"prompt": prompt, "chosen": good, "rejected": bad},
        {"chosen": prompt + good, "rejected": prompt + bad},
        {"conversations": [{"from": "human", "value": "?"}], "chosen": {"from": "gpt", "value": "good"},
         "rejected": {"from": "gpt", "value": "bad"}},
    ):  # fmt: skip
        pair = read(record)
        assert isinstance(pair, Pair)
        assert [turn.message["content"] for turn in pair.chosen.turns] == ["?", "good"]
        assert [turn.message["content"] for turn in pair.rejected.turns] == ["?", "bad"]
    assert read({"prompt": "?", "chosen": "a", "rejected": "b"}) == Pair(
        Completion("?", "a"), Completion("?", "b")
    )


def test_answers_inside_a_prompt_are_not_trained() -> None:
    prompt = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "?"},
    ]
    pair = read({"prompt": prompt, "chosen": "good", "rejected": "bad"})
    assert [turn.weight for turn in pair.chosen.turns] == [None, 0.0, None, None]


def test_tokens_have_weights_of_their_own() -> None:
    assert read({"input_ids": [1, 2, 3], "weights": [0, 1, -0.5]}) == WeightedTokens(
        (1, 2, 3), (0.0, 1.0, -0.5)
    )


@pytest.mark.parametrize(
    "prompt",
    [
        "?",
        [{"role": "user", "content": "?"}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "?"}],
    ],
    ids=["text", "turn", "turns"],
)
def test_answers_may_be_conversations_with_the_prompt_in_them(prompt: Any) -> None:
    """UltraFeedback has the prompt as text and again as the first turn of both answers."""
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "?"}]
    good, bad = ([*asked, {"role": "assistant", "content": text}] for text in ("good", "bad"))
    pair = read({"prompt": prompt, "chosen": good, "rejected": bad, "messages": good})
    assert isinstance(pair, Pair)
    assert [turn.message["content"] for turn in pair.chosen.turns] == ["s", "?", "good"]
    assert [turn.message["content"] for turn in pair.rejected.turns] == ["s", "?", "bad"]
    assert turns({"prompt": prompt, "completion": good}) == [
        ("system", "s"),
        ("user", "?"),
        ("assistant", "good"),
    ]


def test_only_what_differs_between_the_answers_of_a_pair_is_trained() -> None:
    first = [{"role": "assistant", "content": "first"}, {"role": "user", "content": "?"}]
    good, bad = ([*first, {"role": "assistant", "content": text}] for text in ("good", "bad"))
    pair = read({"prompt": "?", "chosen": good, "rejected": bad})
    assert [turn.weight for turn in pair.chosen.turns] == [None, 0.0, None, None]
    assert [turn.weight for turn in pair.rejected.turns] == [None, 0.0, None, None]


def test_turns_of_an_answer_may_be_left_out() -> None:
    left_out = {"role": "assistant", "content": "y", "train": False}
    answer = [left_out, {"role": "user", "content": "?"}, {"role": "assistant", "content": "z", "weight": 1}]
    pair = read({"prompt": "?", "chosen": answer, "rejected": "b"})
    assert [turn.weight for turn in pair.chosen.turns] == [None, 0.0, None, 1.0]


def test_the_system_text_of_a_record_is_its_first_turn() -> None:
    asked, answer = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
    system = {"role": "system", "content": "s"}
    expected = [("system", "s"), QUESTION, ANSWER]
    assert turns({"system": "s", "messages": [asked, answer]}) == expected
    assert turns({"system": "s", "messages": [system, asked, answer]}) == expected
    pair = read({"system": "s", "chosen": [asked, answer], "rejected": [asked, {**answer, "content": "5"}]})
    assert [turn.role for turn in pair.chosen.turns] == ["system", "user", "assistant"]


def test_calls_of_tools_are_read_from_every_notation() -> None:
    function = {"name": "f", "arguments": {"a": None}}
    as_text = {"name": "f", "arguments": '{"a": null}'}
    call = {"type": "function", "function": function}
    for given, expected in (
        ([{"type": "function", "function": as_text}], [call]),
        ({"type": "function", "function": as_text}, [call]),
        (json.dumps([call]), [call]),
        ([as_text], [function]),
    ):
        found = read({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": given}]})
        assert found.turns[1].message["tool_calls"] == expected
    both = {"from": "function_call", "value": json.dumps([as_text, function])}
    found = read({"conversations": [{"from": "human", "value": "?"}, both]})
    assert found.turns[1].message["tool_calls"] == [call, call]
    found = read({"messages": [USER, {"role": "assistant", "content": "x", "tool_calls": []}]})
    assert "tool_calls" not in found.turns[1].message


def test_tools_may_be_json_texts_and_parts_plain_texts() -> None:
    chat = [
        {"role": "user", "content": ["a", {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "x"},
    ]
    found = read({"messages": chat, "tools": ['{"name": "f"}']})
    assert found.tools == [{"name": "f"}]
    assert found.turns[0].message["content"] == "ab"


def test_no_text_has_lone_surrogates_or_the_marks_of_the_template() -> None:
    bad, good = "a \ud83d \ufdd0b\ufdd1", "a ? \ufffdb\ufffd"
    call = {"function": {"name": "f", "arguments": json.dumps({bad: [bad]})}}
    answer = {"role": "assistant", "content": bad, "reasoning_content": bad, "tool_calls": [call]}
    found = read({"messages": [USER, answer], "tools": [{"name": bad}]})
    message = found.turns[1].message
    assert (message["content"], message["reasoning_content"], found.tools) == (good, good, [{"name": good}])
    assert message["tool_calls"][0]["function"]["arguments"] == {good: [good]}
    assert read({"prompt": bad, "completion": bad}) == Completion(good, good)


USER = {"role": "user", "content": "?"}
CALLER = {"role": "assistant", "content": None}
ANSWERED = {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("record", "where", "fact"),
    [
        ({"text": "a"}, "", "no chat: it has 'text'"),
        ({"messages": []}, "", "no list of messages"),
        ({"messages": "hello"}, "", "no list of messages"),
        ({"messages": [USER, {"role": "robot", "content": "x"}]}, ", turn 2", "role 'robot' is not known"),
        ({"messages": [USER, {"content": "x"}]}, ", turn 2", "the turn has no role"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, ", turn 2 (assistant)", "the answer is empty"),
        ({"messages": [USER, {"role": "assistant"}]}, ", turn 2 (assistant)", "the answer is empty"),
        ({"messages": [USER, {"role": "assistant", "content": 4}]}, ", turn 2 (assistant)", "is 4, not text"),
        ({"messages": [USER]}, "", "no turn of the assistant"),
        ({"messages": [{**USER, "train": True}]}, ", turn 1", "only turns of the assistant"),
        ({"messages": [USER, {"role": "assistant", "content": "x", "weight": "much"}]}, ", turn 2", "weight='much'"),
        ({"messages": [USER, {"role": "assistant", "content": "x", "train_detail": [{"begin_offset": 0, "train": False}]}]}, ", turn 2", "'train_detail' trains parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, ", turn 1 (user)", "'image'; only text"),
        ({"prompt": "?", "completion": " "}, "", "'completion' is empty"),
        ({"prompt": "?", "completion": "x", "label": False}, "", "'label' is false"),
        ({"prompt": "?", "chosen": "a", "rejected": ""}, "", "'rejected' is empty"),
        ({"chosen": [USER], "rejected": [USER]}, "", "'chosen' and 'rejected' are equal"),
        ({"chosen": [USER, ANSWERED], "rejected": [ANSWERED]}, "", "do not begin alike"),
        ({"prompt": [USER], "chosen": "x", "rejected": [ANSWERED]}, "", "'chosen' and 'rejected' are equal"),
        ({"prompt": "?", "chosen": "x", "rejected": [ANSWERED, USER, ANSWERED]}, "", "'rejected' begins with all of 'chosen'"),
        ({"chosen": [USER, ANSWERED, USER, ANSWERED], "rejected": [USER, ANSWERED]}, "", "'chosen' begins with all of 'rejected'"),
        ({"prompt": "?", "chosen": "x", "rejected": [{**ANSWERED, "content": "y", "weight": -2}]}, "", "a turn of the pair has weight -2"),
        ({"prompt": "?", "chosen": [{**ANSWERED, "weight": 0.5}], "rejected": "y"}, "", "a turn of the pair has weight 0.5"),
        ({"chosen": "a", "rejected": "b"}, "", "has no 'prompt'"),
        ({"instruction": "a", "output": ""}, "", "'output' is empty"),
        ({"input_ids": [1, 2], "weights": [1]}, "", "2 tokens have 1 weights"),
        ({"input_ids": [1, "x"], "weights": [1, 1]}, "", "no list of numbers"),
        ({"input_ids": [1, 2], "weights": [0, 1e9]}, "", "1000000000.0 has no value in fp16"),
        ({"input_ids": [1, 2], "weights": [0, -1e-9]}, "", "-1e-09 has no value in fp16"),
        ({"input_ids": [1, 2], "weights": [0, float("nan")]}, "", "nan has no value in fp16"),
        ({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "4", "weight": 7e4}]}, ", turn 2", "70000.0 has no value"),
        ({"prompt": "2 + 2?", "chosen": "4", "rejected": "4"}, "", "'chosen' and 'rejected' are equal"),
        ({"messages": None}, "", "it has 'messages' (null)"),
        ({"messages": [USER, {**CALLER, "tool_calls": 5}]}, ", turn 2 (assistant)", "the calls of tools are 5, no list"),
        ({"messages": [USER, {**CALLER, "tool_calls": "f()"}]}, ", turn 2 (assistant)", 'are "f()", no list'),
        ({"messages": [USER, {**CALLER, "tool_calls": [{"function": {}}]}]}, ", turn 2 (assistant)", "a call has no name"),
        ({"conversations": [{"from": "function_call", "value": "f(1)"}]}, ", turn 1 (assistant)", "no JSON object with a name"),
        ({"messages": [{"role": ["user"], "content": "x", "train": True}]}, ", turn 1", "the role ['user'] is not known"),
        ({"messages": [USER, {**CALLER, "content": "x"}], "tools": [5]}, "", "'tools' is neither"),
        ({"instruction": "a", "output": "b", "history": 5}, "", "an entry of 'history' is no pair"),
        ({"prompt": "a", "chosen": [USER, {**CALLER, "content": "x"}], "rejected": "y"}, "", "'chosen' begins with a turn of the user"),
        ({"system": "a", "messages": [{"role": "system", "content": "b"}, {**CALLER, "content": "x"}]}, "", "its first turn is another one"),
    ],
)  # fmt: skip
def test_malformed_records_are_refused_with_their_place(
    record: dict[str, Any], where: str, fact: str
) -> None:
    with pytest.raises(DataError) as refused:
        read(record)
    assert fact in refused.value.fact
    assert refused.value.hint
    assert refused.value.where == f"chats.jsonl:7{where}"


def test_a_format_that_is_asked_for_is_required() -> None:
    with pytest.raises(DataError, match="no 'conversations', which the format sharegpt needs"):
        read_sample({"messages": [USER]}, chat_format="sharegpt", where="x")
