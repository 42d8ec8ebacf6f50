"""fp8 compared with bf16 during a run: the same gradients in both, layer by layer.

Every k steps a micro-batch goes forward and backward twice on the same weights, in fp8 and in bf16 (with a
pipeline: all micro-batches of the step). A layer whose gradients have too small a cosine falls back to bf16
and stays there. Training itself is not changed: gradients, buffers and random numbers are as before. Memory:
a sample of the gradients.
"""

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.data.microbatch import Batch, Microbatch
from meshwright.mesh import Mesh
from meshwright.parallel.fp8 import fall_back, fp8_blocks, in_bf16
from meshwright.spec import Fp8Spec, RunSpec
from meshwright.train.evaluate import sum_over_world
from meshwright.train.step import Training
from meshwright.train.unchanged_buffers import unchanged_buffers

# Elements of a shard that are compared, spread evenly over it: enough for three digits of a cosine.
SAMPLE_ELEMENTS = 2**18


@dataclasses.dataclass(frozen=True)
class Fp8Report:
    """fp8 and bf16 on the same weights and tokens; layers are named by their number."""

    loss_fp8: float
    loss_bf16: float
    cosines: dict[int, float]
    """Cosine between the fp8 and bf16 gradients of each block that is in fp8."""
    norm_ratios: dict[int, float]
    """|gradient in fp8| / |gradient in bf16|."""
    fallback_layers: list[int]
    """Blocks that fall back to bf16 because of this comparison."""

    @property
    def worst_layer(self) -> int:
        """The layer whose gradients differ most."""
        return min(self.cosines, key=lambda layer: self.cosines[layer])


class Fp8Comparison:
    """Compares fp8 with bf16 and lets layers fall back; all ranks call its methods and decide alike."""

    def __init__(self, run: RunSpec, training: Training, mesh: Mesh) -> None:
        assert run.precision.fp8 is not None
        self.fp8: Fp8Spec = run.precision.fp8
        self.fallback_layers: list[int] = []
        """Layers that have fallen back to bf16 so far."""
        self._run, self._training, self._mesh = run, training, mesh
        self._stages = training.program.stages

    @property
    def recipe(self) -> str:
        """The fp8 recipe of the run."""
        return self.fp8.recipe

    def is_due(self, step: int) -> bool:
        """Whether to compare before the step that follows `step` updates."""
        every = self.fp8.compare_every_steps
        return every is not None and step % every == 0 and len(self._layers()) > 0

    def compare(self, batch: Batch, *, seed: int) -> Fp8Report:
        """Compute both gradients, compare them, and let layers fall back. Host sync."""
        layers = self._layers()
        microbatches = batch.microbatches[:1] if self._mesh.parallel.pp == 1 else batch.microbatches
        with unchanged_buffers(self._stages):
            loss_fp8, fp8 = self._gradients(microbatches, seed)
            with in_bf16(self._stages):
                loss_bf16, bf16 = self._gradients(microbatches, seed)
        table_L3 = self._dot_products(fp8, bf16).tolist()
        cosines = {layer: _cosine(*table_L3[layer]) for layer in layers}
        ratios = {layer: _ratio(*table_L3[layer]) for layer in layers}
        worse = [layer for layer in layers if not cosines[layer] >= self.fp8.min_gradient_cosine]
        self.restore([*self.fallback_layers, *worse])
        return Fp8Report(loss_fp8, loss_bf16, cosines, ratios, worse)

    def restore(self, layers: Sequence[int]) -> None:
        """Let these layers, and no others, compute in bf16 from now on."""
        self.fallback_layers = sorted(set(layers))
        fall_back(self._stages, self.fallback_layers)

    def _layers(self) -> list[int]:
        """Layers of the full model that are in fp8, not only those of this stage."""
        return [layer for layer in fp8_blocks(self._run) if layer not in self.fallback_layers]

    def _gradients(self, microbatches: Sequence[Microbatch], seed: int) -> tuple[float, dict[str, Tensor]]:
        """The loss, and a sample of the gradient of each parameter of a block."""
        torch.manual_seed(seed + dist.get_rank())
        loss = self._training.program.accumulate(microbatches)
        found = {
            name: _sample(shard.grad)
            for name, shard in self._training.named_shards.items()
            if name.startswith("blocks.") and shard.grad is not None
        }
        self._training.optimizer.zero_grad()
        return float(sum_over_world(loss, self._mesh)), found

    def _dot_products(self, fp8: dict[str, Tensor], bf16: dict[str, Tensor]) -> Tensor:
        """By layer: fp8 . bf16, fp8 . fp8 and bf16 . bf16, summed over all ranks; equal bits on all."""
        shares = {one.name: one.norm_share for one in self._training.program.shards}
        table_L3 = torch.zeros(self._run.model.num_layers, 3, dtype=torch.float64, device=self._mesh.device)
        for name, a in fp8.items():
            b, layer = bf16[name], int(name.split(".")[1])
            table_L3[layer] += shares[name] * torch.stack([(a * b).sum(), (a * a).sum(), (b * b).sum()])
        dist.all_reduce(table_L3)
        dist.broadcast(table_L3, src=0)  # so that all ranks take the same decision
        return table_L3.cpu()


def _sample(gradient: Tensor) -> Tensor:
    flat = gradient.detach().flatten()
    return flat[:: -(-flat.numel() // SAMPLE_ELEMENTS) or 1].double()


def _cosine(dot: float, square_a: float, square_b: float) -> float:
    if square_a == square_b == 0.0:
        return 1.0
    return dot / (square_a * square_b) ** 0.5 if square_a and square_b else 0.0


def _ratio(_: float, square_a: float, square_b: float) -> float:
    return (square_a / square_b) ** 0.5 if square_b else float(square_a == 0.0)
