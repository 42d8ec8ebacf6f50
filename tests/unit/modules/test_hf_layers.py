"""Decoders that a pipeline cannot split by the parts that they publish."""

import pytest
import torch
from tests.support.user_modules import decoder, token_batch, token_loss
from torch.nn.functional import cross_entropy

from meshwright.errors import DataError, MeshwrightError
from meshwright.modules.chain import Chain, require_chain, run_parts
from meshwright.modules.hf_layers import as_logits, replay_calls

BATCH = token_batch(0)


def untied(family: str = "Olmo2", **changes):
    return decoder(family, tie_word_embeddings=False, **changes).double()


def split(model, loss=token_loss):
    chain = Chain(model)
    replay_calls(model, chain.parts().items(), chain.inputs(BATCH))
    return require_chain(chain, as_logits(loss), BATCH)


def test_parts_in_the_order_of_forward():
    names = list(Chain(untied()).parts())
    assert names == ["model.embed_tokens", *(f"model.layers.{i}" for i in range(4)), "model.norm", "lm_head"]


def test_parts_give_what_the_model_gives():
    """Windows and two rotary tables among what its layers are given."""
    model = untied(
        "Gemma3", head_dim=4, sliding_window=4, layer_types=["sliding_attention"] * 2 + ["full_attention"] * 2
    )
    expected = model(BATCH[0]).logits
    split(model)
    parts = list(Chain(model).parts().values())
    assert torch.equal(run_parts(parts, BATCH[0]), expected)
    assert torch.equal(run_parts(parts, BATCH[0][:3]), expected[:3])
    assert torch.equal(model(BATCH[0]).logits, expected)
    with pytest.raises(DataError, match="a sequence of 8 tokens; the first one had 12"):
        run_parts(parts, BATCH[0][:, :8])


def labelled_loss(model, batch):
    return model(input_ids=batch[0], labels=batch[0]).loss, 1


def masked_loss(model, batch):
    logits = model(input_ids=batch[0], attention_mask=torch.ones_like(batch[0])).logits
    return cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


def looking_at_tokens():
    """A decoder that hands its layers something about the tokens."""
    model = untied()
    layers = model.model.layers
    state = {}
    model.model.embed_tokens.register_forward_pre_hook(
        lambda _, args: state.update(mean=args[0].sum().double())
    )
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "state": state["mean"] * args[0][0, 0, 0].detach()}),
            with_kwargs=True,
        )
    return model


REFUSED = {
    "tied": (
        lambda: decoder("Olmo2", tie_word_embeddings=True).double(),
        token_loss,
        "is in model.embed_tokens and lm_head",
    ),
    "scaled logits": (
        lambda: untied("Cohere", logit_scale=0.1),
        token_loss,
        "its forward does something else between them",
    ),
    "cache": (lambda: untied(use_cache=True), token_loss, "gets a DynamicCache as past_key_values"),
    "labels": (untied, labelled_loss, "more than tokens (labels)"),
    "mask": (untied, masked_loss, "more than tokens (attention_mask)"),
    "state": (looking_at_tokens, token_loss, "arguments that depend on the tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_reason(case):
    build, loss, fact = REFUSED[case]
    with pytest.raises(MeshwrightError) as caught:
        split(build(), loss)
    assert fact in caught.value.fact and caught.value.where and caught.value.hint
