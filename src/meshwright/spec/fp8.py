"""Which linear layers compute in fp8: plain data that `parallel/` applies and `plan/` prices.

Of the blocks between the ends, every linear that tp can cut, if what a rank holds of its dims divides into
blocks of the recipe. Head, embedding, norms, the core of attention, router and routed experts stay in bf16;
so do MLA's projections to a latent, whose gradients are terms of a sum over tp that fp8 would round one by
one.
"""

from collections.abc import Iterator

from meshwright.spec.parameters import Parameter, layer_parameters
from meshwright.spec.placement import tp_dim
from meshwright.spec.run import RunSpec

# Numbers along the contracted dim that share a scale; with one scale for all, what the kernels ask for.
FP8_MULTIPLE = {"current": 16, "delayed": 16, "blocks": 128, "mxfp8": 32}


def fp8_layers(run: RunSpec) -> range:
    """The blocks whose linears are in fp8."""
    fp8 = run.precision.fp8
    return range(fp8.bf16_ends, run.model.num_layers - fp8.bf16_ends) if fp8 else range(0)


def fp8_weights(run: RunSpec, layer: int) -> list[Parameter]:
    """The weights of a layer that enter fp8 products."""
    return [weight for weight, held in _candidates(run, layer) if not _leaves_rest(run, held)]


def left_out_weights(run: RunSpec, layer: int) -> list[Parameter]:
    """The weights of a layer that would, but for dims that do not divide."""
    return [weight for weight, held in _candidates(run, layer) if _leaves_rest(run, held)]


def _candidates(run: RunSpec, layer: int) -> Iterator[tuple[Parameter, tuple[int, ...]]]:
    """Weights with the shape that one rank holds."""
    if layer not in fp8_layers(run):
        return
    for parameter in layer_parameters(run.model, layer):
        dim = tp_dim(parameter.name, run.parallel)
        if parameter.kind == "matrix" and dim is not None:
            held = list(parameter.shape)
            held[dim] //= run.parallel.tp
            yield parameter, tuple(held)


def _leaves_rest(run: RunSpec, held: tuple[int, ...]) -> bool:
    assert run.precision.fp8 is not None
    return any(size % FP8_MULTIPLE[run.precision.fp8.recipe] for size in held)
