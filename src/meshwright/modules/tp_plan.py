"""The tp plan that a Hugging Face decoder publishes: which of its modules are cut, and how.

transformers keeps it in `_tp_plan`, from patterns of module names to styles. It is read, never changed, and
what it does not say clearly is refused before anything is cut.
"""

import re
from collections.abc import Iterator

from torch import nn

from meshwright.errors import SpecError

_WHERE = "parallel.tp"
COLUMN_WISE = ("colwise", "colwise_gather_output", "colwise_rep")
ROW_WISE = ("rowwise", "rowwise_split_input", "rowwise_rep")
SUMMED = "replicated_with_grad_allreduce"
LOOKUP = "embedding_rowwise"
_KNOWN = (*COLUMN_WISE, *ROW_WISE, SUMMED, LOOKUP)

Styles = dict[str, str]
"""From the name of a module to how it is cut."""


def read_plan(model: nn.Module, tp: int) -> Styles:
    """How each module is cut over `tp` ranks; raises SpecError for what stands in the way."""
    kind = type(model).__name__
    plan = dict(getattr(model, "_tp_plan", None) or {})
    if not plan:
        raise SpecError(
            f"tp={tp}, but {kind} publishes no tp plan, so nobody has said how its matrices are cut",
            where=_WHERE,
            hint="use tp=1, with dp_shard and zero=3 for large modules",
        )
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise SpecError(
            f"{kind} has an encoder and a decoder, and tp knows decoders only", where=_WHERE, hint="use tp=1"
        )
    styles = _by_module(model, plan)
    _add_tied_tables(model, styles)
    for problem in [*_unknown_styles(model, styles), *_uneven(model, styles, tp), *_unsaid(model, styles)]:
        raise problem
    _require_no_dropout(model)
    return styles


def _by_module(model: nn.Module, plan: dict[str, str]) -> Styles:
    """The modules that the plan's patterns name; a pattern may be for a part that this size does not have."""
    patterns = {re.compile(re.escape(key).replace(r"\*", r"[^.]+")): style for key, style in plan.items()}
    parameters = dict(model.named_parameters())
    for pattern, style in patterns.items():
        named = next((name for name in parameters if pattern.fullmatch(name)), None)
        if named is not None:
            raise SpecError(
                f"the tp plan cuts the parameter {named} ({style}), and only whole layers can be cut here",
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
        raise SpecError("the tp plan names no module that there is", where=_WHERE, hint="use tp=1")
    return styles


def _add_tied_tables(model: nn.Module, styles: Styles) -> None:
    """A table that is also the matrix of a cut head is cut with it, along the vocabulary."""
    cut = {id(model.get_submodule(name).weight) for name in styles if styles[name] in COLUMN_WISE}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name not in styles and id(module.weight) in cut:
            styles[name] = LOOKUP


def _unknown_styles(model: nn.Module, styles: Styles) -> Iterator[SpecError]:
    for name, style in styles.items():
        if style not in _KNOWN:
            fact = f"the tp plan cuts {name} as {style}, which is not known here"
            yield SpecError(fact, where=_WHERE, hint="use tp=1")
        module = model.get_submodule(name)
        wanted = nn.Embedding if style == LOOKUP else nn.Linear
        if style != SUMMED and style in _KNOWN and not isinstance(module, wanted):
            fact = f"{name} is a {type(module).__name__}, and {style} cuts {wanted.__name__}"
            yield SpecError(fact, where=_WHERE, hint="use tp=1")


def _uneven(model: nn.Module, styles: Styles, tp: int) -> Iterator[SpecError]:
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style == SUMMED:
            continue
        dim = 1 if style in ROW_WISE else 0
        size, what = module.get_parameter("weight").shape[dim], ("rows", "columns")[dim]
        head_width = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
        if style == "colwise" and head_width:
            size, what = size // head_width, "heads"
        if size % tp:
            hint = f"choose a tp that divides {size}"
            if style == LOOKUP or name == "lm_head":
                hint += f", or model.resize_token_embeddings(pad_to_multiple_of={tp}) before training"
            yield SpecError(f"tp={tp} does not divide the {size} {what} of {name}", where=_WHERE, hint=hint)


def _unsaid(model: nn.Module, styles: Styles) -> Iterator[SpecError]:
    """Between cut matrices everything sees a part of the features, so the plan must speak of all of it."""
    homes = {name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"}
    for home in sorted(homes):
        inside = model.get_submodule(home)
        for name, _ in inside.named_parameters():
            module = f"{home}.{name}".rpartition(".")[0]
            if module not in styles:
                fact = f"{module} stands between matrices that tp cuts, and the tp plan does not speak of it"
                yield SpecError(fact, where=_WHERE, hint="use tp=1")


def _require_no_dropout(model: nn.Module) -> None:
    """Ranks draw their own masks; tp ranks, who hold the same activations, would need the same ones."""
    for name, module in model.named_modules():
        rates = {key: value for key, value in vars(module).items() if "dropout" in key or key == "p"}
        for key, rate in rates.items():
            if isinstance(rate, float) and rate > 0:
                raise SpecError(
                    f"{name}.{key}={rate:g}: tp ranks of a module that is not ours would drop different "
                    "activations",
                    where=_WHERE,
                    hint="set dropout to 0 in the model's config, or use tp=1",
                )
