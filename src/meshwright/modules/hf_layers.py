"""The layers of a Hugging Face decoder as parts that take one tensor.

Its forward passes every layer more than the hidden states: rope tables, positions, a mask. They depend on the
shape of a micro-batch and not on its tokens, and a pipeline has one shape. So they are recorded on a first
batch, compared with those of other tokens, and passed again on every stage. Arguments that differ between
tokens, or that layers could write to, are refused.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.errors import DataError, SpecError
from meshwright.modules.module_program import Loss
from meshwright.ops.trees import map_tensors, tensors_of

_WHERE = "model"
_PLAIN = (type(None), bool, int, float, str, Tensor, list, tuple, dict)
_ALLOWED_ARGUMENTS = {"input_ids", "use_cache", "return_dict"}
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a layer after the hidden states."""


class Logits(NamedTuple):
    """The output of the last part, under the name that losses for such models use."""

    logits: Tensor


def is_published(model: nn.Module) -> bool:
    """Whether a module publishes a pipeline plan, which transformers keeps in the private `_pp_plan`."""
    return bool(getattr(model, "_pp_plan", None)) and hasattr(model, "base_model_prefix")


def published_order(model: Any) -> list[str]:
    """Names of the parts in the order of forward: those of the base model, then the head."""
    trunk = [key for key in model._pp_plan if key.startswith(f"{model.base_model_prefix}.")]
    names = [*trunk, *(key for key in model._pp_plan if key not in trunk)]
    return [f"{name}.*" if isinstance(model.get_submodule(name), nn.ModuleList) else name for name in names]


def replay_calls(model: nn.Module, parts: Iterable[tuple[str, nn.Module]], ids_BS: Tensor) -> None:
    """Make each part callable with the hidden states alone, in place; recorded on a micro-batch of tokens."""
    named = dict(parts)
    calls = _record(model, named, ids_BS)
    others = _record(model, named, ids_BS.roll(1, dims=-1))
    for name, part in named.items():
        if len(calls[name]) != 1:
            fact = f"{type(model).__name__} runs {name} {len(calls[name])} times in a forward, not once"
            raise SpecError(fact, where=_WHERE, hint="use pp=1")
        _require_replayable(name, calls[name][0], others[name][0])
        _replay(part, calls[name][0], ids_BS)


def as_logits(loss: Loss) -> Loss:
    """A loss that sees the tensor of the last part as `logits`."""

    def called(model: Callable[..., Any], batch: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            _require_tokens_only(args, kwargs)
            found = model(*args, **kwargs)
            return Logits(found) if isinstance(found, Tensor) else found

        return loss(forward, batch)

    return called


def _require_tokens_only(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    more = [key for key, value in kwargs.items() if key not in _ALLOWED_ARGUMENTS and value is not None]
    if more or len(args) > 1:
        raise SpecError(
            f"the loss passes the model more than tokens ({', '.join(more) or 'a second argument'}), and a "
            "pipeline passes one tensor",
            where="loss",
            hint="call model(input_ids=...) and compute the loss from its logits, or use pp=1",
        )


@torch.no_grad()
def _record(model: nn.Module, parts: dict[str, nn.Module], ids_BS: Tensor) -> dict[str, list[Call]]:
    calls: dict[str, list[Call]] = {name: [] for name in parts}
    hooks = [
        part.register_forward_pre_hook(
            lambda _part, args, kwargs, name=name: calls[name].append((args[1:], kwargs)), with_kwargs=True
        )
        for name, part in parts.items()
    ]
    was_training = model.training
    model.eval()
    model(ids_BS)
    model.train(was_training)
    for hook in hooks:
        hook.remove()
    return calls


def _require_replayable(name: str, call: Call, other: Call) -> None:
    for key, value in [*enumerate(call[0], 1), *call[1].items()]:
        if not isinstance(value, _PLAIN):
            raise SpecError(
                f"{name} gets a {type(value).__name__} as {key}, which layers may write to; stages do "
                "not share it",
                where=_WHERE,
                hint="set model.config.use_cache = False, or use pp=1",
            )
    pairs = zip(tensors_of(call), tensors_of(other), strict=True)
    if not all(one.shape == two.shape and torch.equal(one, two) for one, two in pairs):
        raise SpecError(
            f"{name} gets arguments that depend on the tokens, and a pipeline passes only the hidden states",
            where=_WHERE,
            hint="use pp=1",
        )


def _replay(part: nn.Module, call: Call, ids_BS: Tensor) -> None:
    forward, length = part.forward, ids_BS.shape[1]
    args, kwargs = map_tensors(call, lambda one: _first_sample(one, ids_BS.shape[0]))
    if not args and not kwargs:
        return

    def replayed(x: Tensor, *given: Any, **named: Any) -> Any:
        if given or named:  # called by the full model
            return forward(x, *given, **named)
        if x.shape[1] != length:
            raise DataError(
                f"a sequence of {x.shape[1]} tokens; the first one had {length}",
                where="dataset",
                hint="a pipeline passes tensors of one shape: pad the samples, or use pp=1",
            )
        local_args, local_kwargs = map_tensors((args, kwargs), lambda one: _moved_to(one, x))
        return forward(x, *local_args, **local_kwargs)

    part.forward = replayed


def _first_sample(tensor: Tensor, num_samples: int) -> Tensor:
    """One row where all samples have the same row, so that micro-batches of any size can use it."""
    is_repeated = tensor.ndim > 1 and tensor.shape[0] == num_samples
    return tensor[:1] if is_repeated and torch.equal(tensor, tensor[:1].expand_as(tensor)) else tensor


def _moved_to(tensor: Tensor, x: Tensor) -> Tensor:
    """The tensor on the device of the hidden states and, if it is floating point, in their dtype."""
    return tensor.to(x.device, x.dtype if tensor.is_floating_point() else tensor.dtype)
