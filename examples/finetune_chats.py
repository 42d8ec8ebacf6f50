"""From chats in a file to an adapter (LoRA) and a merged Hugging Face folder, and on to preferences (DPO).

    python examples/finetune_chats.py

In place of a download it makes a small Llama with random weights, and a tokenizer with a chat template. Then
it runs the commands that a user would type: pack the chats, look at what is trained, train adapters, ask the
model with and without them, write them as a peft folder, merge them into a Hugging Face folder, pack pairs of
answers, train on them from that folder.
"""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from meshwright.cli.main import run as run_command
from meshwright.data.byte_tokenizer_file import byte_tokenizer_json

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SUMS = [(one, other) for one in range(8) for other in range(8)]
RUN = """\
name: {name}
model: {folder}
checkpoint: {{start_from: {folder}}}
device: cpu
optim: {{lr: {rate}}}
schedule: {{num_steps: {steps}, warmup_steps: 2}}
data: {{path: {data}, packing: whole, sequence_length: 256, batch_sequences: 4, microbatch_sequences: 2}}
"""


def download(folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=259,
        initializer_range=0.2,  # with the usual 0.02, adapters can hardly move the logits of a frozen head
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    set_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer.from_buffer(byte_tokenizer_json())
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_chats(path: Path) -> None:
    chats = [
        [
            {"role": "user", "content": f"{one} + {other}?"},
            {"role": "assistant", "content": f"It is {one + other}."},
        ]
        for one, other in SUMS
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def write_pairs(path: Path) -> None:
    pairs = [
        {
            "prompt": [{"role": "user", "content": f"{one} + {other}?"}],
            "chosen": f"{one + other}",
            "rejected": f"It is {one + other}.",
        }
        for one, other in SUMS
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def meshwright(*arguments: str) -> None:
    """The command `meshwright`, in this process."""
    if (code := run_command(list(arguments))) != 0:
        raise SystemExit(code)


def main(home: Path) -> None:
    model, chats, pairs = home / "llama", home / "chats", home / "pairs"
    download(model)
    write_chats(home / "chats.jsonl")
    write_pairs(home / "pairs.jsonl")
    packed = ("--chat", "auto", "--tokenizer", str(model), "--seq", "256")
    meshwright("data", "pack", str(home / "chats.jsonl"), "-o", str(chats), *packed)
    meshwright("data", "inspect", str(chats), "--samples", "1")
    run = RUN.format(name="chats", folder=model, data=chats, rate="1e-2", steps=24)
    (home / "chats.yaml").write_text(run + "adapter: {rank: 16, alpha: 32}\n")
    tuned = str(home / "run-chats")
    meshwright("train", str(home / "chats.yaml"), "--dir", tuned)
    question = ("--chat", "--prompt", "2 + 3?", "--tokens", "12", "--temperature", "0")
    meshwright("sample", tuned, *question)
    meshwright("sample", tuned, *question, "--no-adapter")
    meshwright("convert", tuned, str(home / "adapter"), "--to", "peft")
    meshwright("convert", tuned, str(home / "merged"))
    meshwright("data", "pack", str(home / "pairs.jsonl"), "-o", str(pairs), *packed)
    run = RUN.format(name="pairs", folder=home / "merged", data=pairs, rate="1e-3", steps=8)
    (home / "pairs.yaml").write_text(run + "preference: {beta: 0.1}\n")
    meshwright("train", str(home / "pairs.yaml"), "--dir", str(home / "run-pairs"))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/finetune-chats"))
