"""Modules from elsewhere, unmodified and small, with batches for them and a plain loop as their oracle."""

import dataclasses
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from tests.support.harness import make_whole, this_world
from tests.support.ranks import rank_device
from tests.support.vision_modules import (
    timm_convnext,
    timm_resnet,
    timm_vit,
    torchvision_mobilenet,
    torchvision_resnet,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from meshwright.checkpoint.load_weights import persistent_buffers
from meshwright.mesh import build_mesh
from meshwright.modules.build_training import build_module_training
from meshwright.modules.dataset import Portion
from meshwright.optim.schedule import learning_rate
from meshwright.precision.policy import weight_dtype
from meshwright.spec import MemorySpec, OptimSpec, ParallelSpec, PrecisionSpec, ScheduleSpec
from meshwright.spec.modules import FitSpec, SamplesSpec
from meshwright.train.evaluate import sum_over_world
from meshwright.train.step import train_step

NUM_STEPS = 3
BATCH = 8
OPTIMIZERS = {
    "sgd": OptimSpec(kind="sgd", lr=0.05, beta1=0.9, weight_decay=0.1, decay="all", max_grad_norm=1.5),
    "adamw": OptimSpec(kind="adamw", lr=0.01, eps=1e-5, weight_decay=0.1, decay="all", max_grad_norm=1.0),
}
Batch = tuple[Tensor, Tensor]


def resnet() -> nn.Module:
    """A CNN in channels_last, from transformers."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[2, 2], layer_type="basic", num_labels=5
    )
    torch.manual_seed(0)
    return ResNetForImageClassification(config).to(memory_format=torch.channels_last)


def vit() -> nn.Module:
    """A vision transformer, from transformers."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=16,
        patch_size=8,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    return ViTForImageClassification(config)


def bert() -> nn.Module:
    """A masked language model whose head is tied to its table, from transformers."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=37,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=12,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    return BertForMaskedLM(config)


def decoder(family: str, **changes: Any) -> nn.Module:
    """A causal language model from transformers, of a family that is not ours."""
    import transformers

    prefix = "Gemma3Text" if family == "Gemma3" else family
    sizes = {
        "vocab_size": 38,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "pad_token_id": 3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }
    config = getattr(transformers, f"{prefix}Config")(**sizes | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    # In every part, because recompute and pipelines call parts by themselves.
    for module in [model, *model.base_model.children(), *model.base_model.layers]:
        module.forward = in_double(module.forward)
    return model


def sequential() -> nn.Module:
    """Parts that run one after the other: what a pipeline can cut as it stands."""
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(4)
    ]
    return nn.Sequential(nn.Embedding(37, 16), *layers, nn.LayerNorm(16), nn.Linear(16, 37))


def mlp() -> nn.Module:
    """Without attention, whose key bias has a gradient of rounding alone, which some rules blow up."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16)) for _ in range(2)]
    return nn.Sequential(nn.Embedding(37, 16), *blocks, nn.Linear(16, 37))


def cnn() -> nn.Module:
    """Convolutions with batch norm, in channels_last."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        for _ in range(3)
    ]
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), *blocks, *ends)
    return model.to(memory_format=torch.channels_last)


def plain_image_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    images, labels = batch
    return cross_entropy(model(images), labels, reduction="sum"), len(labels)


def plain_token_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    tokens, targets = batch
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum"), (
        targets >= 0
    ).sum()


def image_batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, 16, 16, generator=generator, dtype=torch.float64)
    return images.to(memory_format=torch.channels_last), torch.randint(5, (BATCH,), generator=generator)


def token_batch(step: int) -> Batch:
    """Rows count one to twelve targets, so ranks and micro-batches have unequal numbers."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(37, (BATCH, 12), generator=generator)
    lengths = torch.randint(1, 13, (BATCH, 1), generator=generator)
    return tokens, tokens.roll(1, 1).masked_fill(torch.arange(12) >= lengths, -100)


def image_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    images, labels = batch
    return cross_entropy(model(pixel_values=images).logits, labels, reduction="sum"), len(labels)


def token_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    tokens, targets = batch
    logits = model(input_ids=tokens).logits
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), (targets >= 0).sum()


class InDouble(TorchFunctionMode):
    """Reads float32 as float64: decoders of transformers norm in float32, whatever their weights are."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        kwargs = {key: torch.float64 if one is torch.float32 else one for key, one in (kwargs or {}).items()}
        return func(*args, **kwargs)


def in_double(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward under `InDouble`."""

    @wraps(forward)
    def doubled(*args: Any, **kwargs: Any) -> Any:
        with InDouble():
            return forward(*args, **kwargs)

    return doubled


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A module with its data."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], tuple[Tensor, Any]]


