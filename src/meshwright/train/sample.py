"""Text from a trained model, in one process."""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.checkpoint.weights import Weights, build_model
from meshwright.data.chat.prompt import Prompt
from meshwright.data.tokenize import Tokenizer, open_tokenizer, tokenizer_for
from meshwright.errors import CheckpointError, DataError
from meshwright.models.decoder import Decoder
from meshwright.spec.parameters import num_parameters

SMALL_MODEL_PARAMETERS = 50_000_000
_NAME_ONE = "name one with --tokenizer: a tokenizer.json, a folder with one, or `bytes`"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn."""

    num_tokens: int = 200
    temperature: float = 0.8
    """0 takes the most likely token."""
    top_k: int | None = None
    """Draw only from this many of the most likely tokens."""
    seed: int = 0


def sample_text(
    weights: Weights,
    tokenizer: Tokenizer,
    prompt: Prompt,
    sampling: Sampling,
    device: torch.device | str = "cpu",
) -> str:
    """What the model writes after the prompt, up to a token that ends it."""
    if tokenizer.vocab_size > weights.model.vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {weights.model.vocab_size}",
            where=tokenizer.name,
            hint="use the tokenizer of the model's dataset",
        )
    model = build_model(weights, device)
    written = generate(model, prompt, vocab_size=tokenizer.vocab_size, sampling=sampling)
    return tokenizer.decode(written)


def choose_tokenizer(weights: Weights, name: str | None) -> Tokenizer:
    """The named tokenizer, else that of the run's dataset, else the one in the folder of the weights."""
    if name is not None:
        return open_tokenizer(name)
    if weights.run is not None:
        try:
            return tokenizer_for(weights.run.data)
        except DataError as error:
            fact = f"the tokenizer is that of the run's dataset: {error.fact}"
            raise DataError(fact, where=error.where, hint=_NAME_ONE) from None
    if weights.origin.is_dir() and (weights.origin / "tokenizer.json").is_file():
        return open_tokenizer(str(weights.origin))
    raise DataError(
        "there is no tokenizer in the folder of the weights",
        where=str(weights.origin),
        hint=_NAME_ONE,
    )


@torch.inference_mode()
def generate(model: Decoder, prompt: Prompt, *, vocab_size: int, sampling: Sampling) -> list[int]:
    """Tokens after the prompt. There is no KV cache: each token costs a full forward pass."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt.tokens)
    for _ in range(sampling.num_tokens):
        seen_1S = torch.tensor([tokens[-model.spec.max_positions :]], device=device)
        positions_1S = torch.arange(seen_1S.shape[1], device=device)[None]
        logits_V = model(seen_1S, positions_BS=positions_1S)[0, -1, :vocab_size]
        token = draw(logits_V.float().cpu(), sampling, generator)
        if token in prompt.stop_ids:
            break
        tokens.append(token)
    return tokens[len(prompt.tokens) :]


def draw(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token."""
    if bool(torch.isnan(logits_V).any()):
        raise CheckpointError(
            "the model's logits are NaN: its weights are not finite",
            where="sample",
            hint="use an older checkpoint",
        )
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    if sampling.top_k is not None and sampling.top_k < len(logits_V):
        weakest = logits_V.topk(sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < weakest, -torch.inf)
    probabilities_V = torch.softmax(logits_V / sampling.temperature, dim=-1)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))


def limit_threads(weights: Weights) -> None:
    """Use one thread for a small model: a single row is too little work to split."""
    if num_parameters(weights.model) < SMALL_MODEL_PARAMETERS:
        torch.set_num_threads(1)


def describe_origin(weights: Weights, *, without_adapter: bool = False) -> str:
    """Path and step of the weights, to print."""
    step = f" (step {weights.step})" if weights.step is not None else ""
    start = weights.run.checkpoint.start_from if weights.run is not None else None
    return f"{start}, the base of {weights.origin}" if without_adapter else f"{weights.origin}{step}"
