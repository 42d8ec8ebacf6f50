"""Rules about adapters and frozen parameters."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import lru_cache

from meshwright.errors import SpecError
from meshwright.spec.adapter import (
    NF4_BLOCK,
    NF4_FORMATS,
    AdaptedMatrix,
    AdapterSpec,
    adaptable,
    adapted_matrices,
    adapted_weight,
    adapter_parameters,
    all_adaptable,
    is_trained,
    matches,
    target_names,
    token_tables,
)
from meshwright.spec.fp8 import FP8_MULTIPLE, fp8_base_groups
from meshwright.spec.model import ModelSpec
from meshwright.spec.parameters import parameters
from meshwright.spec.placement import tp_dim
from meshwright.spec.run import RunSpec
from meshwright.spec.violations import nearest

Violations = Iterator[SpecError]


def parameter_names(run: RunSpec) -> list[str]:
    """Names of all parameters of a run: the model's and those of its adapters."""
    listed = [*parameters(run.model), *adapter_parameters(run.model, run.adapter)]
    return [parameter.name for parameter in listed]


def adapter_targets_exist(run: RunSpec) -> Violations:
    """Every name in `adapter.targets` matches a linear or routed experts of the model."""
    if run.adapter is None:
        return
    if not run.adapter.targets:
        hint = "leave it out for all linears, or name some"
        yield SpecError("adapter.targets is empty", where="adapter.targets", hint=hint)
    known = target_names(run.model)
    for target in run.adapter.targets:
        if any(matches(run.model, weight, target) for weight in all_adaptable(run.model)):
            continue
        listed = f"the model has {', '.join(known)}; patterns match names such as {_example(run)!r}"
        # Names as in a peft folder, such as model.layers.0.self_attn.q_proj, end in one that is known.
        close = nearest(target, known) or nearest(target.rpartition(".")[2], known)
        hint = f"{close} {listed}".strip()
        yield SpecError(f"target {target!r} matches no linear", where="adapter.targets", hint=hint)


def _example(run: RunSpec) -> str:
    return adaptable(run.model)[0].name.removesuffix(".weight")


def adapter_ranks_exist(run: RunSpec) -> Violations:
    """Every pattern in `adapter.ranks` matches a matrix with an adapter."""
    if run.adapter is None:
        return
    adapted = [one.weight for one in adapted_matrices(run.model, run.adapter)]
    for index, own in enumerate(run.adapter.ranks):
        if not any(matches(run.model, weight, own.pattern) for weight in adapted):
            fact = f"pattern {own.pattern!r} matches no matrix with an adapter"
            hint = f"{nearest(own.pattern, target_names(run.model))} see adapter.targets".strip()
            if any(matches(run.model, weight, own.pattern) for weight in adaptable(run.model)):
                hint = f"add {own.pattern!r} to adapter.targets, or leave the rank out"
            yield SpecError(fact, where=f"adapter.ranks.{index}.pattern", hint=hint)


def adapter_ranks_are_low(run: RunSpec) -> Violations:
    """The rank of an adapter is below both widths of its matrix."""
    one = None if run.adapter is None else _too_high(run.model, run.adapter)  # pyright: ignore[reportArgumentType]  frozen, so hashable
    if one is not None:
        shape = " x ".join(map(str, one.weight.shape[-2:]))
        fact = f"rank={one.rank} of {one.weight.name}, a matrix of {shape}"
        yield SpecError(fact, where="adapter.rank", hint=f"use less than {min(one.weight.shape[-2:])}")


@lru_cache(maxsize=8)
def _too_high(model: ModelSpec, adapter: AdapterSpec) -> AdaptedMatrix | None:
    """The first matrix whose rank is not below its widths."""
    matrices = adapted_matrices(model, adapter)
    return next((one for one in matrices if one.rank >= min(one.weight.shape[-2:])), None)


def adapter_kind_fits_targets(run: RunSpec) -> Violations:
    """DoRA is for linears and experts of the blocks."""
    adapter = run.adapter
    if adapter is None or adapter.kind != "dora":
        return
    at_ends = [one.weight.kind for one in adapted_matrices(run.model, adapter) if one.weight.layer is None]
    if at_ends:
        fact = f"kind=dora with the {' and the '.join(at_ends)} as targets"
        yield SpecError(
            fact, where="adapter.kind", hint="use kind=lora, or leave them out of adapter.targets"
        )


