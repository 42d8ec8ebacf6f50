"""Routed experts that peft adapted as stacked parameters, as transformers 5 has them.

`experts.gate_up_proj` has gate and then up as its outputs; `experts.down_proj` is the other parameter. Each
has one pair of factors in the file, and in it a pair for each expert:

    A[experts x rank, inputs]     the ranks of an expert are next to each other
    B[outputs, rank x experts]    the experts of a rank are next to each other

So gate and up of an expert share its A, and each has its own rows of its B.
"""

from collections.abc import Collection
from dataclasses import dataclass

from meshwright.adapters.peft_config import MERGE
from meshwright.errors import CheckpointError
from meshwright.spec.adapter import LORA_A, AdaptedMatrix

_GATE_UP = ("gate", "up")
FIRST_VERSION = (0, 19, 1)
"""The peft that began to take inputs and outputs of these parameters for what they are."""


@dataclass(frozen=True)
class ExpertStack:
    """The factors of a stacked parameter, and the outputs there that are those of one of our matrices."""

    parameter: str
    """Its name, to which patterns of ranks and alphas apply."""
    module: str
    """The wrapper with its factors: peft nests one for each adapted parameter of the experts."""
    num_experts: int
    num_inputs: int
    num_outputs: int
    own_outputs: slice
    """Ours of them: a half for gate and for up, and all for down."""

    def shape(self, own: str, rank: int) -> list[int]:
        """The shape of a factor in the file."""
        all_ranks = rank * self.num_experts
        return [all_ranks, self.num_inputs] if own == LORA_A else [self.num_outputs, all_ranks]

    def other_layout(self, own: str, rank: int) -> list[int]:
        """The shape of a factor that an earlier peft saved, which took inputs for outputs."""
        all_ranks = rank * self.num_experts
        return [all_ranks, self.num_outputs] if own == LORA_A else [self.num_inputs, all_ranks]


def expert_stack(matrix: AdaptedMatrix, name: str, adapted: Collection[str], *, where: str) -> ExpertStack:
    """The stack that an adapted matrix of routed experts is part of.

    `name` is that of the matrix of one expert in a Hugging Face model, and `adapted` has the names of all
    adapted matrices of the run.
    """
    experts, _, own = matrix.weight.name.rpartition(".")
    if own in _GATE_UP:
        _require_both(experts, adapted, where)
    is_inner = own in _GATE_UP and f"{experts}.down" in adapted
    # Before transformers 5 the block of Mixtral had another name, and no stacked parameters.
    module = name.partition(".experts.")[0].replace(".block_sparse_moe", ".mlp") + ".experts"
    num_experts, width, num_inputs = matrix.weight.shape
    first = width if own == "up" else 0
    return ExpertStack(
        parameter=f"{module}.{'gate_up_proj' if own in _GATE_UP else 'down_proj'}",
        module=f"{module}.base_layer" if is_inner else module,
        num_experts=num_experts,
        num_inputs=num_inputs,
        num_outputs=width * (2 if own in _GATE_UP else 1),
        own_outputs=slice(first, first + width),
    )


def _require_both(experts: str, adapted: Collection[str], where: str) -> None:
    """Refuse a run that adapts one half of a parameter that peft adapts as a whole."""
    found = [own for own in _GATE_UP if f"{experts}.{own}" in adapted]
    if len(found) == 1:
        fact = f"gate and up of routed experts are one parameter there, and this run adapts {found[0]} alone"
        hint = "name both in adapter.targets, such as '*.experts.gate' and '*.experts.up'"
        raise CheckpointError(fact, where=where, hint=hint)


def shape_hint(stack: ExpertStack, own: str, shape: list[int], rank: int) -> str:
    """What to do about a factor of another shape than in the run; `rank` is the one in the file."""
    if shape == stack.shape(own, rank):
        parameter = stack.parameter.rpartition(".")[2]
        return f"the experts' {parameter} has rank {rank} there: give its matrices that rank in adapter.ranks"
    if shape == stack.other_layout(own, rank):
        return f"it is in the layout of peft before 0.19.1: with that peft {MERGE}"
    return (
        "name in adapter.targets what target_parameters has in its adapter_config.json (gate_up_proj is gate "
        "and up of the experts), and its base in checkpoint.start_from"
    )
