"""What a layer of another framework keeps for its backward pass, from the building blocks of the planner."""

from dataclasses import dataclass

import numpy as np

from meshwright.plan.memory.activations import (
    Items,
    after_recompute,
    attention_bytes,
    dropout_mask_bytes,
    inner_bytes,
    kept_of_mlp,
    unless,
)
from meshwright.plan.workload import operators
from meshwright.plan.workload.layouts import CORE_ATTENTION, NORMS, Floats, Layouts
from meshwright.plan.workload.workload import Workload


@dataclass(frozen=True)
class KeptByLayer:
    """The choices in which the layers of frameworks differ."""

    sequence_parallel: bool
    """tp shards the residual stream and the norms by position."""
    gathered_input: bool
    """tp: gathered inputs of column-parallel linears are saved for the backward pass."""
    eager_activation: bool
    """The MLP's activation saves its input, its output and the gated output (8f), not one of them less."""
    rotation_bytes: float
    """Bytes per element of queries and keys that are saved beside the rotated ones."""

    def parts(self, work: Workload, at: Layouts, *, moe: bool) -> Items:
        """What the backward pass of one layer needs, by the part that a recompute policy may drop."""
        tokens, residual = at.microbatch_tokens(work.sequence_length), self.block_input(work, at)
        full = work.working_bytes * tokens * work.model.width
        gathered = np.where(at.regather == 1, residual, full if self.gathered_input else residual)
        made = 2.0 if self.eager_activation and not work.compiled else 1.0
        inner, activation = inner_bytes(work, at, moe=moe, made=made)
        return {
            "inputs": 2.0 * np.maximum(2.0, work.working_bytes) / work.working_bytes * residual
            if not work.compiled
            else 2.0 * residual,
            "norms": 2.0 * gathered + dropout_mask_bytes(work, self._residual_tokens(tokens, at)),
            "attention": attention_bytes(work, at),
            "rotations": self._rotations(work, at),
            "scores": _scores(work, at),
            "inner": inner,
            "activation": activation,
        }

    def layer_bytes(self, work: Workload, at: Layouts, *, moe: bool) -> Floats:
        """Bytes one layer keeps of one micro-batch for its backward pass, after recompute."""
        kept = self.parts(work, at, moe=moe)
        # A recipe in 8 bits keeps the cast output of the norm for the weight gradient, recomputed or not.
        norms = kept["norms"] if work.is_low_precision else unless(at, NORMS, kept["norms"])
        partial = kept["inputs"] + norms + kept["attention"]
        partial = partial + unless(at, CORE_ATTENTION, kept["scores"]) + unless(at, NORMS, kept["rotations"])
        partial = partial + kept_of_mlp(at, kept, moe=moe)
        return after_recompute(at, kept, partial, self.block_input(work, at))

    def block_input(self, work: Workload, at: Layouts) -> Floats:
        """What a layer is given of one micro-batch, and all that full recompute keeps of it."""
        tokens = at.microbatch_tokens(work.sequence_length)
        return work.working_bytes * tokens * work.model.width / (at.tp if self.sequence_parallel else 1)

    def _residual_tokens(self, tokens: Floats, at: Layouts) -> Floats:
        return tokens / at.tp if self.sequence_parallel else tokens

    def _rotations(self, work: Workload, at: Layouts) -> Floats:
        attention, tokens = work.model.attention, at.microbatch_tokens(work.sequence_length)
        if work.model.positions != "rope" or work.compiled:
            return 0.0 * tokens
        rotated = (attention.num_heads + attention.num_kv_heads) * attention.head_width
        return self.rotation_bytes * tokens * rotated / at.tp


def _scores(work: Workload, at: Layouts) -> Floats:
    """Scores, probabilities and dropout masks that first releases wrote to memory."""
    if work.attention_kernel != "unfused":
        return 0.0 * at.microbatch_tokens(work.sequence_length)
    return (2.0 * work.working_bytes + 1.0) * operators.score_elements(work, at)