def adapter_tokens_exist(run: RunSpec) -> Violations:
    """Every id in `adapter.tokens` is in the vocabulary, and is listed once."""
    tokens = run.adapter.tokens if run.adapter is not None else ()
    outside = [token for token in tokens if token >= run.model.vocab_size]
    if outside:
        fact = f"token {outside[0]} with model.vocab_size={run.model.vocab_size}"
        yield SpecError(fact, where="adapter.tokens", hint=f"ids are below {run.model.vocab_size}")
    twice = [token for token in dict.fromkeys(tokens) if tokens.count(token) > 1]
    if twice:
        yield SpecError(f"token {twice[0]} is listed twice", where="adapter.tokens", hint="list it once")


def adapter_tokens_are_trained_once(run: RunSpec) -> Violations:
    """A table with trained rows has no adapter, and is not trained in full."""
    adapter = run.adapter
    if adapter is None or not adapter.tokens:
        return
    tables = [one.name for one in token_tables(run.model)]
    adapted = [one.weight.name for one in adapted_matrices(run.model, adapter) if one.weight.layer is None]
    if adapted:
        fact = f"adapter.tokens with an adapter on {adapted[0]}"
        hint = "leave embedding and head out of adapter.targets, or leave adapter.tokens out"
        yield SpecError(fact, where="adapter.tokens", hint=hint)
    in_full = [name for name in tables if is_trained(name, adapter, run.train_only)]
    if in_full:
        fact = f"adapter.tokens with {in_full[0]} in train_only, which trains all rows"
        yield SpecError(fact, where="adapter.tokens", hint="leave one of them out")


def new_tokens_are_trained(run: RunSpec) -> Violations:
    """New tokens have a base without them, and beside adapters their rows are trained."""
    count, vocabulary, where = run.checkpoint.new_tokens, run.model.vocab_size, "checkpoint.new_tokens"
    if not count:
        return
    if run.checkpoint.start_from is None:
        hint = "name the folder in checkpoint.start_from, or leave new_tokens out"
        yield SpecError(f"new_tokens={count} without checkpoint.start_from", where=where, hint=hint)
    if count >= vocabulary:
        fact = f"new_tokens={count} with model.vocab_size={vocabulary}"
        hint = "model.vocab_size is the size with the new tokens"
        yield SpecError(fact, where=where, hint=hint)
        return
    first = vocabulary - count
    missing = sorted(set(range(first, vocabulary)) - set(run.adapter.tokens if run.adapter else ()))
    tables = [one.name for one in token_tables(run.model)]
    if missing and not all(is_trained(name, run.adapter, run.train_only) for name in tables):
        fact = f"row {missing[0]} of the vocabulary is new, and it is not trained"
        ids = f"{first} to {vocabulary - 1}" if count > 1 else str(first)
        hint = f"list the ids {ids} in adapter.tokens, or add {' and '.join(tables)} to train_only"
        yield SpecError(fact, where=where, hint=hint)


def adapter_dropout_has_effect(run: RunSpec) -> Violations:
    """Dropout keeps some inputs of an adapter; an adapter of the embedding, which reads tokens, has none."""
    adapter, where = run.adapter, "adapter.dropout"
    if adapter is None or not adapter.dropout:
        return
    if adapter.dropout == 1:
        yield SpecError("adapter.dropout=1 drops every input", where=where, hint="use less, such as 0.05")
    if {one.weight.kind for one in adapted_matrices(run.model, adapter)} == {"embedding"}:
        fact = f"adapter.dropout={adapter.dropout:g} with the embedding as the only target"
        yield SpecError(fact, where=where, hint="leave it out, or add linears to adapter.targets")


def bf16_base_computes_in_bf16(run: RunSpec) -> Violations:
    """A frozen base in bf16 has matmuls in bf16."""
    if run.adapter is not None and run.adapter.base == "bf16" and run.precision.compute != "bf16":
        fact = f"adapter.base=bf16 with compute={run.precision.compute}"
        hint = "use precision.compute=bf16, or adapter.base=weights"
        yield SpecError(fact, where="adapter.base", hint=hint)


