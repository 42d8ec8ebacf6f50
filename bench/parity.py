"""Loss parity: the 124M shape in fp32, bf16 and fp8 on the same data, three seeds each, and a bad recipe.

    python bench/parity.py                         on the card: about four minutes, compile included
    python bench/parity.py --tiny --device cpu     the same program in half a minute, for a look
    python bench/parity.py --kinds bf16 current blocks --seeds 0

A number format may cost nothing that training with another seed does not cost as well: the loss of the last
fifth of the steps and on held-out data, minus that of bf16 with the same seed, stays inside the spread of
bf16 over seeds. The control (E5M2 everywhere, the ends too, with scales of another time) must not.
`fp32` multiplies in TF32 where the device has it; everything else of it is fp32.
"""

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
from bench.parity_results import Curve, write_results

from meshwright.bench.machine_facts import machine_facts
from meshwright.errors import EXIT_RUN_FAILED
from meshwright.mesh import Mesh, build_mesh, join_world, leave_world
from meshwright.models.layers.linear import Linear
from meshwright.optim.schedule import learning_rate
from meshwright.precision.fp8.delayed import DelayedProduct
from meshwright.precision.fp8.recipes import E5M2, RECIPES
from meshwright.spec import (
    DataSpec,
    Fp8Spec,
    ModelSpec,
    OptimSpec,
    ParallelSpec,
    PrecisionSpec,
    RunSpec,
    ScheduleSpec,
    SyntheticSpec,
)
from meshwright.spec.check import require_valid
from meshwright.spec.families import family
from meshwright.train.build import build_data, build_training, seed_step
from meshwright.train.evaluate import evaluate
from meshwright.train.step import Training, train_step

KINDS = ("fp32", "bf16", "current", "delayed", "blocks", "mxfp8", "control")
# Of E5M2's range this leaves the largest numbers a handful of steps, and the rest nothing.
STALE_BY = 2.0**30
DEFAULT_KINDS = ("bf16", "current", "blocks", "fp32", "control")


def the_model(*, is_tiny: bool) -> ModelSpec:
    """GPT-2's smallest shape with a padded vocabulary; tiny: the same kind for a CPU."""
    model = family("gpt2-124m").with_(vocab_size=50304)
    if not is_tiny:
        return model
    small = model.attention.with_(num_heads=2, num_kv_heads=2, head_width=64)
    inner = model.mlp.with_(width=256)
    return model.with_(num_layers=3, width=128, vocab_size=384, max_positions=128, attention=small, mlp=inner)


def precision_of(kind: str, device: str) -> PrecisionSpec:
    """The formats of one kind of run."""
    if kind == "fp32":
        return PrecisionSpec(compute="fp32" if device == "cpu" else "tf32")
    if kind == "bf16":
        return PrecisionSpec(compute="bf16")
    fp8 = {"recipe": "delayed", "bf16_ends": 0} if kind == "control" else {"recipe": kind}
    return PrecisionSpec(compute="bf16", fp8=Fp8Spec.model_validate(fp8))


def the_run(kind: str, seed: int, options: argparse.Namespace) -> RunSpec:
    """One seed of one kind; weights, order of samples and data depend on the seed alone."""
    return RunSpec(
        name=f"{kind}-{seed}",
        seed=seed,
        device=options.device,
        compile=options.device == "cuda",
        model=the_model(is_tiny=options.tiny),
        precision=precision_of(kind, options.device),
        optim=OptimSpec(lr=options.lr, max_grad_norm=1.0, weight_decay=0.1, beta2=0.95),
        schedule=ScheduleSpec(num_steps=options.steps, warmup_steps=options.steps // 10, kind="cosine"),
        data=DataSpec(
            synthetic=SyntheticSpec(num_documents=options.documents),
            sequence_length=options.sequence,
            batch_sequences=options.batch,
            microbatch_sequences=options.batch,
            documents="joined",
            holdout_sequences=8 * options.batch,
        ),
    )


def train_curve(kind: str, run: RunSpec, mesh: Mesh) -> Curve:
    """The loss of every step, and on held-out data at the end."""
    started_at = time.perf_counter()
    with ExitStack() as stack:
        if kind == "control":
            crude = dataclasses.replace(RECIPES["delayed"], operand=E5M2, gradient=E5M2)
            stack.enter_context(patch.dict(RECIPES, {"delayed": crude}))
        training, batches = build_training(run, mesh), build_data(run, mesh)
        if kind == "control":
            emulate(training)
        losses = []
        for step in range(run.schedule.num_steps):
            seed_step(run.seed, step)
            rate = learning_rate(run.optim, run.schedule, step, batch_tokens=run.data.batch_tokens)
            losses.append(train_step(training, next(batches), learning_rate=rate).loss)
            if kind == "control" and step == 0:
                freeze_scales(training)
        batches.close()
        held_out = evaluate(run, training.program, mesh)
    return Curve(
        kind=kind,
        seed=run.seed,
        losses=torch.stack(losses).tolist(),
        held_out=held_out,
        seconds=time.perf_counter() - started_at,
    )


def emulate(training: Training) -> None:
    """No tensor core multiplies E5M2 by E5M2."""
    for product in delayed_products(training):
        product.native = False


def freeze_scales(training: Training) -> None:
    """From now on the scales of a time when everything was STALE_BY times larger."""
    training.fp8_scales = None
    for product in delayed_products(training):
        product.units_3.mul_(STALE_BY)


def delayed_products(training: Training) -> list[DelayedProduct]:
    """Of every linear in fp8."""
    modules = [module for stage in training.program.stages for module in stage.modules()]
    return [
        module.product
        for module in modules
        if isinstance(module, Linear) and isinstance(module.product, DelayedProduct)
    ]


def parse() -> argparse.Namespace:
    """The command line; sizes depend on --tiny."""
    parser = argparse.ArgumentParser(description="Loss parity of number formats on the 124M shape.")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(DEFAULT_KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--control-seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    for name in ("steps", "batch", "sequence", "documents"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    sizes = {"steps": 40, "batch": 4, "sequence": 128, "documents": 200}
    if not options.tiny:
        sizes = {"steps": 500, "batch": 8, "sequence": 1024, "documents": 6000}
    for name, size in sizes.items():
        setattr(options, name, getattr(options, name) or size)
    return options


def main() -> None:
    """Run every kind and seed one after the other in this process, then judge."""
    options = parse()
    mesh = build_mesh(ParallelSpec(), join_world(options.device))
    facts = machine_facts(mesh.device) | {"run": the_run("bf16", 0, options).model_dump(mode="json")}
    curves: list[Curve] = []
    is_sound = False
    for kind in options.kinds:  # after each the page is written anew, so that a run cut short leaves one
        for seed in options.control_seeds if kind == "control" else options.seeds:
            run = require_valid(the_run(kind, seed, options))
            curves.append(train_curve(kind, run, mesh))
            gc.collect()
            last = statistics.fmean(curves[-1].losses[-max(1, options.steps // 5) :])
            sys.stderr.write(
                f"{kind:8} seed {seed}: loss {last:.4f}, held out {curves[-1].held_out:.4f}, "
                f"{curves[-1].seconds:.1f} s\n"
            )
        torch._dynamo.reset()  # the next kind compiles other code; its variants count from zero
        is_sound = write_results(curves, facts, options.out, name="parity_tiny" if options.tiny else "parity")
    leave_world()
    sys.exit(0 if is_sound else EXIT_RUN_FAILED)


if __name__ == "__main__":
    main()
