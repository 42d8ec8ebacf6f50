"""The oracle: plain torch in one process, float64, the full global batch in one forward pass.

It shares the decoder, its initial weights and the stored tokens with the package. Sequences, targets,
loss, auxiliary loss, decay groups, clipping, learning rate and update are independent code.
"""

import dataclasses
import functools
import math
from fnmatch import fnmatchcase

import numpy as np
import torch
from tests.support.dropped_decoder import DroppedDecoder
from tests.support.fp8_by_definition import round_base
from tests.support.merged_decoder import MergedDecoder
from tests.support.oracle_optimizers import PlainOptimizer
from tests.support.reference_attention import set_documents, use_reference_attention
from torch import Tensor, nn

from meshwright.data.order import SampleOrder
from meshwright.data.stream import open_source
from meshwright.models.decoder import Decoder, build_decoder
from meshwright.models.initialise import initialise
from meshwright.models.layers.routing import Router
from meshwright.ops.nf4 import dequantise_nf4, quantise_nf4
from meshwright.ops.nf4_nested import dynamic_values
from meshwright.spec import OptimSpec, RunSpec
from meshwright.spec.adapter import adaptable

IGNORED = -100


@dataclasses.dataclass
class Reference:
    """What a run of some steps must give, on any mesh."""

    losses: list[float]
    grad_norms: list[float]
    learning_rates: list[float]
    gradients: list[dict[str, Tensor]]
    """The gradients of each step, after clipping."""
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    """State tensors by `parameter.state`."""
    buffers: dict[str, Tensor]
    ema: dict[str, Tensor]
    eval_loss: float
    """The loss of the final weights on the held-out sequences."""


class Sequences:
    """The sequences of a dataset as tensors, with document boundaries worked out independently."""

    def __init__(self, run: RunSpec) -> None:
        source = open_source(run.data)
        self.tokens = np.asarray(source.tokens).astype(np.int64)
        self.length = run.data.sequence_length
        self.num_sequences = (len(self.tokens) - 1) // self.length
        self.num_training = self.num_sequences - run.data.holdout_sequences
        self.document = np.zeros(len(self.tokens), dtype=np.int64)
        self.is_separate = run.data.documents == "separate"
        if self.is_separate:
            for end in source.document_ends[:-1]:
                self.document[end:] += 1

    def rows(self, ids: list[int]) -> dict[str, Tensor]:
        """tokens, targets, positions and documents, all [sequences, length]."""
        parts: dict[str, list[np.ndarray]] = {"tokens": [], "targets": [], "positions": [], "documents": []}
        for sample in ids:
            here = slice(sample * self.length, (sample + 1) * self.length)
            after = slice(here.start + 1, here.stop + 1)
            document = self.document[here]
            positions = [int((document[:place] == document[place]).sum()) for place in range(self.length)]
            targets = np.where(self.document[after] == document, self.tokens[after], IGNORED)
            parts["tokens"].append(self.tokens[here])
            parts["targets"].append(targets)
            parts["positions"].append(np.array(positions))
            parts["documents"].append(document)
        return {name: torch.from_numpy(np.stack(values)) for name, values in parts.items()}

    def batch_ids(self, run: RunSpec, step: int) -> list[int]:
        """The samples of one step; the last batch of `max_epochs` may be short."""
        order = SampleOrder(self.num_training, run.seed, run.data.shuffle)
        sizes = [_batch_sequences(run, one) for one in range(step + 1)]
        start, count = sum(sizes[:-1]), sizes[-1]
        if run.data.max_epochs is not None:
            count = min(count, run.data.max_epochs * self.num_training - start)
        return order.sample_ids(start, count).tolist()


def _batch_sequences(run: RunSpec, step: int) -> int:
    for part in run.data.batch_ramp:
        if step < part.before_step:
            return part.batch_sequences
    return run.data.batch_sequences


