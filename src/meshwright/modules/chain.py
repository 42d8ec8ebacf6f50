"""A module as a chain of its parts, which a pipeline can split into stages.

Nothing shows from the outside what a forward does between its submodules. So for pp the user names the parts
in the order in which they run, each taking the output of the one before; an `nn.Sequential` is such a chain
already. The order is verified on a batch before anything is split: the chain must give the same loss as the
module.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import SpecError
from meshwright.modules.blocks import find_blocks
from meshwright.modules.hf_layers import is_published, published_order
from meshwright.modules.module_program import Loss
from meshwright.spec.stages import balanced_bounds

_WHERE = "model"
# The same operators in the same order: only kernels that depend on memory layout may differ in the last bits.
_SAME_LOSS = 1e-4


def first_of(batch: Any) -> Tensor:
    """The default input of a module: the batch itself, its first member, or its `input_ids`."""
    if isinstance(batch, Mapping):
        return batch["input_ids"] if "input_ids" in batch else next(iter(batch.values()))
    return batch if isinstance(batch, Tensor) else batch[0]


@dataclass(frozen=True)
class Chain:
    """A module, its parts in the order in which they run, and the input of the first part."""

    model: nn.Module
    order: Sequence[str] | None = None
    """Names of submodules, or patterns such as `blocks.*`; None: the children of an nn.Sequential, or the
    order that a Hugging Face decoder publishes."""
    inputs: Callable[[Any], Tensor] = first_of
    """From a batch to the tensor that the module is called with."""

    def parts(self) -> dict[str, nn.Module]:
        """The parts by name, in order."""
        order = self.order
        if order is None and is_published(self.model):
            order = published_order(self.model)
        if order is None:
            if not isinstance(self.model, nn.Sequential):
                raise SpecError(
                    f"the order in which {type(self.model).__name__} runs its parts is not known, so pp "
                    "cannot split it into stages",
                    where=_WHERE,
                    hint="meshwright.Chain(model, ['embedding', 'blocks.*', 'head']), or use pp=1",
                )
            return dict(self.model.named_children())
        found = [one for pattern in order for one in find_blocks(self.model, pattern).items()]
        names = [name for name, _ in found]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            fact = f"part {twice!r} is named twice, and it can be in one stage only"
            raise SpecError(fact, where=_WHERE, hint="name each part once, or use pp=1")
        return dict(found)


def run_parts(parts: Sequence[nn.Module], x: Any) -> Any:
    """Run parts one after the other; of a part that returns a tuple, the first member is passed on."""
    for part in parts:
        x = part(x)
        x = x[0] if isinstance(x, tuple) else x
    return x


class ChainStage(nn.Module):
    """Consecutive parts of a chain, under the names that they have in the module."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self._parts = list(parts.values())
        for name, part in parts.items():
            *path, last = name.split(".")
            parent: nn.Module = self
            for key in path:
                if key not in dict(parent.named_children()):
                    parent.add_module(key, nn.Module())
                parent = parent.get_submodule(key)
            parent.add_module(last, part)

    def forward(self, x: Tensor) -> Tensor:
        """The output of the last part."""
        return run_parts(self._parts, x)


def split_into_stages(parts: dict[str, nn.Module], num_stages: int) -> list[dict[str, nn.Module]]:
    """The parts of each stage: consecutive, with parameters balanced as evenly as possible."""
    if num_stages > len(parts):
        raise SpecError(
            f"{num_stages} pipeline stages for the {len(parts)} parts of the chain",
            where="parallel.pp",
            hint=f"use at most {len(parts)} stages, or name finer parts",
        )
    costs = tuple(_cost(part) for part in parts.values())
    bounds = balanced_bounds(costs, num_stages)
    items = list(parts.items())
    return [dict(items[begin:end]) for begin, end in pairwise(bounds)]


def _cost(part: nn.Module) -> int:
    """Parameters without those of embeddings, whose look-up costs nothing."""
    tables = {id(one.weight) for one in part.modules() if isinstance(one, nn.Embedding)}
    return 1 + sum(one.numel() for one in part.parameters() if id(one) not in tables)


def require_chain(chain: Chain, loss: Loss, batch: Any) -> list[Tensor]:
    """Refuse a chain that does not compute what the module computes.

    Returns the input of the chain and the output of each part, as meta tensors.
    """
    model, parts = chain.model, chain.parts()
    _require_complete(model, parts)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        part_io = [chain.inputs(batch)]
        for name, part in parts.items():
            part_io.append(_output_of(name, part, part_io[-1]))
        full, chained = _loss_of(loss, model, batch), _loss_of(loss, lambda *_, **__: part_io[-1], batch)
    model.train(was_training)
    if abs(full - chained) > _SAME_LOSS * max(abs(full), abs(chained)):
        raise SpecError(
            f"the parts one after the other have a loss of {chained:.6g}, the module has {full:.6g}: its "
            "forward does something else between them",
            where=_WHERE,
            hint="name every part, in the order of forward; what forward does itself must become a part",
        )
    first, *others = [one.to("meta") for one in part_io]
    return [first, *(one.requires_grad_() for one in others)]  # backward passes their gradients


def _output_of(name: str, part: nn.Module, x: Tensor) -> Tensor:
    try:
        y = run_parts([part], x)
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise SpecError(
            f"part {name!r} does not accept the output of the part before it: {reason}",
            where=_WHERE,
            hint="a chain passes one tensor from part to part",
        ) from None
    if not isinstance(y, Tensor):
        fact = f"part {name!r} returns {type(y).__name__}, and a pipeline passes one tensor"
        raise SpecError(fact, where=_WHERE, hint="make it return only the tensor")
    return y


def _loss_of(loss: Loss, model: Any, batch: Any) -> float:
    try:
        loss_sum, count = loss(model, batch)
    except (TypeError, AttributeError, KeyError) as error:
        raise SpecError(
            f"the loss does not accept the output of the last part: {error}",
            where="loss",
            hint="with pp `model(...)` in the loss returns the tensor that the last part returns",
        ) from None
    return float(loss_sum) / float(count)


def _require_complete(model: nn.Module, parts: dict[str, nn.Module]) -> None:
    """Refuse parts unless every parameter is in exactly one of them."""
    parts_of: dict[int, list[str]] = {id(one): [] for one in model.parameters()}
    for name, part in parts.items():
        for parameter in part.parameters():
            parts_of[id(parameter)].append(name)
    for name, parameter in model.named_parameters():
        found = parts_of[id(parameter)]
        if not found:
            fact = f"parameter {name} is in none of the parts {', '.join(parts)}"
            raise SpecError(fact, where=_WHERE, hint="name the part that it is in, or put it into one")
        if len(found) > 1:
            fact = f"parameter {name} is in {' and '.join(found)}, which may be in different stages"
            raise SpecError(fact, where=_WHERE, hint="make them one part, or use pp=1")
