"""Histograms of the inputs of matmuls, of the gradients of their outputs, and of weight gradients.

At the steps where they are due, the batch goes forward and backward once more before its step, with torch's
hooks on the matmuls of every block. The hooks exist only then, so other steps cost nothing, and training is
not changed: weights, gradients, buffers and random numbers are as before. Compiled blocks run uncompiled
here, because a hook inside of them would compile them again.

The counts are those of one device on every mesh. dp, cp and sp ranks hold other tokens, tp ranks other
features; where tp ranks hold the same tensor, the first of them counts. A weight gradient counts where its
shard is, by the share of the ranks that hold it. Recomputed forwards do not count.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.mesh import Mesh
from meshwright.models.decoder import Decoder
from meshwright.models.layers.attention import Attention
from meshwright.models.layers.fused import linears_sharing_input
from meshwright.models.layers.linear import Linear
from meshwright.models.layers.mlp import SwiGlu
from meshwright.models.layers.moe import Experts
from meshwright.observe.histograms import LOWEST_EXPONENT, NUM_BINS, Histogram, Histograms, Place
from meshwright.ops.magnitudes import count_magnitudes
from meshwright.spec import RunSpec
from meshwright.spec.placement import tp_dim
from meshwright.train.step import StepBatch, Training
from meshwright.train.unchanged_buffers import unchanged_buffers

_COLUMN_WISE, _ROW_WISE = 0, 1


class HistogramProbe:
    """Counts magnitudes at intervals; all ranks have one and call its methods together."""

    def __init__(self, run: RunSpec, training: Training, mesh: Mesh) -> None:
        assert run.observe.histograms is not None
        self._every = run.observe.histograms.every_steps
        self._run, self._training, self._mesh = run, training, mesh

    def is_due(self, step: int) -> bool:
        """Whether to count before the step that follows `step` updates."""
        return (step + 1) % self._every == 0

    def measure(self, batch: StepBatch) -> Histograms:
        """The histograms of a batch at the current weights; equal on all ranks. Communicates, host sync."""
        training, counts = self._training, _Counts(1.0 / self._training.scale)
        eager = torch.compiler.set_stance("force_eager") if self._run.compile else nullcontext()
        with _nothing_recorded(training), _hooked(training.program.stages, self._mesh, counts), eager:
            training.program.accumulate(batch.microbatches, scale=training.scale)
        fused = dict(pair for stage in training.program.stages for pair in _fused_names(stage))
        for one in training.program.shards:
            if one.shard.grad is not None and len(one.shape) > 1 and one.norm_share:
                counts.add(_place_of_weight(one.name, fused), one.shard.grad, share=one.norm_share)
        training.optimizer.zero_grad()
        return counts.over_all_ranks(self._mesh.device)


class _Counts:
    """Counts of this rank, by place: elements by bin, and the largest magnitude."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._found: dict[Place, tuple[Tensor, Tensor]] = {}

    def add(self, place: Place, x: Tensor, *, share: float = 1.0, is_gradient: bool = True) -> None:
        """Count a tensor; `share` is 1 / the number of ranks that count the very same one."""
        factor = self._factor if is_gradient else 1.0
        counts, amax = count_magnitudes(x, lowest=LOWEST_EXPONENT, num_bins=NUM_BINS, factor=factor)
        counts = counts.double() * share
        if place in self._found:
            before, most = self._found[place]
            counts, amax = before + counts, torch.maximum(most, amax)
        self._found[place] = counts, amax

    def over_all_ranks(self, device: torch.device) -> Histograms:
        """Histograms of the full tensors. Communicates, host sync."""
        places = _all_places(self._found)
        table = torch.zeros(len(places), NUM_BINS + 4, dtype=torch.float64, device=device)
        most = torch.zeros(len(places), dtype=torch.float64, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a hook may have run on another stream
        for row, place in enumerate(places):
            if place in self._found:
                table[row], most[row] = self._found[place]
        dist.all_reduce(table)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        rows = zip(places, table.round().long().cpu().numpy(), most.tolist(), strict=True)
        return {place: Histogram.of_row(row, amax) for place, row, amax in rows}


def _all_places(mine: Sequence[Place] | dict[Place, Any]) -> list[Place]:
    """The places of all ranks, by layer; pipeline ranks have different ones. Communicates."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, list(mine))
    found = dict.fromkeys(place for places in of_ranks for place in places)
    last = 1 << 30
    return sorted(found, key=lambda place: (place.kind, last if place.layer is None else place.layer))


class _Site(NamedTuple):
    """A module that computes one matmul, or several on the same input."""

    layer: int | None
    name: str
    module: nn.Module
    tp_dim: int | None
    """The dim of a torch weight that tp shards: 0 outputs, 1 inputs."""
    is_expert: bool = False


def _sites(stage: Decoder, mesh: Mesh) -> Iterator[_Site]:
    """The matmuls of a stage, in order; of linears that share their input the module that calls them."""
    for layer, block in stage.blocks.items():
        sharing = {linear for module in block.modules() for linear in linears_sharing_input(module)}
        for name, module in block.named_modules():
            if isinstance(module, Attention):
                yield _Site(int(layer), f"{name}.qkv", module.qkv, _COLUMN_WISE)
            elif isinstance(module, SwiGlu):
                yield _Site(int(layer), f"{name}.gate_up", module.gate_up, _COLUMN_WISE)
            elif isinstance(module, Experts):
                yield from _expert_sites(int(layer), name, module, mesh)
            elif isinstance(module, Linear) and module not in sharing:
                dim = tp_dim(f"blocks.{layer}.{name}.weight", mesh.parallel)
                yield _Site(int(layer), name, module, dim)
    if stage.head is not None:
        yield _Site(None, "head", stage.head, _COLUMN_WISE)


def _expert_sites(layer: int, name: str, experts: Experts, mesh: Mesh) -> Iterator[_Site]:
    is_sharded = mesh.parallel.etp > 1
    for matmul, module, dim in (
        ("gate_up", experts.gate_up_matmul, _COLUMN_WISE),
        ("down", experts.down_matmul, _ROW_WISE),
    ):
        yield _Site(layer, f"{name}.{matmul}", module, dim if is_sharded else None, is_expert=True)


@contextmanager
def _hooked(stages: Sequence[nn.Module], mesh: Mesh, counts: _Counts) -> Iterator[None]:
    """Hooks on every matmul inside; they are removed afterwards."""
    with ExitStack() as hooks:
        for stage in stages:
            assert isinstance(stage, Decoder)
            state = _BlockState()
            for block in stage.blocks.values():
                hooks.callback(block.register_forward_pre_hook(state.enter, prepend=True).remove)
                hooks.callback(block.register_forward_hook(state.leave).remove)
            for site in _sites(stage, mesh):
                hook = _SiteHook(site, mesh, counts, state)
                hooks.callback(site.module.register_forward_hook(hook).remove)
        yield


class _BlockState:
    """Whether a block is in its forward; a recompute calls the inside of a block, and not the block."""

    def __init__(self) -> None:
        self.sequence_rows: int | None = None
        """Positions of the running block's input on this rank; None outside of blocks."""

    def enter(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.sequence_rows = inputs[0].shape[1]

    def leave(self, *_: Any) -> None:
        self.sequence_rows = None


class _SiteHook:
    """Counts the input of a matmul, and, once backward reaches it, the gradient of its output."""

    def __init__(self, site: _Site, mesh: Mesh, counts: _Counts, state: _BlockState) -> None:
        self._site, self._counts, self._state = site, counts, state
        self._tp, self._tp_rank = mesh.parallel.tp, mesh.coordinate("tp")
        self._tp_group = mesh.group("tp")

    def __call__(self, _: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        site = self._site
        if site.layer is not None and self._state.sequence_rows is None:
            return  # recomputed
        x = inputs[0] if isinstance(inputs[0], Tensor) else inputs[0][0]
        if self._is_counted(x, sharded_dim=_ROW_WISE):
            self._counts.add(Place("activation", site.layer, site.name), x, is_gradient=False)
        if site.layer is None:
            return  # the head returns the loss
        for y in (output,) if isinstance(output, Tensor) else output:
            if y.requires_grad:
                is_counted = self._is_counted(y, sharded_dim=_COLUMN_WISE)
                y.register_hook(_once(partial(self._count_gradient, is_counted=is_counted)))

    def _count_gradient(self, gradient: Tensor, *, is_counted: bool) -> None:
        site = self._site
        if self._tp > 1 and site.tp_dim is None and not site.is_expert:
            # The output is replicated, and each tp rank has the gradient of its own heads alone.
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=self._tp_group)
        if is_counted:
            self._counts.add(Place("output_gradient", site.layer, site.name), gradient)

    def _is_counted(self, x: Tensor, *, sharded_dim: int) -> bool:
        """Whether this rank's tensor is its own: tp shards its features or its sequence, or this is the first
        of the tp ranks, which hold the same."""
        if self._tp == 1 or self._tp_rank == 0 or self._site.tp_dim == sharded_dim:
            return True
        if self._site.is_expert:
            return self._site.tp_dim is None
        return self._state.sequence_rows is not None and x.shape[1] == self._state.sequence_rows


def _once(count: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A hook that counts a gradient the first time: a split backward reaches a tensor twice."""
    is_counted = False

    def counted(gradient: Tensor) -> None:
        nonlocal is_counted
        if not is_counted:
            is_counted = True
            count(gradient)

    return counted


def _fused_names(stage: nn.Module) -> Iterator[tuple[str, str]]:
    """(name of a projection that shares its input, name of the site that computes it)."""
    for name, module in stage.named_modules():
        if isinstance(module, Attention):
            yield from ((f"{name}.{one}", f"{name}.qkv") for one in ("query", "key", "value"))
        elif isinstance(module, SwiGlu | Experts):
            yield from ((f"{name}.{one}", f"{name}.gate_up") for one in ("gate", "up"))


def _place_of_weight(name: str, fused: dict[str, str]) -> Place:
    """blocks.3.attention.query.weight -> layer 3, attention.qkv; an adapter's own part stays in the name."""
    projection = next((one for one in fused if name == one or name.startswith(f"{one}.")), None)
    if projection is not None:
        name = fused[projection] + name[len(projection) :]
    parts = name.removesuffix(".weight").split(".")
    layer, parts = (int(parts[1]), parts[2:]) if parts[0] == "blocks" else (None, parts)
    return Place("weight_gradient", layer, ".".join(parts))


@contextmanager
def _nothing_recorded(training: Training) -> Iterator[None]:
    """Restores afterwards what a forward records: buffers, and figures of preference pairs."""
    heads = [stage.head for stage in training.program.stages if isinstance(stage, Decoder) and stage.head]
    figures = [head.pair_figures for head in heads]
    with unchanged_buffers(training.program.stages):
        yield
    for head, before in zip(heads, figures, strict=True):
        head.pair_figures = before