class Routers:
    """Reads the routers of a model: the auxiliary loss and the load of one forward pass."""

    def __init__(self, model: Decoder | MergedDecoder | DroppedDecoder) -> None:
        self.moe = model.spec.moe
        self.seen: dict[Router, tuple[Tensor, Tensor]] = {}
        for router in (module for module in model.modules() if isinstance(module, Router)):
            router.register_forward_hook(self._watch)

    def _watch(self, router: nn.Module, inputs: object, routing) -> None:
        self.seen[router] = (routing.experts_BSC, routing.scores_BSE)

    def auxiliary_loss(self) -> Tensor | float:
        """Mean over sequences of E x sum over experts of (part of choices) x (mean score), per layer."""
        total: Tensor | float = 0.0
        for experts_BSC, scores_BSE in self.seen.values():
            assert self.moe is not None
            if self.moe.score == "sigmoid":
                scores_BSE = scores_BSE / scores_BSE.sum(-1, keepdim=True)
            chosen_BSE = nn.functional.one_hot(experts_BSC, self.moe.num_experts).sum(2)
            part_BE = chosen_BSE.double().mean(1) / self.moe.top_k
            per_sequence = self.moe.num_experts * (part_BE * scores_BSE.mean(1)).sum(-1)
            total = total + self.moe.aux_loss * per_sequence.mean()
        return total

    @torch.no_grad()
    def step_biases(self) -> None:
        """Towards even use: one step up for an expert below the mean load, one down above."""
        for router, (experts_BSC, _) in self.seen.items():
            is_trained = router.weight.requires_grad
            if router.balance_bias is not None and self.moe is not None and is_trained:
                load = torch.bincount(experts_BSC.flatten(), minlength=self.moe.num_experts).double()
                router.balance_bias += self.moe.balance_bias_rate * torch.sign(load.mean() - load)


def reference_rate(run: RunSpec, step: int) -> float:
    """Linear warm-up, then linear to the final ratio at the last step."""
    schedule = run.schedule
    assert schedule.kind == "linear" and run.optim.lr_scaling is None
    if step < schedule.warmup_steps:
        return run.optim.lr * (step + 1) / schedule.warmup_steps
    progress = (step - schedule.warmup_steps) / (schedule.num_steps - 1 - schedule.warmup_steps)
    return run.optim.lr * (1 - progress * (1 - schedule.min_lr_ratio))


def _optimizer(run: RunSpec, named: dict[str, nn.Parameter]) -> torch.optim.Optimizer | PlainOptimizer:
    optim = run.optim
    groups = [{"params": [p], **_settings(optim, name, p)} for name, p in named.items()]
    if optim.kind == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.beta1)
    if optim.kind == "adamw":
        return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps)
    return PlainOptimizer(groups, optim, list(named))


def _settings(optim: OptimSpec, name: str, parameter: nn.Parameter) -> dict[str, float]:
    decay, factor = optim.weight_decay if parameter.ndim >= 2 or optim.weight_decay_on == "all" else 0.0, 1.0
    matching = [group for group in optim.groups if fnmatchcase(name, group.pattern)]
    if matching:
        factor = matching[-1].lr_factor
        decay = decay if matching[-1].weight_decay is None else matching[-1].weight_decay
    return {"weight_decay": decay, "lr_factor": factor}


def token_loss(model: Decoder, rows: dict[str, Tensor], *, divisor: int | None = None) -> Tensor:
    """Sum of cross-entropies / number of targets (or `divisor`)."""
    set_documents(model, rows["documents"])
    logits_BSV = model(rows["tokens"], positions_BS=rows["positions"])
    set_documents(model, None)
    targets = rows["targets"].flatten()
    total = nn.functional.cross_entropy(
        logits_BSV.flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum"
    )
    return total / (divisor or int((targets != IGNORED).sum()))


def reference_model(run: RunSpec, frozen: tuple[str, ...] = ()) -> Decoder:
    """The unsharded model in float64 with its initial weights, and attention by its definition."""
    model = build_decoder(run.model, dtype=torch.float64)
    initialise(model, run.seed)
    use_reference_attention(model)
    if run.adapter is not None and run.adapter.base in ("nf4", "nf4_nested"):
        named = dict(model.named_parameters())
        for one in adaptable(run.model):
            packed, absmax = quantise_nf4(named[one.name].detach())
            if run.adapter.base == "nf4_nested":
                matrices = absmax.view(torch.float32).view(-1, *absmax.shape[-2:])
                nested = torch.stack([_nested(one) for one in matrices]).view_as(absmax)
                absmax = nested.view(torch.int32)
            named[one.name].data = dequantise_nf4(packed, absmax, torch.float64)
    if run.adapter is not None and run.adapter.base == "fp8":
        round_base(model)
    for name, parameter in model.named_parameters():
        is_frozen = any(part in name for part in frozen)
        if run.adapter is not None or run.train_only:
            is_frozen = not any(fnmatchcase(name, pattern) for pattern in run.train_only)
        parameter.requires_grad_(not is_frozen)
    return model


