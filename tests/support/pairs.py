"""Preference pairs of ragged lengths, and a hand-written training on them: one answer at a time."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from tests.support.oracle import reference_model
from tests.support.runs import NUM_TOKENS, SEQUENCE_LENGTH, _FewTokens, tiny_run
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid

from meshwright.data.pair_samples import NO_PAIR, PairSamples
from meshwright.data.sources import ChatFacts, TokenFile
from meshwright.data.write import new_dataset
from meshwright.models.decoder import Decoder
from meshwright.spec import OptimSpec, ParallelSpec, PreferenceSpec, RunSpec, ScheduleSpec

NUM_PAIRS = 40
RATE = 0.05


@functools.cache
def pair_dataset() -> str:
    """Pairs of 2 to 4 prompt tokens and answers of 1 to 4 tokens."""
    folder = Path(tempfile.mkdtemp(prefix="meshwright-pairs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    draw = np.random.default_rng(5)
    facts = ChatFacts(kind="pairs", trained="assistant", masks="none", num_trained=0, end_tokens={})
    with new_dataset(folder / "pairs", _FewTokens(), is_weighted=True) as writer:
        for _ in range(NUM_PAIRS):
            prompt = draw.integers(0, NUM_TOKENS, draw.integers(2, 5))
            for _ in range(2):
                answer = draw.integers(0, NUM_TOKENS, draw.integers(1, 5))
                tokens = np.concatenate([prompt, answer]).astype(np.uint8)
                writer.append_encoded([tokens.tobytes()], np.array([len(tokens)]))
                writer.append_weights([np.repeat([0.0, 1.0], [len(prompt), len(answer)])])
        writer.finish([], chat=facts)
    return str(folder / "pairs")


def pair_run(
    preference: PreferenceSpec, parallel: ParallelSpec | None = None, *, microbatch_sequences: int = 1
) -> RunSpec:
    """A float64 run on pairs with plain SGD."""
    run = tiny_run("gqa", parallel=parallel, microbatch_sequences=microbatch_sequences)
    return run.with_(
        data=run.data.with_(path=pair_dataset(), packing="whole", holdout_sequences=2),
        optim=OptimSpec(kind="sgd", lr=RATE, beta1=0.0, weight_decay=0.0, max_grad_norm=None),
        schedule=ScheduleSpec(num_steps=3, kind="constant"),
        preference=preference,
    )


def expected_training(
    run: RunSpec, batches: list[tuple[int, ...]]
) -> tuple[list[float], dict[str, Tensor], float]:
    """(losses, weights, loss on held-out pairs) after a step on each batch of rows."""
    assert run.preference is not None
    source = TokenFile.open(pair_dataset())
    samples = PairSamples.open(source, SEQUENCE_LENGTH)
    model = reference_model(run)
    with torch.no_grad():
        before = [answer_log_prob(model, source, index) for index in range(2 * NUM_PAIRS)]
    losses = []
    for rows in batches:
        loss = mean_loss(model, source, _pairs(samples, rows), before, run.preference)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
        losses.append(loss.item())
    held_out = tuple(range(len(samples) - 2, len(samples)))
    with torch.no_grad():
        last = mean_loss(model, source, _pairs(samples, held_out), before, run.preference)
    return losses, {name: each.detach() for name, each in model.named_parameters()}, float(last)


def _pairs(samples: PairSamples, rows: tuple[int, ...]) -> list[int]:
    found = samples.pair_ids(np.array(rows)).ravel()
    return found[found != NO_PAIR].tolist()


def mean_loss(
    model: Decoder, source: TokenFile, pairs: list[int], before: list, preference: PreferenceSpec
) -> Tensor:
    return torch.stack([_loss(model, source, pair, before, preference) for pair in pairs]).mean()


def _loss(model: Decoder, source: TokenFile, pair: int, before: list, preference: PreferenceSpec) -> Tensor:
    (good, n_good), (bad, n_bad) = (answer_log_prob(model, source, 2 * pair + side) for side in (0, 1))
    good_before, bad_before = before[2 * pair][0], before[2 * pair + 1][0]
    beta = preference.beta
    if preference.loss == "sigmoid":
        margin = beta * ((good - good_before) - (bad - bad_before))
        wrong = preference.label_smoothing
        loss = -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)
    elif preference.loss == "ipo":
        loss = ((good - good_before) / n_good - (bad - bad_before) / n_bad - 1 / (2 * beta)) ** 2
    elif preference.loss == "simpo":
        loss = -logsigmoid(beta * (good / n_good - bad / n_bad) - preference.margin)
    else:
        odds = [torch.log(p / (1 - p)) for p in ((good / n_good).exp(), (bad / n_bad).exp())]
        loss = -good / n_good - beta * logsigmoid(odds[0] - odds[1])
    return loss - preference.nll_weight * good / n_good


def answer_log_prob(model: Decoder, source: TokenFile, document: int) -> tuple[Tensor, int]:
    """Log-prob of an answer, computed alone, and its number of tokens."""
    tokens = source.document(document).astype(np.int64)
    end = int(source.document_ends[document])
    assert source.loss_weights is not None
    is_answer = torch.from_numpy(source.loss_weights[end - len(tokens) + 1 : end] != 0)
    inputs = torch.from_numpy(tokens[:-1])[None]
    logits = model(inputs, positions_BS=torch.arange(inputs.shape[1])[None])
    log_probs = log_softmax(logits[0], -1).gather(1, torch.from_numpy(tokens[1:])[:, None])[:, 0]
    return log_probs[is_answer].sum(), int(is_answer.sum())
