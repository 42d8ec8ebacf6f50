"""`meshwright sample`: text from a trained model."""

import json
import math
import sys
from pathlib import Path
from typing import Annotated

import typer


def sample(
    run_dir: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR",
            help="A run directory such as runs/demo, a checkpoint, or a Hugging Face folder.",
        ),
    ],
    prompt: Annotated[str, typer.Option(help="What the text begins with.")],
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="The prompt is a turn of the user: render the chat template; print the answer."
        ),
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, help="Generate at most this many tokens.")] = 200,
    temperature: Annotated[
        float,
        typer.Option(min=0.0, help="Above 1 is more random, below 1 less; 0 takes the most likely token."),
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=1, help="Draw only from this many of the most likely tokens.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
    ema: Annotated[bool, typer.Option("--ema", help="Use the moving average of the weights.")] = False,
    no_adapter: Annotated[
        bool, typer.Option("--no-adapter", help="Of a run with adapters: the base without them.")
    ] = False,
    checkpoint: Annotated[
        int | None,
        typer.Option(metavar="STEP", min=0, help="The checkpoint of this step.", show_default="the last"),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="`bytes`, a tokenizer.json, or a folder with one.", show_default="that of the dataset"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Print text that a trained model writes after a prompt.

    Runs in one process, whatever mesh the model was trained on. The text ends where the model ends
    the document (with --chat: the turn), or after --tokens.
    """
    _require_values(temperature, device, top_k)
    from meshwright.checkpoint.weights import open_weights
    from meshwright.data.chat.prompt import chat_prompt, text_prompt, was_trained_on_chats
    from meshwright.mesh import choose_device
    from meshwright.train.sample import (
        Sampling,
        choose_tokenizer,
        describe_origin,
        limit_threads,
        sample_text,
    )

    weights = open_weights(run_dir, step=checkpoint, averaged=ema, merges_adapters=not no_adapter)
    limit_threads(weights)
    chosen = choose_tokenizer(weights, tokenizer)
    sampling = Sampling(num_tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    data = None if tokenizer is not None or weights.run is None else weights.run.data
    asked = chat_prompt(chosen, prompt, data) if chat else text_prompt(chosen, prompt)
    text = sample_text(weights, chosen, asked, sampling, choose_device(device, 0))
    if as_json:
        facts = {
            "prompt": prompt,
            "text": text,
            "chat": chat,
            "checkpoint": str(weights.origin),
            "step": weights.step,
            "with_adapter": weights.adapters is not None,
        }
        typer.echo(json.dumps({**facts, "temperature": temperature, "top_k": top_k, "seed": seed}, indent=2))
        return
    print(f"from {describe_origin(weights, without_adapter=no_adapter)}", file=sys.stderr)
    if not chat and data is not None and was_trained_on_chats(data):
        print("note: the run's data are chats; --chat makes the prompt a turn of the user", file=sys.stderr)
    typer.echo(text if chat else prompt + text)


def _require_values(temperature: float, device: str, top_k: int | None) -> None:
    if not math.isfinite(temperature):
        raise typer.BadParameter(f"{temperature} is not a finite number", param_hint="--temperature")
    if device not in ("cpu", "cuda", "auto"):
        raise typer.BadParameter(f"{device!r} is none of cpu, cuda and auto", param_hint="--device")
    if temperature == 0 and top_k is not None:
        raise typer.BadParameter("with --temperature 0 it has no effect", param_hint="--top-k")
