# ruff: noqa: E501  templates are data, kept as they are
"""Chat templates of eight model families as their tokenizers have them, with small tokenizers for them.

Compared with tests/test-chat-template.cpp of ggml-org/llama.cpp (Mistral 7B v0.2, Gemma, Llama 3, Phi-3-small,
DeepSeek-V2) and with copies of Zephyr's in public code: equal, but for the condition on add_generation_prompt
that later revisions of Llama 3 have, and for BOS, which that file leaves to the tokenizer.

`tagged` is the same template with `{% generation %}` around what the model writes: transformers then finds
those tokens.
"""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as FastTokenizer

MUST_ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must "
    "alternate user/assistant/user/assistant/...') }}{% endif %}"
)

LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' "
    "+ message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA_3_TAGGED = LLAMA_3.replace(
    "{{ content }}",
    "{% if message['role'] == 'assistant' %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ content }}{% endif %}",
)
QWEN_2_5 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
QWEN_2_5_TAGGED = QWEN_2_5.replace(
    """ or (message.role == "assistant" and not message.tool_calls) %}""",
    """ %}""",
).replace(
    """    {%- elif message.role == "assistant" %}""",
    r"""    {%- elif message.role == "assistant" and not message.tool_calls %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
        {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- elif message.role == "assistant" %}""",
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}" + MUST_ALTERNATE + "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token}}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
MISTRAL_TAGGED = MISTRAL.replace(
    "{{ message['content'] + eos_token}}",
    "{% generation %}{{ message['content'] + eos_token}}{% endgeneration %}",
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}" + MUST_ALTERNATE + "{% if (message['role'] == 'assistant') %}"
    "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
GEMMA_TAGGED = GEMMA.replace(
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}",
    "{{ '<start_of_turn>' + role + '\n' }}{% if role == 'model' %}{% generation %}"
    "{{ message['content'] | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ message['content'] | trim + '<end_of_turn>\n' }}{% endif %}",
)
PHI_3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}"
    "{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
PHI_3_TAGGED = PHI_3.replace(
    "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}",
    "{{'<|assistant|>\n'}}{% generation %}{{message['content'] + '<|end|>'}}{% endgeneration %}{{'\n'}}",
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
ZEPHYR_TAGGED = ZEPHYR.replace(
    "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n",
    "{{ '<|assistant|>\n' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\n' }}",
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}" + MUST_ALTERNATE + ""
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_2_TAGGED = LLAMA_2.replace(
    "{{ ' '  + content.strip() + ' ' + eos_token }}",
    "{% generation %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endgeneration %}",
)
DEEPSEEK = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ 'User: ' + message['content'] + '\n\n' }}{% elif message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}"
    "{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
DEEPSEEK_TAGGED = DEEPSEEK.replace(
    "{{ 'Assistant: ' + message['content'] + eos_token }}",
    "{{ 'Assistant:' }}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}",
)
# How Llama 3 and Qwen 2.5 split text into words before BPE.
LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
# A template that removes the thinking of earlier turns, as Qwen3's and DeepSeek-R1's do.
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A model family: its template and the special tokens that it uses."""

    name: str
    template: str
    tagged: str
    bos: str | None
    eos: str
    end_of_turn: str
    special: tuple[str, ...] = ()
    has_system: bool = True
    is_sentencepiece: bool = False
    """Words begin with a visible space and text at the start gets one, as in Llama 2."""
    plain: tuple[str, ...] = field(default=())
    """Added tokens that are text."""


FAMILIES = (
    Family(
        "llama-3",
        LLAMA_3,
        LLAMA_3_TAGGED,
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>"),
    ),
    Family(
        "qwen-2.5",
        QWEN_2_5,
        QWEN_2_5_TAGGED,
        None,
        "<|im_end|>",
        "<|im_end|>",
        ("<|im_start|>", "<|endoftext|>"),
        plain=("<tool_call>", "</tool_call>"),
    ),
    Family(
        "mistral", MISTRAL, MISTRAL_TAGGED, "<s>", "</s>", "</s>", has_system=False, is_sentencepiece=True
    ),
    Family(
        "gemma",
        GEMMA,
        GEMMA_TAGGED,
        "<bos>",
        "<eos>",
        "<end_of_turn>",
        ("<start_of_turn>",),
        has_system=False,
        is_sentencepiece=True,
    ),
    Family(
        "phi-3",
        PHI_3,
        PHI_3_TAGGED,
        "<s>",
        "<|endoftext|>",
        "<|end|>",
        ("<|system|>", "<|user|>", "<|assistant|>"),
        is_sentencepiece=True,
    ),
    Family("zephyr", ZEPHYR, ZEPHYR_TAGGED, "<s>", "</s>", "</s>", is_sentencepiece=True),
    Family("llama-2", LLAMA_2, LLAMA_2_TAGGED, "<s>", "</s>", "</s>", is_sentencepiece=True),
    Family(
        "deepseek",
        DEEPSEEK,
        DEEPSEEK_TAGGED,
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
)

CHAT = [
    {"role": "system", "content": "Answer in one line."},
    {"role": "user", "content": "What is the capital of France? "},
    {"role": "assistant", "content": "Paris, on the Seine."},
    {"role": "user", "content": "And of Österreich?\nThink  first."},
    {"role": "assistant", "content": "  Wien.\n\nIt lies on the Danube. "},
]


def chat_of(family: Family) -> list[dict[str, str]]:
    """The conversation as this family takes it."""
    return CHAT if family.has_system else CHAT[1:]


def write_tokenizer(folder: Path, family: Family, *, template: str | None) -> Path:
    """A Hugging Face tokenizer folder with this template, or without one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer_json(family))
    config: dict[str, object] = {
        "eos_token": family.eos,
        "bos_token": family.bos and {"content": family.bos, "__type": "AddedToken"},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@cache
def _tokenizer_json(family: Family) -> str:
    tokenizer = FastTokenizer(models.BPE(byte_fallback=family.is_sentencepiece, unk_token=None))
    if family.is_sentencepiece:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()]
        )
        alphabet = [chr(code) for code in range(32, 127)]
        extra = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA_3_WORDS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        alphabet, extra = pre_tokenizers.ByteLevel.alphabet(), []
    special = [each for each in (family.bos, family.eos, family.end_of_turn, *family.special) if each]
    special = list(dict.fromkeys(special))
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=extra, show_progress=False
    )
    text = " ".join(
        [message["content"] for message in CHAT] + ["User: Assistant: [INST] [/INST] <<SYS>>\n\n"]
    )
    tokenizer.train_from_iterator([text] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in special])
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in family.plain])
    if (
        family.bos is not None
    ):  # a plain text gets BOS from the tokenizer, a chat from its template: never both
        bos = (family.bos, tokenizer.token_to_id(family.bos))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[bos]
        )
    return tokenizer.to_str()