MODULES = {
    "resnet": Foreign(resnet, image_batch, image_loss),
    "vit": Foreign(vit, image_batch, image_loss),
    "bert": Foreign(bert, token_batch, token_loss),
}
GEMMA = {"head_dim": 4, "query_pre_attn_scalar": 4, "attn_implementation": "sdpa"}
DECODERS = {
    # Queries and keys are normed over all heads, so its plan gathers them.
    "olmo2": Foreign(partial(decoder, "Olmo2", tie_word_embeddings=False), token_batch, token_loss),
    # Norms of heads inside a cut pair; a scaled table tied to the head; windows.
    "gemma3": Foreign(partial(decoder, "Gemma3", sliding_window=4, **GEMMA), token_batch, token_loss),
    # Biases everywhere.
    "starcoder2": Foreign(
        partial(
            decoder, "Starcoder2", residual_dropout=0.0, embedding_dropout=0.0, tie_word_embeddings=False
        ),
        token_batch,
        token_loss,
    ),
}
MORE_DECODERS = {
    "gemma3_untied": Foreign(
        partial(decoder, "Gemma3", sliding_window=4, tie_word_embeddings=False, **GEMMA),
        token_batch,
        token_loss,
    ),
    "gemma2": Foreign(
        partial(decoder, "Gemma2", head_dim=4, query_pre_attn_scalar=4), token_batch, token_loss
    ),
    "phi3": Foreign(partial(decoder, "Phi3"), token_batch, token_loss),
    "cohere": Foreign(partial(decoder, "Cohere"), token_batch, token_loss),
    "glm4": Foreign(partial(decoder, "Glm4", head_dim=4), token_batch, token_loss),
    "granite": Foreign(partial(decoder, "Granite"), token_batch, token_loss),
    "olmo": Foreign(partial(decoder, "Olmo"), token_batch, token_loss),
}
# Without a library that a machine may lack.
PLAIN = {
    "sequential": Foreign(sequential, token_batch, plain_token_loss),
    "mlp": Foreign(mlp, token_batch, plain_token_loss),
    "cnn": Foreign(cnn, image_batch, plain_image_loss),
}
VISION = {
    "timm resnet": Foreign(timm_resnet, image_batch, plain_image_loss),
    "timm convnext": Foreign(timm_convnext, image_batch, plain_image_loss),
    "timm vit": Foreign(timm_vit, image_batch, plain_image_loss),
    "torchvision mobilenet": Foreign(torchvision_mobilenet, image_batch, plain_image_loss),
    "torchvision resnet": Foreign(torchvision_resnet, image_batch, plain_image_loss),
}


def foreign_named(name: str) -> Foreign:
    return (MODULES | DECODERS | MORE_DECODERS | PLAIN | VISION)[name]


def fit_spec(optim: str | OptimSpec = "sgd", *, microbatch_samples: int = 1, **changes: Any) -> FitSpec:
    """In float64; `changes` are fields of FitSpec."""
    spec = FitSpec(
        device="cpu",
        precision=PrecisionSpec(compute="fp64"),
        optim=OPTIMIZERS[optim] if isinstance(optim, str) else optim,
        schedule=ScheduleSpec(num_steps=NUM_STEPS, kind="constant"),
        data=SamplesSpec(batch_samples=BATCH, microbatch_samples=microbatch_samples),
    )
    return spec.with_(**changes) if changes else spec


@dataclasses.dataclass
class Course:
    """What three steps of a module went through, its tensors whole."""

    losses: list[float]
    grad_norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]


