"""Names of adapters in a peft folder, and what one of our adapters is made of there.

A matrix of ours is one module of the Hugging Face model; stacked routed experts are one module per expert.
"""

from dataclasses import dataclass

from meshwright.errors import CheckpointError
from meshwright.models.hf_names import sources
from meshwright.spec import AdapterSpec, ModelSpec
from meshwright.spec.adapter import LORA_A, LORA_B, MAGNITUDE, AdaptedMatrix, adapted_matrices

PREFIX = "base_model.model."
_SUFFIXES = {LORA_A: "lora_A.weight", LORA_B: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}


@dataclass(frozen=True)
class PeftMatrix:
    """A matrix with an adapter, and the Hugging Face modules that it consists of: one, or one per expert."""

    matrix: AdaptedMatrix
    modules: tuple[str, ...]

    def keys(self, own: str) -> list[str]:
        """Tensors in the peft file that lora_A, lora_B or magnitude of this matrix consist of."""
        return [f"{PREFIX}{module}.{_SUFFIXES[own]}" for module in self.modules]


def peft_matrices(model: ModelSpec, adapter: AdapterSpec, *, where: str) -> list[PeftMatrix]:
    """The adapted matrices with their modules in a Hugging Face model."""
    on_disk = sources(model)
    found: list[PeftMatrix] = []
    for matrix in adapted_matrices(model, adapter):
        source = on_disk[matrix.weight.name]
        if source.third is not None:
            raise CheckpointError(
                "peft has one adapter for GPT-2's fused query, key and value, and this run has three",
                where=where,
                hint="merge the adapters instead: `convert` without --to peft",
            )
        modules = tuple(name.removesuffix(".weight") for name in source.names)
        found.append(PeftMatrix(matrix, modules))
    return found
