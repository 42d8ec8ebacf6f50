"""Reads keys of a Hugging Face `config.json`, and refuses those that nothing has read.

Keys that only concern generation, storage or other libraries are listed in `INERT_KEYS`.
"""

import difflib
import json
from collections.abc import Mapping
from typing import Any

from meshwright.errors import SpecError

Config = Mapping[str, Any]

# Nothing here changes what the trained network computes.
_INERT = """
    _attn_implementation _name_or_path architectures auto_map bos_token_id chunk_size_feed_forward
    decoder_start_token_id dtype eos_token_id experts_implementation id2label is_decoder
    is_encoder_decoder keys_to_ignore_at_inference label2id max_length model_type
    num_mtp_layers num_nextn_predict_layers output_attentions output_hidden_states
    output_router_logits pad_token_id pretraining_tp problem_type quantization_config return_dict
    sep_token_id seq_aux summary_activation summary_first_dropout summary_proj_to_labels
    summary_type summary_use_proj task_specific_params tokenizer_class torch_dtype
    torchscript transformers_version unsloth_fixed unsloth_version use_cache use_mrope ep_size
    n_ctx reorder_and_upcast_attn transformers.js_config gradient_checkpointing tie_encoder_decoder
    cross_attention_hidden_size prefix finetuning_task
"""
INERT_KEYS = frozenset(_INERT.split())


class ConfigReader:
    """Reads keys of one config and records them; other keys are then refused unless inert."""

    def __init__(self, config: Config, where: str) -> None:
        self.config = config
        self.where = where
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; the default where it is absent or null."""
        self.seen.add(key)
        value = self.config.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """The value of a key that must be there."""
        value = self.get(key)
        if value is None:
            raise SpecError(f"{key} is missing", where=self.where, hint=f"add {key} to the config")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse a key that changes the computation and has another value than the allowed ones."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            shown = " or ".join(json.dumps(each) for each in allowed)
            raise SpecError(
                f"{key}={json.dumps(value)} is not supported",
                where=self.where,
                hint=f"the decoder supports {key}={shown}; setting it changes the model",
            )

    def refuse_the_rest(self) -> None:
        """Refuse keys that were not read and are not inert."""
        unknown = [k for k, v in self.config.items() if v and k not in self.seen and k not in INERT_KEYS]
        if not unknown:
            return
        near = difflib.get_close_matches(unknown[0], self.seen, n=1)
        hint = (
            f"did you mean {near[0]}?" if near else "remove it if it does not change what the model computes"
        )
        shown = ", ".join(f"{key}={json.dumps(self.config[key])[:60]}" for key in unknown[:5])
        raise SpecError(f"unknown in this model type: {shown}", where=self.where, hint=hint)
