"""A Hugging Face folder that goes through a checkpoint or a run comes out with all that came in."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.support.run_files import train_run_file, write_run_file

from meshwright.cli.main import run
from meshwright.data.byte_tokenizer_file import byte_tokenizer_json

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 7,
    "eos_token_id": [256, 9],
    "pad_token_id": 5,
}
FAMILIES: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "qwen2": transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=16),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=64),
    "mixtral": transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=7, eos_token_id=256
    ),
}


def write_folder(folder: Path, family: str, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A folder as transformers writes it, with a tokenizer, a chat template and a generation config."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]).to(dtype)
    model.generation_config.temperature, model.generation_config.do_sample = 0.6, True
    model.save_pretrained(folder)
    (folder.parent / "tokenizer.json").write_bytes(byte_tokenizer_json())
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder.parent / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith("model")}


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_in_and_out_is_equal(family: str, tmp_path: Path):
    came_in = write_folder(tmp_path / "in", family)
    assert run(["convert", str(came_in), str(tmp_path / "checkpoint")]) == 0
    assert run(["convert", str(tmp_path / "checkpoint"), str(tmp_path / "out")]) == 0
    assert config(tmp_path / "out") == config(came_in)
    before, after = contents(came_in), contents(tmp_path / "out")
    assert {"generation_config.json", "tokenizer_config.json", "chat_template.jinja"} <= before.keys()
    assert {name: after.get(name) for name in before if name != "config.json"} == {
        name: content for name, content in before.items() if name != "config.json"
    }
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", came_in))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


def test_a_run_that_starts_from_a_folder_carries_its_files(tmp_path: Path):
    came_in = write_folder(tmp_path / "in", "llama")
    file = write_run_file(
        tmp_path / "run.yaml", model=str(came_in), checkpoint={"start_from": str(came_in)},
        schedule={"num_steps": 1}, optim={"lr": 1e-3},
    )  # fmt: skip
    assert run(["train", file, "--dir", str(tmp_path / "run"), "-q"]) == 0
    kept = contents(came_in)
    for path in came_in.iterdir():
        path.unlink()  # the folder may be gone when the run is exported
    assert run(["convert", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    exported = contents(tmp_path / "out")
    # The generated corpus is in bytes: its tokenizer takes the place of the one that came in.
    assert exported["config.json"] != kept["config.json"]
    assert config(tmp_path / "out")["eos_token_id"] == 256
    assert {**config(tmp_path / "out"), **special(kept)} == json.loads(kept["config.json"])


def special(files: dict[str, bytes]) -> dict[str, Any]:
    came_in = json.loads(files["config.json"])
    return {key: came_in[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def train_and_convert(folder: Path, came_in: Path, data: dict[str, Any]) -> None:
    """One step of full fine-tuning in `run`, and its Hugging Face folder in `out`."""
    file = write_run_file(
        folder / "run.yaml", model=str(came_in), checkpoint={"start_from": str(came_in)}, data=data,
        schedule={"num_steps": 1}, optim={"lr": 1e-3},
    )  # fmt: skip
    assert run(["train", file, "--dir", str(folder / "run"), "-q"]) == 0
    assert run(["convert", str(folder / "run"), str(folder / "out")]) == 0


def test_a_dataset_with_the_tokenizer_that_came_in_keeps_everything(tmp_path: Path):
    came_in = write_folder(tmp_path / "in", "qwen3")
    (tmp_path / "text.txt").write_text("the fox and the crow\n" * 60)
    pack = ["data", "pack", str(tmp_path / "text.txt"), "-o", str(tmp_path / "packed")]
    assert run([*pack, "--tokenizer", str(came_in)]) == 0
    data = {"path": str(tmp_path / "packed"), "sequence_length": 16, "batch_sequences": 2}
    train_and_convert(tmp_path, came_in, data)
    assert config(tmp_path / "out") == config(came_in)
    before, after = contents(came_in), contents(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(after[name] == content for name, content in before.items() if name != "config.json")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_template_of_the_chats_is_exported_and_generation_stops_at_the_end_of_a_turn(tmp_path: Path):
    """The base has another template and stops at the end of a document; the chats have new tokens."""
    came_in = write_folder(tmp_path / "in", "llama")
    tokenizer = transformers.AutoTokenizer.from_pretrained(came_in)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    turns = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    pack = ["data", "pack", str(tmp_path / "chats.jsonl"), "--chat", "auto", "-o", str(tmp_path / "packed")]
    pack += ["--tokenizer", str(tmp_path / "tokenizer"), "--template", str(tmp_path / "template.jinja")]
    assert run(pack) == 0
    data = {"path": str(tmp_path / "packed"), "sequence_length": 64, "batch_sequences": 1, "packing": "whole"}
    train_and_convert(tmp_path, came_in, data)
    served = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert served.apply_chat_template(turns, tokenize=False) == tokenizer.apply_chat_template(
        turns, tokenize=False, chat_template=TEMPLATE
    )
    assert served.convert_tokens_to_ids("<|im_end|>") == tokenizer.convert_tokens_to_ids("<|im_end|>") == 258
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.eos_token_id, generation.temperature) == ([256, 9, 258], 0.6)
    assert config(tmp_path / "out") == config(came_in)


def test_exported_weights_have_the_permissions_of_a_new_file(tmp_path: Path):
    assert run(["convert", str(train_run_file(tmp_path)), str(tmp_path / "out")]) == 0
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


class _ThenEnd(transformers.LogitsProcessor):
    """Makes token 256 the most likely one after some tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= 9:
            scores[:, 256] = scores.max() + 1
        return scores


def test_a_byte_run_exports_a_tokenizer_that_transformers_opens(tmp_path: Path):
    directory = train_run_file(tmp_path)
    assert run(["convert", str(directory), str(tmp_path / "out")]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "Fox & crow: naïve 狐\n\ttabs"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.eos_token_id, len(tokenizer)) == (256, 257)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 256
    assert model.config.bos_token_id is None and model.config.pad_token_id is None
    prompt = torch.tensor([list(b"It was")])
    written = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=50,
        do_sample=False,
        pad_token_id=256,
        logits_processor=transformers.LogitsProcessorList([_ThenEnd()]),
    )
    assert written.shape[1] == 10 and written[0, -1] == 256


def test_another_model_than_came_in_gets_a_config_of_its_own(tmp_path: Path):
    came_in = write_folder(tmp_path / "in", "llama", dtype=torch.float32)
    model = {"family": str(came_in), "rope": {"theta": 77.0}}
    file = write_run_file(
        tmp_path / "run.yaml", model=model, checkpoint={"start_from": str(came_in)},
        schedule={"num_steps": 1}, optim={"lr": 1e-3},
    )  # fmt: skip
    assert run(["train", file, "--dir", str(tmp_path / "run"), "-q"]) == 0
    assert run(["convert", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    found = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert found.rope_parameters["rope_theta"] == 77.0