def _nested(absmax: Tensor) -> Tensor:
    """The absmax of a full matrix as nested NF4 stores it, by the definition."""
    flat, values = absmax.flatten(), torch.tensor(dynamic_values())
    offset = flat.mean()
    parts = []
    for part in (flat - offset).split(256):
        scale = part.abs().max()
        nearest = (part / scale)[:, None].sub(values).abs().argmin(1)
        parts.append(values[nearest] * scale + offset)
    return torch.cat(parts).view_as(absmax)


def reference(run: RunSpec, *, num_steps: int = 3, frozen: tuple[str, ...] = ()) -> Reference:
    """Train `num_steps` steps; cached for later runs with the same model, optimizer, schedule and data."""
    parts = (run.model, run.optim, run.schedule, run.data.with_(microbatch_sequences=1), run.adapter)
    key = "/".join(part.model_dump_json() if part else "" for part in parts) + "/".join(run.train_only)
    return _cached(_Ignored(run), key, run.seed, num_steps, frozen)


class _Ignored:
    """Equal to every other: the cache compares the text key, which leaves the layout out."""

    def __init__(self, run: RunSpec) -> None:
        self.run = run

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Ignored)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=256)
def _cached(run: _Ignored, key: str, seed: int, num_steps: int, frozen: tuple[str, ...]) -> Reference:
    return _train(run.run, num_steps, frozen)


def _train(run: RunSpec, num_steps: int, frozen: tuple[str, ...]) -> Reference:
    model, sequences = reference_model(run, frozen), Sequences(run)
    every = dict(model.named_parameters())
    if run.adapter is not None:
        model = (DroppedDecoder if run.adapter.dropout else MergedDecoder)(model, run)
        every |= model.adapters
    routers = Routers(model)
    named = {name: p for name, p in every.items() if p.requires_grad}
    optimizer = _optimizer(run, named)
    ema = {name: p.detach().clone() for name, p in named.items()}
    losses, norms, rates, gradients = [], [], [], []
    for step in range(num_steps):
        if isinstance(model, DroppedDecoder):
            model.step = step
        loss = token_loss(model, sequences.rows(sequences.batch_ids(run, step)))
        (loss + routers.auxiliary_loss()).backward()
        norm = nn.utils.clip_grad_norm_(named.values(), run.optim.max_grad_norm or math.inf)
        rates.append(reference_rate(run, step))
        for group in optimizer.param_groups:
            group["lr"] = rates[-1] * group["lr_factor"]
        gradients.append({name: _gradient(p) for name, p in named.items()})
        optimizer.step()
        optimizer.zero_grad()
        if run.adapter is None:
            routers.step_biases()
        losses.append(loss.item())
        norms.append(norm.item())
        for name, p in named.items():
            decay = run.optim.ema_decay or 0.0
            ema[name] = decay * ema[name] + (1 - decay) * p.detach()
    return Reference(
        losses=losses,
        grad_norms=norms,
        learning_rates=rates,
        gradients=gradients,
        weights={name: p.detach().clone() for name, p in every.items()},
        optimizer=_states(optimizer, named),
        buffers={
            name: value.clone()
            for name, value in (model if run.adapter is None else model.base).named_buffers()
            if "balance_bias" in name
        },
        ema=ema,
        eval_loss=_evaluation_loss(model, sequences),
    )


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def _states(
    optimizer: torch.optim.Optimizer | PlainOptimizer, named: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value.clone()
        for name, p in named.items()
        for key, value in optimizer.state[p].items()
        if isinstance(value, Tensor) and value.ndim
    }


def _evaluation_loss(model: Decoder, sequences: Sequences) -> float:
    held_out = list(range(sequences.num_training, sequences.num_sequences))
    with torch.no_grad():
        return float(token_loss(model.eval(), sequences.rows(held_out)))


def loss_of_one_document(model: Decoder, tokens: np.ndarray) -> tuple[float, int]:
    """(sum of losses, targets) of a document alone, without masks: what packing must not change."""
    inputs = torch.from_numpy(tokens[:-1].astype(np.int64))[None]
    targets = torch.from_numpy(tokens[1:].astype(np.int64))
    with torch.no_grad():
        logits_BSV = model(inputs, positions_BS=torch.arange(inputs.shape[1])[None])
    return float(nn.functional.cross_entropy(logits_BSV[0], targets, reduction="sum")), len(targets)