def reference(name: str, optim: str) -> Course:
    """A plain loop over whole batches in one process; knows nothing of meshwright but the numbers."""
    foreign, said = foreign_named(name), OPTIMIZERS[optim]
    model = foreign.build().double()
    if optim == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=said.lr, momentum=said.beta1, weight_decay=said.weight_decay
        )
    else:
        betas = (said.beta1, said.beta2)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=said.lr, betas=betas, eps=said.eps, weight_decay=said.weight_decay
        )
    losses, norms, gradients = [], [], []
    for step in range(NUM_STEPS):
        loss_sum, count = foreign.loss(model, foreign.batch(step))
        loss = loss_sum / count
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), said.max_grad_norm)))
        gradients.append(
            {
                key: torch.zeros_like(one) if one.grad is None else one.grad.clone()
                for key, one in model.named_parameters()
            }
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    weights = {key: one.detach().clone() for key, one in model.named_parameters()}
    buffers = {key: one.clone() for key, one in model.named_buffers() if key in model.state_dict()}
    return Course(losses, norms, gradients, weights, buffers)


def rows_of_rank(batch: Any, spec: FitSpec, dp_rank: int) -> list[Any]:
    """The micro-batches of one rank, dealt out by turns."""
    size, dp = spec.microbatch_samples, spec.parallel.dp
    starts = range(dp_rank * size, BATCH, dp * size)
    return [Portion(tuple(_prepared(part[start : start + size], spec) for part in batch)) for start in starts]


def _prepared(part: Tensor, spec: FitSpec) -> Tensor:
    """On the rank's device; numbers in the format of the weights."""
    part = part.to(rank_device())
    return part.to(weight_dtype(spec.precision)) if part.is_floating_point() else part


@dataclasses.dataclass
class Dealt:
    """A step's batch for `train_step`."""

    microbatches: list[Any]


def train_here(name: str, spec: FitSpec) -> Course:
    """The same three steps through the mesh of a spec; all its ranks call it."""
    foreign = foreign_named(name)
    mesh = build_mesh(spec.parallel, this_world())
    model = foreign.build()
    if mesh.rank:  # ranks must agree by themselves
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    trial = tuple(part[: spec.microbatch_samples] for part in foreign.batch(0))
    training = build_module_training(model, foreign.loss, spec, mesh, trial)
    parts: dict[str, list[Tensor]] = {one.name: [] for one in training.program.owned}

    def before_update(*_: object) -> None:
        for one in training.program.owned:
            parts[one.name].append(one.shard.grad.clone())

    training.optimizer.register_step_pre_hook(before_update)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        dealt = Dealt(rows_of_rank(foreign.batch(step), spec, mesh.dp_rank))
        rate = learning_rate(spec.optim, spec.schedule, step, batch_tokens=spec.data.batch_tokens)
        outcome = train_step(training, dealt, learning_rate=rate)
        losses.append(float(sum_over_world(outcome.loss, mesh)))
        norms.append(float(outcome.grad_norm))
    wholes = {
        one.name: make_whole(one, [one.shard.detach(), *parts[one.name]]) for one in training.program.owned
    }
    buffers = persistent_buffers(training.program.stages)
    return Course(
        losses,
        norms,
        [{key: whole[1 + step] for key, whole in wholes.items()} for step in range(NUM_STEPS)],
        {key: whole[0] for key, whole in wholes.items()},
        {key: one.clone() for key, one in buffers.items()},
    )


def train_cases(name: str, specs: list[FitSpec]) -> list[Course]:
    """Several specs of one world size in one job: starting transformers takes longer than training."""
    return [train_here(name, spec) for spec in specs]


def together(courses: list[Course]) -> Course:
    """Of the ranks of a pipeline, each with its own stages, one course."""
    first = courses[0]
    for course in courses:
        assert (course.losses, course.grad_norms) == (first.losses, first.grad_norms)
    return Course(
        first.losses,
        first.grad_norms,
        [
            {k: v for course in courses for k, v in course.gradients[step].items()}
            for step in range(NUM_STEPS)
        ],
        {k: v for course in courses for k, v in course.weights.items()},
        {k: v for course in courses for k, v in course.buffers.items()},
    )


def differences(found: Course, expected: Course) -> dict[str, float]:
    """The relative error of everything, by what it is."""
    errors = {}
    for step in range(NUM_STEPS):
        errors[f"step {step} loss"] = abs(found.losses[step] / expected.losses[step] - 1)
        errors[f"step {step} norm"] = abs(found.grad_norms[step] / expected.grad_norms[step] - 1)
        errors |= _errors(f"step {step} gradient", found.gradients[step], expected.gradients[step])
    errors |= _errors("weight", found.weights, expected.weights)
    errors |= _errors("buffer", found.buffers, expected.buffers)
    return errors


def _errors(kind: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    largest = max((float(one.abs().max()) for one in expected.values()), default=1.0)
    errors = {}
    for name, tensor in expected.items():
        # Gradients that are zero but for rounding (a bias before batch norm) are measured against the rest.
        scale = max(float(tensor.abs().max()), 1e-4 * largest)
        error = float((found[name].double() - tensor.double()).abs().max()) / scale if scale else 0.0
        errors[f"{kind} {name}"] = error if error == error else float("inf")
    return errors


def parallel(**axes: int) -> ParallelSpec:
    """Short for the tables of tests."""
    return ParallelSpec(**axes)


def offload(what: str) -> MemorySpec:
    """Short for the tables of tests."""
    return MemorySpec(offload=what)


def recompute(kind: str, every: int = 1) -> MemorySpec:
    """Short for the tables of tests."""
    return MemorySpec(recompute=kind, recompute_every=every)