def nf4_divides_widths(run: RunSpec) -> Violations:
    """A frozen base in NF4 has input widths on a rank that are multiples of 64."""
    if run.adapter is None or run.adapter.base not in NF4_FORMATS:
        return
    for weight in adaptable(run.model):
        is_sharded = tp_dim(weight.name, run.parallel) == len(weight.shape) - 1
        width = weight.shape[-1] // (run.parallel.tp if is_sharded else 1)
        if width % NF4_BLOCK:
            inputs = f"{weight.name} has {width} inputs on a rank"
            fact = f"adapter.base={run.adapter.base}, and {inputs}, no multiple of 64"
            yield SpecError(fact, where="adapter.base", hint=_other_base(run, weight.shape[-1] % NF4_BLOCK))
            return


def _other_base(run: RunSpec, remainder: int) -> str:
    """The hint where a width on a rank does not fit the format; `remainder` is that of the full width."""
    smaller_tp = ", or a smaller parallel.tp" if run.parallel.tp > 1 and not remainder else ""
    return f"use adapter.base={_unpacked(run)}{smaller_tp}"


def _unpacked(run: RunSpec) -> str:
    """The base that is not packed: bf16 computes in bf16 only."""
    return "bf16" if run.precision.compute == "bf16" else "weights"


def fp8_base_computes_in_bf16(run: RunSpec) -> Violations:
    """A frozen base in fp8 needs compute=bf16 for the other layers; fp64 is for proofs."""
    if run.adapter is None or run.adapter.base != "fp8" or run.precision.compute in ("bf16", "fp64"):
        return
    fact = f"adapter.base=fp8 with compute={run.precision.compute}"
    yield SpecError(fact, where="adapter.base", hint="use precision.compute=bf16, or adapter.base=weights")


def fp8_base_divides_widths(run: RunSpec) -> Violations:
    """A frozen base in fp8 has linears and experts whose dims on a rank are multiples of 16."""
    if run.adapter is None or run.adapter.base != "fp8":
        return
    multiple = FP8_MULTIPLE["current"]
    for weight in (one for group in fp8_base_groups(run.model) for one in group):
        dim, local = tp_dim(weight.name, run.parallel), list(weight.shape)
        if dim is not None:
            local[dim] //= run.parallel.tp
        shape = local[-2:]
        if any(each % multiple for each in shape):
            size = " x ".join(map(str, shape))
            fact = f"adapter.base=fp8, and {weight.name} is {size} on a rank, no multiples of {multiple}"
            hint = _other_base(run, sum(each % multiple for each in weight.shape[-2:]))
            yield SpecError(fact, where="adapter.base", hint=hint)
            return


def packed_base_fits_other_settings(run: RunSpec) -> Violations:
    """A base in NF4 or fp8 has no `precision.fp8`, offloaded or trained linears."""
    if run.adapter is None or run.adapter.base not in ("fp8", *NF4_FORMATS):
        return
    others = {
        "precision.fp8": run.precision.fp8 is not None,
        "memory.offload=parameters": "parameters" in run.memory.offload,
        "linears in train_only": any(
            fnmatchcase(weight.name, pattern) for weight in adaptable(run.model) for pattern in run.train_only
        ),
    }
    for text, is_set in others.items():
        if is_set:
            fact = f"adapter.base={run.adapter.base} with {text}"
            yield SpecError(fact, where="adapter.base", hint=f"use adapter.base={_unpacked(run)}")


def trained_patterns_exist(run: RunSpec) -> Violations:
    """Every pattern of `train_only` matches a parameter of the model."""
    # The list is long, and the planner checks many layouts.
    names = [parameter.name for parameter in parameters(run.model)] if run.train_only else []
    for index, pattern in enumerate(run.train_only):
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        fact = f"pattern {pattern!r} matches no parameter"
        hint = f"{nearest(pattern, names)} names are like {names[1]!r}".strip()
        if adapted_weight(pattern) is not None:
            hint = "adapters are always trained: leave it out"
        yield SpecError(fact, where=f"train_only.{index}", hint=hint)


ADAPTER_RULES = [
    adapter_targets_exist,
    adapter_ranks_exist,
    adapter_ranks_are_low,
    adapter_kind_fits_targets,
    adapter_tokens_exist,
    adapter_tokens_are_trained_once,
    new_tokens_are_trained,
    adapter_dropout_has_effect,
    bf16_base_computes_in_bf16,
    nf4_divides_widths,
    fp8_base_computes_in_bf16,
    fp8_base_divides_widths,
    packed_base_fits_other_settings,
    trained_patterns_exist,
]
