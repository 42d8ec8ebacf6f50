"""A Hugging Face model that is trained as a user module (`meshwright.fit`), as the planner prices it.

The torch side builds it on the meta device and traces it (`modules/external_model.py`); here it is a plain
value: the sizes of an equal decoder, its exact parameters, and what its blocks save for backward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from meshwright.errors import SpecError
from meshwright.hardware.catalogue import Cluster, Device
from meshwright.plan.framework import Framework, StateBytes
from meshwright.plan.memory import activations
from meshwright.plan.predict import Prediction, layout_of, predict_layout, require_all_devices
from meshwright.plan.search.pins import parse_pins
from meshwright.plan.search.request import FilledRequest, Request, fill_request
from meshwright.plan.workload.formats import state_bytes, workload_of
from meshwright.plan.workload.layouts import FULL, Floats, Ints, Layouts
from meshwright.plan.workload.workload import Workload
from meshwright.spec.model import ModelSpec
from meshwright.spec.parameters import num_parameters
from meshwright.spec.run import RunSpec
from meshwright.spec.text import dump_run, parse_run
from meshwright.units import show_bytes, show_count

ExternalKind = Literal["decoder", "encoder", "encoder-decoder", "vision"]
# A loss on plain logits keeps them in bf16 and in fp32, with the gradient of each.
LOGIT_BYTES = 2.0 + 4.0 + 4.0 + 2.0
# Pairs of query and key over those of a causal decoder. A decoder block with cross-attention has half of
# them in its own attention and all in the other: 2 and 3 in the two halves of an encoder-decoder.
ATTENTION_PAIRS: Mapping[ExternalKind, float] = {
    "decoder": 1.0,
    "encoder": 2.0,
    "encoder-decoder": 2.5,
    "vision": 2.0,
}
FIXED_KEYS = ("compile", "data.documents", "memory.offload")
"""Settings beside the layout that `fit` or its price here fixes."""


@dataclass(frozen=True)
class ExternalModel:
    """One model outside of our families."""

    name: str
    """Class of the module, such as `Gemma2ForCausalLM`."""
    model: ModelSpec
    """A decoder of ours with the same sizes and, nearly, as many parameters."""
    num_parameters: int
    """Parameters of the module itself, shared ones counted once."""
    saved_bytes_per_token: float
    """Bytes that the mean block saves for backward, per token, in 16 bits."""
    linear_flops_per_token: float
    """Forward FLOPs of the linear layers, traced."""
    kind: ExternalKind = "decoder"
    fixed_length: int | None = None
    """Tokens of every sample, where the config fixes them: patches of an image."""
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

    @property
    def text(self) -> str:
        """What was traced, and how far the priced decoder is from it."""
        priced = num_parameters(self.model) / self.num_parameters - 1.0
        lengths = {
            "encoder-decoder": "; source and target are priced as equally long",
            "vision": f"; a sequence is one image of {self.fixed_length} tokens",
        }
        return (
            f"{self.name}: {show_count(self.num_parameters)} parameters (priced as a decoder of the same "
            f"sizes, {priced:+.2%}), {show_bytes(self.saved_bytes_per_token)} saved for backward per token "
            f"and block, traced on the meta device{lengths.get(self.kind, '')}"
        )

    def sequence_length(self, given: int | None) -> int | None:
        """The length that was given; SpecError where the config fixes another."""
        if self.fixed_length is None or given in (None, self.fixed_length):
            return given if self.fixed_length is None else self.fixed_length
        fact = f"--seq is {given}, but every sample of {self.name} has {self.fixed_length} tokens"
        raise SpecError(fact, where="--seq", hint="leave it out")

    def with_pins(self, pins: Sequence[str]) -> list[str]:
        """The user's pins and those of the layouts that `fit` can run; the user's have to be among them."""
        ours = dict(pin.split("=", 1) for pin in self.pins)
        given = dict(pin.split("=", 1) for pin in pins if "=" in pin)
        for key, value in given.items():
            allowed = ours.get(_short(key))
            if allowed is not None and not set(value.split(",")) <= set(allowed.split(",")):
                fact = f"{key}={value} is not possible for {self.name} as a module"
                raise SpecError(fact, where=key, hint=f"{key}={allowed}")
        named = {_short(key) for key in given}
        return [*pins, *(f"{key}={value}" for key, value in ours.items() if key not in named)]


def _short(key: str) -> str:
    """`recompute` for `memory.recompute`; the keys of FIXED_KEYS stay."""
    return key if key in FIXED_KEYS else key.removeprefix("parallel.").removeprefix("memory.")


def fill_external(model: ExternalModel, request: Request) -> FilledRequest:
    """The complete question of a request for this model: its own memory instead of that of our blocks."""
    length = model.sequence_length(request.sequence_length)
    filled = fill_request(replace(request, model=model.model, sequence_length=length))
    runtime = module_runtime(model, state_bytes(filled.question.run.precision))
    return replace(filled, question=replace(filled.question, module_runtime=runtime))


def predict_external(
    model: ExternalModel, overrides: Sequence[str], cluster: Cluster
) -> tuple[RunSpec, Prediction]:
    """The prediction of one layout of this model, with the run that was priced.

    The overrides are those of a run file. What they leave open is filled in as by `plan`, on one rank.
    """
    model.with_pins(overrides)
    filled = fill_external(model, Request(model.model, cluster, parse_pins(model.pins)))
    run = parse_run(dump_run(filled.question.run), list(overrides), place=model.name).require_valid()
    model.sequence_length(run.data.sequence_length)
    require_all_devices(run, cluster)
    runtime = module_runtime(model, state_bytes(run.precision))
    return run, predict_layout(workload_of(run), layout_of(run), cluster, runtime, run=run)


@dataclass(frozen=True)
class ModuleRuntime(Framework):
    """Our runtime around a user module: its own blocks and loss, and no sequence parallel."""

    saved_bytes_per_token: float = 0.0
    attention_pairs: float = 1.0
    """Pairs of query and key over those of a causal decoder."""

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

    def attention_seconds(self, workload: Workload, at: Layouts, device: Device) -> tuple[Floats, Floats]:
        """Forward and backward of softmax(q k) v of one layer."""
        forward, backward = super().attention_seconds(workload, at, device)
        return self.attention_pairs * forward, self.attention_pairs * backward

    def residual_tokens(self, tokens: Floats, tp: Ints) -> Floats:
        """Every rank of tp computes all norms and residuals."""
        return tokens


def module_runtime(model: ExternalModel, state: StateBytes) -> ModuleRuntime:
    """The framework that prices this model."""
    return ModuleRuntime(
        name="module",
        state=state,
        saved_bytes_per_token=model.saved_bytes_per_token,
        attention_pairs=ATTENTION_PAIRS[model.kind],
    )
