"""Writes adapters as a peft folder: `adapter_config.json` and `adapter_model.safetensors`.

Ranks and scales are made uniform where they differ: A and B are padded with zeros to the largest rank, and
the ratio of the scales is multiplied into B. peft would take a rank and an alpha per module, but inference
servers (vLLM) use one rank and one alpha for all, and no rslora for routed experts.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from meshwright.adapters.peft_config import CONFIG_FILE
from meshwright.adapters.peft_folder import BASE_DIGEST, WEIGHTS_FILE
from meshwright.adapters.peft_names import (
    PeftMatrix,
    PeftModule,
    PeftRows,
    peft_matrices,
    peft_modules,
    peft_rows,
)
from meshwright.errors import CheckpointError
from meshwright.files import new_folder_beside, share_file
from meshwright.spec import AdapterSpec, ModelSpec
from meshwright.spec.adapter import EMBEDDING, LORA_A, LORA_B, MAGNITUDE, adaptable, adapted_weight
from meshwright.spec.huggingface.names import sources
from meshwright.spec.huggingface.projections import hf_projection

_NAMES_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")


def write_peft(
    folder: Path,
    model: ModelSpec,
    adapter: AdapterSpec,
    tensors: Mapping[str, Tensor],
    *,
    base: str | None,
    base_digest: str | None = None,
    merged: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the adapters of a model; `tensors` maps our names to full tensors, `base` names the base model.

    `merged` has the merged weights of the full model: it is read where single rows or full modules were
    trained beside adapters. Called by one process. The folder gets its name only when it is complete.
    """
    if folder.exists():
        raise CheckpointError("this already exists", where=str(folder), hint="name a new folder")
    matrices = peft_matrices(model, adapter, where=str(folder))
    trained = [name for name in tensors if adapted_weight(name) is None]
    modules = peft_modules(model, adapter, trained, where=str(folder))
    rows = peft_rows(model, adapter)
    rank = max(one.matrix.rank for one in matrices)
    is_rslora = adapter.kind == "rslora" and not _needs_fold(matrices)
    scale = adapter.alpha / (rank**0.5 if is_rslora else rank)
    content = {
        key: value
        for one in matrices
        for key, value in _module_tensors(one, tensors, rank=rank, scale=scale).items()
    }
    if modules or rows:
        assert merged is not None
        content |= _full_tensors(modules, merged) | _row_tensors(rows, adapter, merged)
    targets = peft_targets(model, matrices)
    config = peft_config(adapter, rank=rank, is_rslora=is_rslora, targets=targets, base=base)
    if targets.parameters or any(one.matrix.is_expert for one in matrices):
        config["lora_dropout"] = 0.0  # peft takes routed experts for single parameters, and refuses it there
    config |= _beside_adapters(model, adapter, modules, rows)
    metadata = {"format": "pt", **({BASE_DIGEST: base_digest} if base_digest else {})}
    partial = new_folder_beside(folder)
    try:
        save_file(content, partial / WEIGHTS_FILE, metadata=metadata)
        share_file(partial / WEIGHTS_FILE)
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _needs_fold(matrices: Sequence[PeftMatrix]) -> bool:
    """Whether servers would take another scale for some of the matrices: other ranks, or routed experts."""
    scales = {one.matrix.scale for one in matrices}
    return len(scales) > 1 or any(one.matrix.is_expert for one in matrices)


def _module_tensors(
    one: PeftMatrix, tensors: Mapping[str, Tensor], *, rank: int, scale: float
) -> dict[str, Tensor]:
    """The tensors of the modules of one matrix, in fp32, at a common rank and scale."""
    name, missing = one.matrix.name, rank - one.matrix.rank
    a = pad(tensors[f"{name}.{LORA_A}"].float(), (0, 0, 0, missing))
    b = pad(tensors[f"{name}.{LORA_B}"].float() * (one.matrix.scale / scale), (0, missing))
    parts = {LORA_A: a, LORA_B: b}
    if one.matrix.kind == "dora":
        parts[MAGNITUDE] = tensors[f"{name}.{MAGNITUDE}"].float()
    return {
        key: (value.mT if one.is_transposed else value).to("cpu", copy=True).contiguous()
        for own, part in parts.items()
        for key, value in zip(one.keys(own), part if one.matrix.is_expert else [part], strict=True)
    }


def _full_tensors(modules: Sequence[PeftModule], merged: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of modules that were trained in full, in fp32."""
    listed = [pair for module in modules for pair in module.parameters.items()]
    return {key: merged[name].float().clone() for key, name in listed}


def _row_tensors(
    rows: Sequence[PeftRows], adapter: AdapterSpec, merged: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The trained rows of single tokens, in fp32."""
    ids = sorted(adapter.tokens)
    return {one.key: merged[one.table][ids].float() for one in rows}


def _beside_adapters(
    model: ModelSpec, adapter: AdapterSpec, modules: Sequence[PeftModule], rows: Sequence[PeftRows]
) -> dict[str, Any]:
    """The keys of adapter_config.json for what was trained beside adapters."""
    ids = sorted(adapter.tokens)
    of_tables = {one.module.rpartition(".")[2]: ids for one in rows}
    embedding = sources(model)[EMBEDDING].names[0].removesuffix(".weight")
    # peft gives a tied head the rows of the embedding, and with this key a table that was trained in full.
    is_tied = model.tied_head and any(one.name == embedding for one in modules)
    return {
        "modules_to_save": [one.name for one in modules] or None,
        "trainable_token_indices": (ids if model.tied_head else of_tables) if rows else None,
        **({"ensure_weight_tying": True} if is_tied else {}),
    }


class PeftTargets(NamedTuple):
    """What peft attaches adapters to: modules by name, and single parameters."""

    modules: list[str]
    parameters: list[str]


def peft_targets(model: ModelSpec, matrices: Sequence[PeftMatrix]) -> PeftTargets:
    """The targets of a config: the last parts of names where all such matrices have an adapter.

    In models with routed experts peft takes every target that ends in gate_proj, up_proj or down_proj for the
    experts, and would leave out dense MLPs and shared experts. These are named as parameters instead.
    """
    adapted = {one.matrix.weight.name for one in matrices}
    left_out = {hf_projection(model, one.name) for one in adaptable(model) if one.name not in adapted}
    modules, parameters = set[str](), set[str]()
    for one in matrices:
        for module in one.modules:
            short = module.rpartition(".")[2]
            if model.moe is not None and not one.matrix.is_expert and short in _NAMES_OF_EXPERTS:
                parameters.add(f"{module}.weight")
            elif one.matrix.is_expert:
                modules.add(short)
            else:
                modules.add(module if short in left_out else short)
    return PeftTargets(sorted(modules), sorted(parameters))


def peft_config(
    adapter: AdapterSpec, *, rank: int, is_rslora: bool, targets: PeftTargets, base: str | None
) -> dict[str, Any]:
    """The content of adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": None,
        "r": rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": targets.modules,
        "target_parameters": targets.parameters or None,
        "use_rslora": is_rslora,
        "use_dora": adapter.kind == "dora",
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
        "inference_mode": True,
    }
