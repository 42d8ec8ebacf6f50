"""A Hugging Face decoder that is trained as a user module (`meshwright.fit`), as the planner prices it.

The torch side builds it on the meta device and traces it (`modules/external_decoder.py`); here it is a plain
value: the sizes of an equal decoder, its exact parameters, and what its blocks save for backward.
"""

from dataclasses import dataclass

import numpy as np

from meshwright.plan.framework import Framework, StateBytes
from meshwright.plan.memory import activations
from meshwright.plan.workload.layouts import FULL, Floats, Ints, Layouts
from meshwright.plan.workload.workload import Workload
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import RunSpec

# A loss on plain logits keeps them in bf16 and in fp32, with the gradient of each.
LOGIT_BYTES = 2.0 + 4.0 + 4.0 + 2.0


@dataclass(frozen=True)
class ExternalDecoder:
    """One decoder outside of our families."""

    name: str
    """Class of the module, such as `Gemma2ForCausalLM`."""
    model: ModelSpec
    """A decoder of ours with the same sizes and, nearly, as many parameters."""
    num_parameters: int
    """Parameters of the module itself, shared ones counted once."""
    saved_bytes_per_token: float
    """Bytes that one block saves for backward, per token, in 16 bits."""
    linear_flops_per_token: float
    """Forward FLOPs of the linear layers, traced."""
    tp_degrees: tuple[int, ...] = (1,)
    """Degrees of tp that the plan it publishes allows."""

    @property
    def pins(self) -> list[str]:
        """The layouts that `fit` can run and that are priced here: every ZeRO stage, recompute, and tp."""
        degrees = ",".join(map(str, self.tp_degrees))
        fixed = ["pp=1", "cp=1", "ep=1", f"tp={degrees}", "recompute=none,full", "recompute_every=1"]
        return [*fixed, "memory.offload=[]", "compile=false", "data.documents=joined"]

    def fit_text(self, run: RunSpec) -> str:
        """The call that trains it with the layout of a run."""
        parallel, data = run.parallel, run.data
        settings = {name: getattr(parallel, name) for name in ("dp_replicate", "dp_shard", "tp", "zero")}
        default = {"zero": 0}
        shown = [f"{name}={value}" for name, value in settings.items() if value != default.get(name, 1)]
        if run.memory.recompute != "none":
            shown.append(f"recompute={run.memory.recompute!r}")
        batch = f"batch_samples={data.batch_sequences}, microbatch_samples={data.microbatch_sequences}"
        return f"meshwright.fit(model, dataset, loss, {', '.join([*shown, batch])}, ...)"


@dataclass(frozen=True)
class ModuleRuntime(Framework):
    """Our runtime around a user module: its own blocks and loss, and no sequence parallel."""

    saved_bytes_per_token: float = 0.0

    @property
    def is_traced(self) -> bool:
        """Its blocks are not in the trace's table."""
        return False

    def kept_parts(self, workload: Workload, at: Layouts, *, moe: bool) -> activations.Items:
        """Everything that a block saves, as one part."""
        return {"block": self._block_bytes(workload, at)}

    def layer_activation_bytes(self, workload: Workload, at: Layouts, *, moe: bool) -> Floats:
        """All that a block saves, or its input alone where it is recomputed."""
        tokens = at.microbatch_tokens(workload.sequence_length)
        kept = workload.working_bytes * tokens * workload.model.width
        return np.where((at.recompute & FULL) > 0, kept, self._block_bytes(workload, at))

    def _block_bytes(self, workload: Workload, at: Layouts) -> Floats:
        """tp shards what lies between its matrices; the hidden states, about half, stay on every rank."""
        tokens = at.microbatch_tokens(workload.sequence_length)
        share = 0.5 + 0.5 / at.tp
        return workload.working_bytes / 2.0 * self.saved_bytes_per_token * tokens * share

    def logit_bytes(self, workload: Workload, at: Layouts) -> Floats:
        """Logits of all tokens in the forms that a plain cross-entropy makes of them."""
        tokens = at.microbatch_tokens(workload.sequence_length)
        return LOGIT_BYTES * tokens * workload.model.vocab_size

    def residual_tokens(self, tokens: Floats, tp: Ints) -> Floats:
        """Every rank of tp computes all norms and residuals."""
        return tokens


def module_runtime(decoder: ExternalDecoder, state: StateBytes) -> ModuleRuntime:
    """The framework that prices this decoder."""
    return ModuleRuntime(name="module", state=state, saved_bytes_per_token=decoder.saved_bytes_per_token)
