"""What a rehearsal passes in place of real devices and ranks, as values that a program is built with."""

import dataclasses
from collections.abc import Callable, Iterable

from torch import Tensor, nn

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.models.decoder import Head
from meshwright.models.layers.attend import Attend
from meshwright.models.layers.moe import Experts, Moe
from meshwright.ops.loss_rows import SIMULATED
from meshwright.ops.routed_rows import RoutedRowCounts, RowCounts
from meshwright.parallel.compile import compile_blocks
from meshwright.spec import MemorySpec


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The simulated parts of a program; with the defaults nothing is simulated."""

    device: SimulatedDevice | None = None
    """The device whose kernels are chosen; None: that of the tensors."""
    row_counts: RowCounts = dataclasses.field(default_factory=RoutedRowCounts)
    """Rows of tokens that routed experts exchange with other ranks."""
    compile_blocks: Callable[[Iterable[nn.Module], MemorySpec], None] = compile_blocks
    allocate_host: Callable[[int], Tensor] | None = None
    """Allocates a host buffer of so many bytes for offload; None: pinned memory, within the host's budget."""
    left_out_layers: int = 0
    """Layers left out at the end of every pipeline stage: a rehearsal extrapolates from truncated steps."""


NOTHING_SIMULATED = Simulation()


def apply_simulation(model: nn.Module, simulation: Simulation) -> None:
    """Set what is simulated in the modules of a stage. Comes before cp and ep, which pass it on."""
    for module in model.modules():
        if isinstance(module, Moe):
            module.row_counts = simulation.row_counts
            module.dispatch.row_counts = simulation.row_counts  # pyright: ignore[reportArgumentType]  no parameter
        elif isinstance(module, Attend | Experts):
            module.simulated = simulation.device
        elif isinstance(module, Head) and simulation.device is not None:
            module.loss_kernels = SIMULATED
