"""A Hugging Face causal language model by its folder: no line of code, one run file.

    python examples/hf_model.py

In place of a download it makes a small Llama with random weights and saves it as the hub stores it. Then it
runs the two commands that a user would type, on two ranks: train from the folder, and convert the result to a
Hugging Face folder again.
"""

import subprocess
import sys
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

RUN = """\
name: from-hub
model: {folder}
checkpoint: {{start_from: {folder}}}
device: cpu
parallel: {{dp_shard: 2, zero: 3}}
memory: {{recompute: full}}
optim: {{lr: 2e-3}}
schedule: {{num_steps: 20, warmup_steps: 2}}
data: {{synthetic: {{num_documents: 200}}, sequence_length: 64, batch_sequences: 8, microbatch_sequences: 4}}
"""


def download(folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def meshwright(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "meshwright", *arguments], check=True)


def main(home: Path) -> None:
    download(home / "llama")
    (home / "run.yaml").write_text(RUN.format(folder=home / "llama"))
    meshwright("train", str(home / "run.yaml"), "--dir", str(home / "run"))
    meshwright("convert", str(home / "run"), str(home / "trained"))
    trained = LlamaForCausalLM.from_pretrained(home / "trained")
    print(f"trained {trained.num_parameters():,} parameters, back in {home / 'trained'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/from-hub"))
