"""The tp plan that a Hugging Face decoder publishes: which of its modules are sharded, and how.

transformers has no public name for it: it is in `_tp_plan`, from patterns of module names to styles. It is
read, never changed, and a plan that is unclear is refused before anything is sharded.
"""

import re
from collections.abc import Iterator

from torch import nn

from meshwright.errors import SpecError

_WHERE = "parallel.tp"
COLUMN_WISE = ("colwise", "colwise_gather_output", "colwise_rep")
ROW_WISE = ("rowwise", "rowwise_split_input", "rowwise_rep")
GRAD_ALL_REDUCE = "replicated_with_grad_allreduce"
EMBEDDING = "embedding_rowwise"
_KNOWN = (*COLUMN_WISE, *ROW_WISE, GRAD_ALL_REDUCE, EMBEDDING)

Styles = dict[str, str]
"""From the name of a module to its sharding style."""


def read_tp_plan(model: nn.Module, tp: int) -> Styles:
    """The sharding style of each module for `tp` ranks; raises SpecError where the plan cannot be applied."""
    kind = type(model).__name__
    plan = dict(getattr(model, "_tp_plan", None) or {})
    if not plan:
        raise SpecError(
            f"tp={tp}, but {kind} publishes no tp plan, so how to shard its matrices is not known",
            where=_WHERE,
            hint="use tp=1, with dp_shard and zero=3 for large modules",
        )
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise SpecError(
            f"{kind} has an encoder and a decoder, and tp supports decoders only",
            where=_WHERE,
            hint="use tp=1",
        )
    styles = _by_module(model, plan)
    _add_tied_embeddings(model, styles)
    for problem in [*_unknown_styles(model, styles), *_uneven(model, styles, tp), *_missing(model, styles)]:
        raise problem
    _require_no_dropout(model)
    return styles


def _by_module(model: nn.Module, plan: dict[str, str]) -> Styles:
    """The modules that match the plan's patterns; a pattern may match none."""
    patterns = {re.compile(re.escape(key).replace(r"\*", r"[^.]+")): style for key, style in plan.items()}
    parameters = dict(model.named_parameters())
    for pattern, style in patterns.items():
        named = next((name for name in parameters if pattern.fullmatch(name)), None)
        if named is not None:
            raise SpecError(
                f"the tp plan shards the parameter {named} ({style}), and only full layers are supported",
                where=_WHERE,
                hint="use tp=1",
            )
    styles = {
        name: style
        for name, _ in model.named_modules()
        for pattern, style in patterns.items()
        if pattern.fullmatch(name)
    }
    if not styles:
        raise SpecError("the tp plan matches no module of the model", where=_WHERE, hint="use tp=1")
    return styles


def _add_tied_embeddings(model: nn.Module, styles: Styles) -> None:
    """Shard an embedding that is tied to a sharded head, along the vocabulary."""
    sharded = {id(model.get_submodule(name).weight) for name in styles if styles[name] in COLUMN_WISE}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name not in styles and id(module.weight) in sharded:
            styles[name] = EMBEDDING


def _unknown_styles(model: nn.Module, styles: Styles) -> Iterator[SpecError]:
    for name, style in styles.items():
        if style not in _KNOWN:
            fact = f"the tp plan shards {name} as {style}, which is not supported"
            yield SpecError(fact, where=_WHERE, hint="use tp=1")
        module = model.get_submodule(name)
        wanted = nn.Embedding if style == EMBEDDING else nn.Linear
        if style != GRAD_ALL_REDUCE and style in _KNOWN and not isinstance(module, wanted):
            fact = f"{name} is a {type(module).__name__}, and {style} shards {wanted.__name__}"
            yield SpecError(fact, where=_WHERE, hint="use tp=1")


def _uneven(model: nn.Module, styles: Styles, tp: int) -> Iterator[SpecError]:
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style == GRAD_ALL_REDUCE:
            continue
        dim = 1 if style in ROW_WISE else 0
        size, what = module.get_parameter("weight").shape[dim], ("rows", "columns")[dim]
        head_width = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
        if style == "colwise" and head_width:
            size, what = size // head_width, "heads"
        if size % tp:
            hint = f"choose a tp that divides {size}"
            if style == EMBEDDING or name == "lm_head":
                hint += f", or model.resize_token_embeddings(pad_to_multiple_of={tp}) before training"
            yield SpecError(f"tp={tp} does not divide the {size} {what} of {name}", where=_WHERE, hint=hint)


def _missing(model: nn.Module, styles: Styles) -> Iterator[SpecError]:
    """Modules between sharded matrices see a part of the features, so the plan must contain all of them."""
    parents = {name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"}
    for parent in sorted(parents):
        inside = model.get_submodule(parent)
        for name, _ in inside.named_parameters():
            module = f"{parent}.{name}".rpartition(".")[0]
            if module not in styles:
                fact = f"{module} is between matrices that tp shards, and it is not in the tp plan"
                yield SpecError(fact, where=_WHERE, hint="use tp=1")


def _require_no_dropout(model: nn.Module) -> None:
    """Refuse dropout: ranks draw their own masks, and tp ranks, with the same activations, need the same."""
    for name, module in model.named_modules():
        rates = {key: value for key, value in vars(module).items() if "dropout" in key or key == "p"}
        for key, rate in rates.items():
            if isinstance(rate, float) and rate > 0:
                raise SpecError(
                    f"{name}.{key}={rate:g}: tp ranks of a user module would drop different activations",
                    where=_WHERE,
                    hint="set dropout to 0 in the model's config, or use tp=1",
                )
