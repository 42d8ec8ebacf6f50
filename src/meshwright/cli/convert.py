"""`meshwright convert`: weights to and from Hugging Face safetensors and torch files."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from meshwright.checkpoint.convert import Form
    from meshwright.checkpoint.weights import Weights

FORMS = ("huggingface", "checkpoint", "torch", "peft")


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FROM",
            help="A run directory, a checkpoint, a folder of Hugging Face, DCP or Megatron, or a .pt file.",
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="TO", help="A new folder, or a new .pt file.")],
    form: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="FORM",
            help="huggingface, checkpoint, torch or peft.",
            show_default="torch for a .pt file; else huggingface, or checkpoint from a Hugging Face folder",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16.", show_default="as in the source")
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Take the moving average of the weights.")] = False,
    checkpoint: Annotated[
        int | None,
        typer.Option(metavar="STEP", min=0, help="The checkpoint of this step.", show_default="the last"),
    ] = None,
    onto_original: Annotated[
        bool,
        typer.Option(
            "--onto-original",
            help="Merge adapters that were trained on fp8 or NF4 weights (QLoRA) into the original base.",
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="For weights that name no model (.pt, DCP, Megatron): a family or a config.json."),
    ] = None,
) -> None:
    """Write the weights of a model in another form, and print where.

    A Hugging Face folder (config.json, safetensors, the dataset's tokenizer) is what transformers and
    inference servers read. A checkpoint made from one is what `checkpoint.start_from` reads; a run can
    also start from the Hugging Face folder itself. Adapters are merged into their base, in fp32 and rounded
    once; --to peft writes them alone, as a folder that peft and inference servers read. Nothing that exists
    is overwritten, and the target appears only when it is complete.
    """
    from meshwright.checkpoint.convert import (
        DTYPES,
        convert_weights,
        form_of_target,
        merge_note,
        serving_note,
    )
    from meshwright.checkpoint.export import dataset_note
    from meshwright.checkpoint.weights import named_model, open_weights

    _require_known("--to", form, FORMS)
    _require_known("--dtype", dtype, list(DTYPES))
    named = named_model(model) if model is not None else None
    weights = open_weights(source, step=checkpoint, averaged=ema, model=named, onto_original=onto_original)
    chosen = cast("Form", form) if form else form_of_target(weights, target)
    _require_effect(weights, is_peft=chosen == "peft", dtype=dtype, onto_original=onto_original)
    target_dtype = DTYPES[dtype] if dtype else None
    convert_weights(weights, target, chosen, dtype=target_dtype)
    if chosen == "peft":
        note = serving_note(weights, target)
    else:
        note = merge_note(weights, target_dtype, onto_original=onto_original)
    notes = [note, dataset_note(weights) if chosen == "huggingface" else None]
    for one in filter(None, notes):
        print(one, file=sys.stderr)
    print(f"from {weights.origin}, written as {chosen}", file=sys.stderr)
    typer.echo(str(target))


def _require_known(option: str, value: str | None, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        *first, last = known
        raise typer.BadParameter(f"{value!r} is none of {', '.join(first)} and {last}", param_hint=option)


def _require_effect(weights: "Weights", *, is_peft: bool, dtype: str | None, onto_original: bool) -> None:
    """Refuse options that the written form does not use."""
    from meshwright.checkpoint.convert import quantised_base

    if is_peft and dtype is not None:
        raise typer.BadParameter("adapters are written in fp32", param_hint="--dtype")
    if onto_original and (is_peft or quantised_base(weights) is None):
        fact = "nothing is merged" if is_peft else "there are no adapters that were trained on fp8 or NF4"
        raise typer.BadParameter(f"{fact}, so it has no effect", param_hint="--onto-original")
