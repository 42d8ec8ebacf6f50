"""Random fine-tuning runs: adapters, formats of the base, layouts and savings of memory, all mixed."""

import random

from tests.support.layouts import drawn_layout
from tests.support.runs import MORE_OPTIMIZERS, OPTIMIZERS, tiny_run

from meshwright.spec import AdapterSpec, LatentSpec, MemorySpec, MlpSpec, ModelSpec, ParallelSpec, RunSpec
from meshwright.spec.adapter import EMBEDDING, HEAD, is_trained, target_names
from meshwright.spec.check import check
from meshwright.spec.parameters import parameters

MAX_RANKS = 8
BASES = ("weights", "weights", "nf4", "nf4_nested", "fp8")
PACKED = ("nf4", "nf4_nested", "fp8")
OFFLOADS = ("optimizer", "parameters", "activations", "embedding")
_LATENT = LatentSpec(query_rank=64, kv_rank=64, nope_width=16, rope_width=16, value_width=16)


def random_finetuning(seed: int) -> RunSpec:
    """The first run drawn from a seed that the rules accept. Equal for equal seeds."""
    generator = random.Random(seed)
    while True:
        run = _drawn(generator)
        if run is not None and run.parallel.num_ranks <= MAX_RANKS and not check(run):
            return run


def described(run: RunSpec) -> str:
    """What differs from the defaults, in one line."""
    parts = {"adapter": run.adapter, "parallel": run.parallel, "memory": run.memory}
    shown = [f"{name}: {_changes(part)}" for name, part in parts.items() if part is not None]
    others = f"train_only={run.train_only} optim={run.optim.kind} ema={run.optim.ema_decay} data={run.data!r}"
    return "; ".join([*shown, others, f"model={run.model!r}"])


def _changes(part: AdapterSpec | ParallelSpec | MemorySpec) -> dict[str, object]:
    given = part.model_dump(exclude_defaults=True)
    return {name: value for name, value in given.items() if value}


def _drawn(generator: random.Random) -> RunSpec | None:
    base = generator.choice(BASES)
    layout = drawn_layout(generator)
    parallel = layout.parallel.with_(
        ep_overlap=generator.choice(("none", "shared", "halves")) if layout.parallel.ep > 1 else "none"
    )
    if parallel.num_ranks > MAX_RANKS:
        return None
    run = layout._replace(parallel=parallel).run()
    model = widened(run.model) if base in PACKED else run.model
    is_adapted = base in PACKED or generator.random() < 0.9
    adapter = drawn_adapter(generator, model, base) if is_adapted else None
    trained = _trained_beside(generator, model) if not is_adapted or generator.random() < 0.2 else ()
    optim = generator.choice([*OPTIMIZERS.values(), *OPTIMIZERS.values(), *MORE_OPTIMIZERS.values()])
    if optim.kind in OPTIMIZERS and generator.random() < 0.3:
        optim = optim.with_(ema_decay=0.5)
    if optim.kind in MORE_OPTIMIZERS and _trains_shifts_of_scores(model, trained, adapter):
        return None
    return tiny_run(
        model,
        parallel=parallel,
        optim=optim,
        microbatch_sequences=generator.choice((1, 2, run.data.microbatch_sequences)),
        ramp=generator.choice(((), (), ((1, 4),))),
        adapter=adapter,
        train_only=trained,
        memory=_drawn_memory(generator),
    )


def _trains_shifts_of_scores(model: ModelSpec, trained: tuple[str, ...], adapter: AdapterSpec | None) -> bool:
    """Whether a bias of keys without rope is trained: its gradient is zero but for rounding, which optimizers
    that divide by its size blow up to a step."""
    biases = [one.name for one in parameters(model) if one.name.endswith(".key.bias")]
    return model.rope is None and any(is_trained(name, adapter, trained) for name in biases)


def _drawn_memory(generator: random.Random) -> MemorySpec:
    return MemorySpec(
        recompute=generator.choice(("none", "selective", "full")),
        recompute_every=generator.choice((1, 1, 2)),
        offload=tuple(one for one in OFFLOADS if generator.random() < 0.2),
        regather_tp_inputs=generator.random() < 0.2,
    )


def drawn_adapter(generator: random.Random, model: ModelSpec, base: str) -> AdapterSpec:
    """Adapters of all linears, of some, of one block, or of the ends, some with a rank of their own."""
    targets = _drawn_targets(generator, model)
    chosen = generator.sample(targets, generator.randint(0, min(2, len(targets))))
    ranks = [
        {"pattern": one, "rank": generator.randint(1, 3), "alpha": generator.choice((None, 5.0))}
        for one in chosen
    ]
    tokens = (40, 3, 17, model.vocab_size - 1) if generator.random() < 0.2 else ()
    return AdapterSpec.model_validate(
        {
            "kind": generator.choice(("lora", "rslora", "dora")),
            "rank": generator.randint(1, 4),
            "alpha": 8,
            "targets": targets,
            "ranks": ranks,
            "tokens": tokens,
            "dropout": generator.choice((0.0, 0.1)),
            "base": base,
        }
    )


def _drawn_targets(generator: random.Random, model: ModelSpec) -> tuple[str, ...]:
    names = [name for name in target_names(model) if name not in ("embed_tokens", "lm_head")]
    block = f"blocks.{generator.randrange(model.num_layers)}"
    linears = generator.choice(
        [
            ("all-linear",),
            ("all-linear",),
            (f"{block}.*",),
            (f"{block}.attention.*",),
            tuple(generator.sample(names, min(3, len(names)))),
            tuple(generator.sample(names, 1)),
        ]
    )
    ends = [one for one in ("embedding", "head") if generator.random() < 0.15]
    return tuple(dict.fromkeys((*linears, *ends)))


def _trained_beside(generator: random.Random, model: ModelSpec) -> tuple[str, ...]:
    """Patterns of parameters that are trained in full."""
    block = generator.randrange(model.num_layers)
    patterns = [
        "*norm*",
        EMBEDDING,
        HEAD,
        "*.router.*",
        "*.bias",
        f"blocks.{block}.*",
        "*.experts.down",
        "norm.*",
    ]
    patterns += [generator.choice(parameters(model)).name]
    return tuple(generator.sample(patterns, generator.randint(1, 2)))


def widened(model: ModelSpec) -> ModelSpec:
    """The model with widths that are multiples of a block of NF4 on two tp ranks, and of 16 for fp8."""
    attention = model.attention.with_(head_width=16)
    if attention.latent is not None:
        attention = attention.with_(latent=_LATENT, head_width=32)
    moe = model.moe
    if moe is not None:
        moe = moe.with_(width=128, shared_width=128 if moe.shared_width else 0)
    mlp = MlpSpec.model_validate({**model.mlp.model_dump(), "width": 128})
    return model.with_(width=64, attention=attention, mlp=mlp, moe=moe, init_std=0.1)
