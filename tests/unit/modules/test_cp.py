"""Whose attention, and which losses, cannot be computed over several ranks."""

import pytest
import torch
from tests.support.equivalence import this_world
from tests.support.module_training import (
    fit_spec,
    parallel,
)
from tests.support.user_modules import decoder, sequential, token_batch, token_loss
from torch.nn.functional import cross_entropy

from meshwright.errors import MeshwrightError, SpecError
from meshwright.mesh import build_mesh
from meshwright.modules.build_training import build_module_training
from meshwright.modules.cp import _interface, require_interface


def refusal(model) -> str:
    with pytest.raises(SpecError) as caught:
        require_interface(model, 2)
    assert caught.value.where == "parallel.cp" and caught.value.hint
    return caught.value.fact


def test_attention_that_is_not_called_by_name():
    assert "Sequential does not call attention through the attention interface" in refusal(sequential())
    # Caps its logits, so the library itself chooses eager.
    assert "uses eager attention" in refusal(decoder("Gemma2", head_dim=4))
    assert "has attention_dropout=0.5" in refusal(decoder("Olmo2", attention_dropout=0.5))
    require_interface(decoder("Olmo2"), 2)


UNKNOWN = {"softcap": 30.0, "s_aux": torch.ones(4), "dropout": 0.1, "is_causal": False}


@pytest.mark.parametrize("name", UNKNOWN)
def test_attention_that_ranks_cannot_share(name):
    attention, q_BHSK = _interface(torch.nn.Identity()), torch.ones(1, 4, 8, 4)
    with pytest.raises(
        MeshwrightError, match=r"Linear .*, which attention over several ranks does not support"
    ):
        attention(torch.nn.Linear(1, 1), q_BHSK, q_BHSK, q_BHSK, None, **{name: UNKNOWN[name]})


def test_encoder_and_decoder():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 8, "d_ff": 8, "d_kv": 4, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    assert "has an encoder and a decoder" in refusal(T5ForConditionalGeneration(T5Config(**sizes)))


def shifted_loss(model, batch):
    """As libraries have it: the target is the next token of the part that lies here."""
    logits, tokens = model(input_ids=batch[0]).logits[:, :-1], batch[0][:, 1:]
    return cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum"), tokens.numel()


def masked_loss(model, batch):
    logits = model(input_ids=batch[0], attention_mask=torch.ones_like(batch[0])).logits
    return logits.sum(), batch[0].numel()


def _facts() -> list[str]:
    uneven = tuple(part[:2, :10] for part in token_batch(0))
    cases = {
        "shifted": (decoder("Olmo2"), shifted_loss, token_batch(0)),
        "masked": (decoder("Olmo2"), masked_loss, token_batch(0)),
        "uneven": (decoder("Olmo2"), token_loss, uneven),
        "two lengths": (decoder("Olmo2"), token_loss, (token_batch(0)[0], token_batch(0)[1][:, :8])),
    }
    spec = fit_spec(parallel=parallel(cp=2))
    mesh = build_mesh(spec.parallel, this_world())
    facts = []
    for model, loss, batch in cases.values():
        with pytest.raises(MeshwrightError) as caught:
            build_module_training(model, loss, spec, mesh, batch)
        facts.append(f"{caught.value.where}: {caught.value.fact}")
    return facts


def test_what_the_first_batch_shows(ranks):
    shifted, masked, uneven, lengths = ranks.run(_facts, 2)[0]
    assert shifted.startswith("loss: the loss of a batch is") and "not a sum over positions" in shifted
    assert "attention_mask is set" in masked
    assert "a sequence of 10 tokens does not divide into 2 x cp = 4" in uneven
    assert "a batch has shapes [(8, 12), (8, 8)]" in lengths
