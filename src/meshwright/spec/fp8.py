"""The linear layers that compute in fp8: plain data that `parallel/` applies and `plan/` prices.

In the blocks between the bf16 ends these are the linears that tp can shard, if the local dims of a rank are
multiples of the recipe's block, and with `precision.fp8.experts` the routed experts. Head, embedding, norms,
the core of attention and router stay in bf16; so do MLA's projections to a latent, whose gradients are
partial sums over tp that fp8 would round one by one.
"""

from collections.abc import Iterator

from meshwright.spec.model import ModelSpec
from meshwright.spec.parallel import ParallelSpec
from meshwright.spec.parameters import Parameter, layer_parameters, parameters
from meshwright.spec.placement import tp_dim
from meshwright.spec.run import RunSpec

# Elements along the contracted dim that share a scale; with per-tensor scales, what the kernels require.
FP8_MULTIPLE = {"current": 16, "delayed": 16, "blockwise": 128, "mxfp8": 32}

EXPERT_RECIPES = ("current", "blockwise")
"""The recipes for which routed experts have fp8 matmuls."""


def fp8_layers(run: RunSpec) -> range:
    """The blocks whose linears are in fp8."""
    if run.precision.fp8 is None:
        return range(0)
    ends = run.precision.fp8.bf16_layers_each_end
    return range(ends, run.model.num_layers - ends)


def fp8_weights(run: RunSpec, layer: int) -> list[Parameter]:
    """The weights of a layer that are used in fp8 matmuls."""
    return [weight for weight, shape in _candidates(run, layer) if _is_aligned(run, shape)]


def unaligned_weights(run: RunSpec, layer: int) -> list[Parameter]:
    """The weights of a layer that stay in bf16 because their local dims are not multiples of the block."""
    return [weight for weight, shape in _candidates(run, layer) if not _is_aligned(run, shape)]


def fp8_experts(run: RunSpec, layer: int) -> list[Parameter]:
    """The routed experts' weights of a layer that are used in fp8 matmuls."""
    fp8 = run.precision.fp8
    if fp8 is None or not fp8.experts or fp8.recipe not in EXPERT_RECIPES or layer not in fp8_layers(run):
        return []
    return [one for one in layer_parameters(run.model, layer) if one.kind == "expert" and _fits(run, one)]


def _fits(run: RunSpec, expert: Parameter) -> bool:
    """Whether the matrices of one expert on a rank are aligned."""
    dim, shape = tp_dim(expert.name, run.parallel), list(expert.shape)
    if dim is not None:
        shape[dim] //= run.parallel.tp
    return _is_aligned(run, tuple(shape[1:]))


def _candidates(run: RunSpec, layer: int) -> Iterator[tuple[Parameter, tuple[int, ...]]]:
    """Weights with their local shape on one rank."""
    if layer not in fp8_layers(run):
        return
    for parameter in layer_parameters(run.model, layer):
        dim = tp_dim(parameter.name, run.parallel)
        if parameter.kind == "matrix" and dim is not None:
            shape = list(parameter.shape)
            shape[dim] //= run.parallel.tp
            yield parameter, tuple(shape)


def _is_aligned(run: RunSpec, shape: tuple[int, ...]) -> bool:
    assert run.precision.fp8 is not None
    return all(size % FP8_MULTIPLE[run.precision.fp8.recipe] == 0 for size in shape)


# The linears of a module that multiply the same input.
_SHARED_INPUT = {"query": "qkv", "key": "qkv", "value": "qkv", "gate": "gate_up", "up": "gate_up"}


def fp8_base_groups(model: ModelSpec) -> list[list[Parameter]]:
    """The linears that `adapter.base=fp8` stores in fp8; those of one group share their input and a scale.

    These are the linears that tp can shard, as with `precision.fp8`, and the routed experts: each expert of a
    projection has a scale of its own, so a projection is a group.
    """
    groups: dict[str, list[Parameter]] = {}
    for one in parameters(model):
        if one.kind == "expert":
            groups[one.name] = [one]
        if one.kind == "matrix" and tp_dim(one.name, ParallelSpec()) is not None:
            module, _, own = one.name.removesuffix(".weight").rpartition(".")
            groups.setdefault(f"{module}.{_SHARED_INPUT.get(own, own)}", []).append(one)
    return list(groups.values())
