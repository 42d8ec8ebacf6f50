"""What cannot be done with a user module, refused before anything is changed."""

from collections import defaultdict

from torch import nn

from meshwright.errors import SpecError
from meshwright.modules.blocks import Blocks
from meshwright.ops.batch_norm import batch_norms
from meshwright.spec.modules import ModuleSpec


def require_trainable(model: nn.Module, blocks: Blocks, spec: ModuleSpec) -> None:
    """Raise SpecError for the first setting that the module does not support."""
    kind = type(model).__name__
    parameters = dict(model.named_parameters())
    if not any(one.requires_grad for one in parameters.values()):
        raise SpecError(
            f"{kind} has no parameter with requires_grad",
            where="model",
            hint="set requires_grad on the parameters to train",
        )
    empty = [name for name, one in parameters.items() if one.is_meta]
    if empty:
        raise SpecError(
            f"{len(empty)} parameters of {kind} have no values (meta device), first {empty[0]}",
            where="model",
            hint="build it on the CPU, or load its weights first",
        )
    if spec.memory.on_oom != "stop":
        raise SpecError(
            f"on_oom={spec.memory.on_oom} is for models described by a run file",
            where="memory.on_oom",
            hint="leave it at stop",
        )
    if spec.sync_batch_norm and not batch_norms(model):
        raise SpecError(
            f"{kind} has no batch norm to synchronise",
            where="sync_batch_norm",
            hint="leave sync_batch_norm out",
        )
    _require_blocks(model, blocks, spec)
    _require_one_forward(model, spec)
    if spec.parallel.zero == 3:
        _require_shardable(model, blocks)


def _require_blocks(model: nn.Module, blocks: Blocks, spec: ModuleSpec) -> None:
    wanted = {
        "memory.recompute": spec.memory.recompute != "none",
        "memory.offload": "activations" in spec.memory.offload,
        "compile": spec.compile,
    }
    for where, is_wanted in wanted.items():
        if is_wanted and not blocks:
            raise SpecError(
                f"{type(model).__name__} has no list of modules of one class that have submodules, and "
                f"{where} works block by block",
                where=where,
                hint=f"name the modules: {_example_of_blocks(model)}",
            )


def _example_of_blocks(model: nn.Module) -> str:
    """`blocks=` for the first list of the model, whose members have no submodules; else for its children."""
    for name, module in model.named_modules():
        if name and isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
            return f"blocks='{name}.*' takes the members of {name}"
    return "blocks='*' takes all children of the model"


def _require_one_forward(model: nn.Module, spec: ModuleSpec) -> None:
    """Recompute runs a forward twice, so a forward with side effects is refused."""
    if spec.memory.recompute == "none":
        return
    if _keeps_keys(getattr(model, "config", None)):
        raise SpecError(
            "config.use_cache is on: recompute would add keys to the cache a second time",
            where="memory.recompute",
            hint="set model.config.use_cache = False",
        )
    if spec.compile and batch_norms(model):
        raise SpecError(
            "compiled blocks would update the running statistics of batch norm twice when recomputed",
            where="compile",
            hint="set compile=False or recompute='none'",
        )


def _keeps_keys(config: object) -> bool:
    """Whether a Hugging Face decoder would fill a cache; encoders have the setting without using it."""
    is_decoder = getattr(config, "is_decoder", True) or getattr(config, "is_encoder_decoder", False)
    return bool(getattr(config, "use_cache", False) and is_decoder)


def _require_shardable(model: nn.Module, blocks: Blocks) -> None:
    """ZeRO-3 gathers one block at a time, so a parameter belongs to one of them or to none."""
    homes: dict[int, set[str]] = defaultdict(set)
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        home = next((block for block in blocks if name.startswith(f"{block}.")), "the rest of the model")
        homes[id(parameter)].add(home)
        names.setdefault(id(parameter), name)
        if parameter.ndim == 0:
            raise SpecError(
                f"{name} is a scalar, which ZeRO-3 cannot shard",
                where="parallel.zero",
                hint="use zero=2, or give it the shape [1]",
            )
    shared = {names[key]: sorted(found) for key, found in homes.items() if len(found) > 1}
    for name, found in shared.items():
        raise SpecError(
            f"{name} is shared by {' and '.join(found)}, which ZeRO-3 gathers at different times",
            where="parallel.zero",
            hint="use zero=2, or a wider pattern in `blocks`",
        )
