"""Each rule with a run that keeps it and a run that breaks it; the texts are golden."""

import inspect

import pytest
from tests.support.golden_files import assert_golden
from tests.support.run_files import VALID

from meshwright.errors import SpecErrors
from meshwright.spec.check import RULES, check, require_valid
from meshwright.spec.conditions import CONDITIONS
from meshwright.spec.text import parse_run

PP4 = ["parallel.pp=4"]
EP2 = ["parallel.ep=2", "parallel.dp_shard=2", "parallel.zero=1"]
AB = "data.blend=[{path: a, weight: 1}, {path: b, weight: 1}]"
PAIRS = ["data.synthetic=null", "data.path=pairs", "data.packing=whole", "preference={}"]
SHARDED = ["parallel.dp_shard=2", "parallel.zero=3"]
# rule -> (base run, overrides that keep the rule, lists of overrides that each break it)
CASES: dict[str, tuple[str, list[str], list[list[str]]]] = {
    "rope_needs_rotary_positions": (
        "dense",
        ["model.positions=learned", "model.rope=null"],
        [["model.rope=null"], ["model.positions=learned"]],
    ),
    "rotary_width_is_even": (
        "latent",
        [],
        [
            [
                "model.attention.latent.rope_width=5",
                "model.attention.head_width=13",
            ]
        ],
    ),
    "kv_heads_divide_heads": (
        "dense",
        ["model.attention.num_kv_heads=1"],
        [["model.attention.num_kv_heads=3"], ["model.attention.num_kv_heads=16"]],
    ),
    "latent_widths_add_up": ("latent", [], [["model.attention.head_width=16"]]),
    "latent_attention_is_rotary_and_full": (
        "latent",
        [],
        [
            ["model.attention.num_kv_heads=4"],
            ["model.positions=learned", "model.rope=null"],
            ["model.attention.qk_norm=true"],
        ],
    ),
    "sequence_fits_positions": ("dense", ["data.sequence_length=256"], [["data.sequence_length=257"]]),
    "generated_bytes_fit_vocabulary": ("dense", ["model.vocab_size=257"], [["model.vocab_size=256"]]),
    "top_k_experts_exist": ("moe", ["model.moe.top_k=8"], [["model.moe.top_k=9"]]),
    "expert_groups_are_even": (
        "moe",
        ["model.moe.num_groups=4", "model.moe.top_groups=2", "model.moe.group_score=top2_sum"],
        [
            ["model.moe.num_groups=3"],
            ["model.moe.num_groups=2", "model.moe.top_groups=3"],
            ["model.moe.num_groups=8"],
            ["model.moe.num_groups=8", "model.moe.top_groups=4", "model.moe.group_score=top2_sum"],
        ],
    ),
    "dense_layers_leave_experts": (
        "moe",
        ["model.moe.first_dense_layers=7"],
        [["model.moe.first_dense_layers=8"]],
    ),
    "capacity_admits_a_token": (
        "moe",
        ["model.moe.capacity_factor=1"],
        [["model.moe.capacity_factor=0.01"]],
    ),
    "balance_needs_its_bias": (
        "moe",
        ["model.moe.balance_bias_rate=1e-3", "model.moe.has_balance_bias=true"],
        [["model.moe.balance_bias_rate=1e-3"], ["model.moe.aux_loss=-1"]],
    ),
    "adapter_targets_exist": (
        "dense",
        ["adapter={rank: 4, alpha: 8, targets: [q_proj, 'blocks.[0-3].mlp.*']}"],
        [
            ["adapter={rank: 4, alpha: 8, targets: [qproj]}"],
            ["adapter={rank: 4, alpha: 8, targets: [heads]}"],
            ["adapter={rank: 4, alpha: 8, targets: []}"],
        ],
    ),
    "adapter_ranks_exist": (
        "dense",
        ["adapter={rank: 4, alpha: 8, ranks: [{pattern: down_proj, rank: 8}]}"],
        [["adapter={rank: 4, alpha: 8, targets: [query], ranks: [{pattern: down_proj, rank: 8}]}"]],
    ),
    "adapter_ranks_are_low": (
        "dense",
        ["adapter={rank: 31, alpha: 8}"],
        [["adapter={rank: 32, alpha: 8}"]],
    ),
    "adapter_kind_fits_targets": (
        "moe",
        ["adapter={rank: 4, alpha: 8, kind: dora, dropout: 0.1}"],
        [
            ["adapter={rank: 4, alpha: 8, kind: dora, targets: [query, embedding, lm_head]}"],
        ],
    ),
    "adapter_tokens_exist": (
        "dense",
        ["adapter={rank: 4, alpha: 8, tokens: [255, 0]}"],
        [
            ["adapter={rank: 4, alpha: 8, tokens: [1000000]}"],
            ["adapter={rank: 4, alpha: 8, tokens: [1, 2, 1]}"],
        ],
    ),
    "adapter_tokens_are_trained_once": (
        "dense",
        ["adapter={rank: 4, alpha: 8, tokens: [5]}", "train_only=['*norm*']"],
        [
            ["adapter={rank: 4, alpha: 8, tokens: [5], targets: [query, embed_tokens]}"],
            ["adapter={rank: 4, alpha: 8, tokens: [5]}", "train_only=[embedding.tokens.weight]"],
        ],
    ),
    "new_tokens_are_trained": (
        "dense",
        ["checkpoint={start_from: folder, new_tokens: 2}"],
        [
            ["checkpoint.new_tokens=2"],
            ["checkpoint={start_from: folder, new_tokens: 1000000}"],
            ["checkpoint={start_from: folder, new_tokens: 2}", "adapter={rank: 4, alpha: 8}"],
            [
                "checkpoint={start_from: folder, new_tokens: 1}",
                "adapter={rank: 4, alpha: 8}",
                "train_only=[head.weight]",
            ],
        ],
    ),
    "adapter_dropout_has_effect": (
        "dense",
        ["adapter={rank: 4, alpha: 8, dropout: 0.1, targets: [query, embedding]}", "parallel.tp=2"],
        [
            ["adapter={rank: 4, alpha: 8, dropout: 1}"],
            ["adapter={rank: 4, alpha: 8, dropout: 0.1, targets: [embedding]}"],
        ],
    ),
    "bf16_base_computes_in_bf16": (
        "dense",
        ["adapter={rank: 4, alpha: 8, base: bf16}", "precision.compute=bf16"],
        [["adapter={rank: 4, alpha: 8, base: bf16}"]],
    ),
    "nf4_divides_widths": (
        "dense",
        ["adapter={rank: 4, alpha: 8, base: nf4}"],
        [
            ["adapter={rank: 4, alpha: 8, base: nf4}", "model.mlp.width=96"],
            ["adapter={rank: 4, alpha: 8, base: nf4}", "parallel.tp=2"],
            [
                "adapter={rank: 4, alpha: 8, base: nf4}",
                "model.moe={num_experts: 4, top_k: 1, width: 96}",
            ],
        ],
    ),
    "fp8_base_computes_in_bf16": (
        "dense",
        ["adapter={rank: 4, alpha: 8, base: fp8}", "precision.compute=bf16"],
        [["adapter={rank: 4, alpha: 8, base: fp8}"]],
    ),
    "fp8_base_divides_widths": (
        "dense",
        ["adapter={rank: 4, alpha: 8, base: fp8}", "precision.compute=bf16"],
        [
            ["adapter={rank: 4, alpha: 8, base: fp8}", "model.mlp.width=72"],
            ["adapter={rank: 4, alpha: 8, base: fp8}", "model.mlp.width=80", "parallel.tp=2"],
            [
                "adapter={rank: 4, alpha: 8, base: fp8}",
                "model.moe={num_experts: 4, top_k: 1, width: 72}",
            ],
        ],
    ),
    "packed_base_fits_other_settings": (
        "dense",
        ["adapter={rank: 4, alpha: 8, base: nf4}", "train_only=['*norm*']"],
        [
            ["adapter={rank: 4, alpha: 8, base: nf4}", "train_only=['blocks.0.*']"],
            ["adapter={rank: 4, alpha: 8, base: fp8}", "precision.fp8={recipe: current}"],
            ["adapter={rank: 4, alpha: 8, base: fp8}", "memory.offload=[parameters]"],
        ],
    ),
    "trained_patterns_exist": (
        "dense",
        ["train_only=['*norm*', head.weight]"],
        [["train_only=[heads.weight]"], ["adapter={rank: 4, alpha: 8}", "train_only=['*.lora_A']"]],
    ),
    "tp_divides_heads": ("dense", ["parallel.tp=4"], [["parallel.tp=8"], ["parallel.tp=16"]]),
    "tp_divides_mlp": (
        "moe",
        ["parallel.tp=4"],
        [["parallel.tp=4", "model.mlp.width=130"], ["parallel.tp=4", "model.moe.shared_width=66"]],
    ),
    "tp_divides_vocabulary": ("dense", ["parallel.tp=4"], [["parallel.tp=4", "model.vocab_size=513"]]),
    "sequence_is_sharded_evenly": (
        "dense",
        ["parallel.cp=4", "parallel.tp=2"],
        [
            ["parallel.tp=4", "data.sequence_length=126"],
            ["parallel.cp=4", "data.sequence_length=124"],
        ],
    ),
    "cp_divides_heads": (
        "dense",
        ["parallel.cp=4", "parallel.cp_kind=ulysses"],
        [
            ["parallel.cp=8", "parallel.cp_kind=ulysses"],
            ["parallel.cp=4", "parallel.tp=2", "parallel.cp_kind=ulysses"],
            ["parallel.cp=8", "parallel.tp=2", "parallel.cp_kind=hierarchical", "parallel.cp_inner=4"],
        ],
    ),
    "hierarchical_has_two_levels": (
        "dense",
        ["parallel.cp=4", "parallel.cp_kind=hierarchical", "parallel.cp_inner=2"],
        [
            ["parallel.cp=4", "parallel.cp_kind=hierarchical"],
            ["parallel.cp=2", "parallel.cp_kind=hierarchical", "parallel.cp_inner=2"],
        ],
    ),
    "attention_dropout_needs_ulysses": (
        "dense",
        ["model.attention.dropout=0.1", "parallel.cp=2", "parallel.cp_kind=ulysses"],
        [["model.attention.dropout=0.1", "parallel.cp=2"]],
    ),
    "zero_needs_sharding_ranks": (
        "dense",
        ["parallel.dp_shard=2", "parallel.zero=3"],
        [["parallel.zero=1"], ["parallel.dp_shard=2"]],
    ),
    "ep_divides_experts": (
        "moe",
        ["parallel.ep=4", "parallel.dp_shard=4", "parallel.zero=1"],
        [
            ["parallel.ep=4", "parallel.dp_shard=2", "parallel.zero=1"],
            ["parallel.ep=16", "parallel.dp_shard=16", "parallel.zero=1"],
            ["parallel.ep=2", "model.moe=null", "parallel.cp=2"],
        ],
    ),
    "etp_is_all_or_nothing": (
        "moe",
        ["parallel.tp=4", "parallel.etp=4"],
        [["parallel.tp=4", "parallel.etp=2"], ["parallel.tp=4", "parallel.etp=4", "model.moe.width=98"]],
    ),
    "overlapped_experts_are_shared": (
        "moe",
        [*EP2, "parallel.ep_overlap=shared", "model.moe.shared_width=96"],
        [[*EP2, "parallel.ep_overlap=shared", "model.moe.shared_width=0"]],
    ),
    "stages_have_layers": (
        "dense",
        [*PP4, "parallel.virtual_stages=2", "parallel.schedule=interleaved_1f1b"],
        [[*PP4, "parallel.virtual_stages=3", "parallel.schedule=looped_bfs"]],
    ),
    "schedule_fits_virtual_stages": (
        "dense",
        [*PP4, "parallel.virtual_stages=2", "parallel.schedule=zbv"],
        [[*PP4, "parallel.virtual_stages=2"], [*PP4, "parallel.schedule=dualpipev"]],
    ),
    "microbatches_fill_schedule": (
        "dense",
        [*PP4, "parallel.schedule=interleaved_1f1b", "data.batch_sequences=3"],
        [
            [*PP4, "data.batch_sequences=3"],
            [*PP4, "data.batch_ramp=[{before_step: 9, batch_sequences: 2}]"],
            [*PP4, "parallel.schedule=dualpipev", "parallel.virtual_stages=2", "data.batch_sequences=7"],
            [*PP4, "parallel.schedule=interleaved_1f1b", "data.batch_sequences=9"],
        ],
    ),
    "split_backward_runs_once": (
        "dense",
        [*PP4, "memory.recompute=full", "compile=true"],
        [
            [*PP4, "parallel.schedule=interleaved_zero_bubble", "memory.recompute=full"],
            [*PP4, "parallel.schedule=interleaved_zero_bubble", "compile=true"],
        ],
    ),
    "split_backward_reduces_last": (
        "dense",
        [*PP4, "parallel.schedule=interleaved_zero_bubble", *SHARDED, "parallel.grad_reduce=last_microbatch"],
        [
            [*PP4, "parallel.schedule=interleaved_zero_bubble", *SHARDED],
            [*PP4, "parallel.schedule=zbv", "parallel.virtual_stages=2", *SHARDED],
        ],
    ),
    "batch_is_split_evenly": (
        "dense",
        ["parallel.dp_replicate=4", "data.microbatch_sequences=2"],
        [
            ["parallel.dp_replicate=4", "data.microbatch_sequences=3"],
            ["parallel.dp_replicate=32"],
            ["parallel.dp_replicate=4", "data.batch_ramp=[{before_step: 9, batch_sequences: 6}]"],
        ],
    ),
    "offloaded_states_exist": (
        "dense",
        ["optim.kind=sgd", "memory.offload=optimizer"],
        [["optim.kind=sgd", "optim.beta1=0", "memory.offload=optimizer"]],
    ),
    "offloaded_parameters_fit_zero": (
        "dense",
        ["parallel.dp_shard=2", "parallel.zero=3", "memory.offload=parameters,optimizer"],
        [
            ["parallel.dp_shard=2", "parallel.zero=3", "memory.offload=parameters"],
            [*PP4, "parallel.dp_shard=2", "parallel.zero=3", "memory.offload=parameters,optimizer"],
            ["parallel.dp_shard=2", "parallel.zero=1", "memory.offload=parameters"],
            ["optim.ema_decay=0.99", "memory.offload=parameters"],
        ],
    ),
    "offloaded_embedding_is_only_read": (
        "dense",
        ["adapter.rank=2", "adapter.alpha=4", "memory.offload=embedding"],
        [
            ["memory.offload=embedding"],
            ["adapter.rank=2", "adapter.alpha=4", "memory.offload=embedding", "model.tied_head=true"],
            ["adapter.rank=2", "adapter.alpha=4", "memory.offload=embedding", "parallel.tp=2"],
            [
                "adapter.rank=2",
                "adapter.alpha=4",
                "memory.offload=embedding",
                "parallel.dp_shard=2",
                "parallel.zero=3",
            ],
        ],
    ),
    "saved_tensors_are_used_once": (
        "dense",
        [*PP4, "memory.offload=activations"],
        [
            [*PP4, "parallel.schedule=interleaved_zero_bubble", "memory.offload=activations"],
            [*PP4, "parallel.schedule=interleaved_zero_bubble", "memory.offload=parameters"],
            [
                *PP4,
                "parallel.schedule=interleaved_zero_bubble",
                "parallel.tp=2",
                "memory.regather_tp_inputs=true",
            ],
        ],
    ),
    "regather_frees_saved_inputs": (
        "dense",
        ["parallel.tp=2", "memory.regather_tp_inputs=true"],
        [
            ["parallel.tp=2", "memory.regather_tp_inputs=true", "memory.recompute=full"],
            ["parallel.tp=2", "memory.regather_tp_inputs=true", "compile=true"],
        ],
    ),
    "one_source_of_data": (
        "dense",
        ["data.path=some/folder", "data.synthetic=null"],
        [
            ["data.path=some/folder"],
            ["data.synthetic=null"],
            ["data.blend=[{path: a, weight: 0.7}, {path: b, weight: 0.3}]"],
        ],
    ),
    "blend_is_valid": (
        "dense",
        [
            "data.synthetic=null",
            "data.blend=[{path: a, weight: 0.7, repeat: 4}, {path: b, weight: 0.3, repeat: false}]",
        ],
        [
            ["data.blend=[{path: a, weight: 1}]"],
            ["data.blend=[{path: a, weight: 1}, {weight: 1}]"],
            ["data.blend=[{path: a, weight: 1}, {path: b, synthetic: {}, weight: 1}]"],
            ["data.blend=[{path: a, weight: 0.12345678}, {path: b, weight: 0.87654322}]"],
            ["data.blend=[{path: a, weight: 1}, {path: b, weight: 1}]", "data.max_epochs=2"],
        ],
    ),
    "curriculum_is_in_order": (
        "dense",
        [
            "data.synthetic=null",
            AB,
            "data.curriculum=[{before_step: 2, weights: [1, 0]}, {before_step: 5, weights: [2, 1]}]",
        ],
        [
            [AB, "data.curriculum=[{before_step: 2, weights: [1, 0]}, {before_step: 2, weights: [2, 1]}]"],
            [AB, "data.curriculum=[{before_step: 100, weights: [1, 0]}]"],
            [AB, "data.curriculum=[{before_step: 2, weights: [1]}]"],
            [AB, "data.curriculum=[{before_step: 2, weights: [0, 0]}]"],
        ],
    ),
    "whole_documents_are_separate": (
        "dense",
        ["data.packing=whole"],
        [["data.packing=whole", "data.documents=joined"]],
    ),
    "batch_ramp_is_in_order": (
        "dense",
        ["data.batch_ramp=[{before_step: 1, batch_sequences: 4}]"],
        [
            ["data.batch_ramp=[{before_step: 2, batch_sequences: 4}, {before_step: 2, batch_sequences: 2}]"],
            ["data.batch_ramp=[{before_step: 100, batch_sequences: 4}]"],
            ["data.batch_ramp=[{before_step: 1, batch_sequences: 16}]"],
        ],
    ),
    "one_kind_of_holdout": (
        "dense",
        ["data.holdout.share=0.1"],
        [
            ["data.holdout.share=0.1", "data.holdout_sequences=4"],
            [*PAIRS, "data.holdout.share=0.1"],
        ],
    ),
    "data_on_device_is_plain": (
        "dense",
        ["data.on_device_bytes=1GiB"],
        [
            ["data.on_device_bytes=1GiB", "data.max_bad_samples=2"],
            [*PAIRS, "data.on_device_bytes=1GiB"],
        ],
    ),
    "evaluation_has_data": (
        "dense",
        ["observe.evaluate.every_steps=5", "data.holdout_sequences=4"],
        [["observe.evaluate.every_steps=5"]],
    ),
    "pairs_are_packed_whole": (
        "dense",
        [*PAIRS],
        [
            ["preference={}", "data.packing=whole"],
            [*PAIRS, "data.packing=cut"],
            [*PAIRS, "data.max_bad_samples=1"],
        ],
    ),
    "preference_settings_have_effect": (
        "dense",
        [*PAIRS, "preference.label_smoothing=0.1"],
        [
            [*PAIRS, "preference.loss=ipo", "preference.label_smoothing=0.1"],
            [*PAIRS, "preference.label_smoothing=0.5"],
            [*PAIRS, "preference.margin=1"],
            [*PAIRS, "preference.loss=simpo", "preference.reference=dataset"],
        ],
    ),
    "settings_work_with_pairs": (
        "dense",
        [*PAIRS],
        [[*PAIRS, "observe.noise_scale.every_steps=5"], [*PAIRS, "cuda_graphs=true"]],
    ),
    "loss_scale_needs_fp16": (
        "dense",
        ["precision.compute=fp16", "precision.loss_scale={}"],
        [["precision.compute=fp16"], ["precision.loss_scale={}"]],
    ),
    "loss_scale_moves_the_right_way": (
        "dense",
        ["precision.compute=fp16", "precision.loss_scale.growth_factor=1.5"],
        [
            ["precision.compute=fp16", "precision.loss_scale.growth_factor=1"],
            ["precision.compute=fp16", "precision.loss_scale.backoff_factor=1"],
        ],
    ),
    "bf16_weights_compute_in_bf16": (
        "dense",
        ["precision.compute=bf16", "precision.weights=bf16_exact", "precision.gradients=bf16"],
        [["precision.weights=bf16_exact"], ["precision.weights=bf16_stochastic", "precision.compute=fp64"]],
    ),
    "tf32_needs_cuda": (
        "dense",
        ["precision.compute=tf32", "device=cuda"],
        [["precision.compute=tf32", "device=cpu"]],
    ),
    "fp8_needs_bf16": (
        "dense",
        ["precision.compute=bf16", "precision.fp8=current"],
        [["precision.compute=fp32", "precision.fp8=current"]],
    ),
    "fp8_has_linears": (
        "dense",
        ["precision.compute=bf16", "precision.fp8=mxfp8"],
        [
            ["precision.compute=bf16", "precision.fp8.bf16_layers_each_end=4"],
            ["precision.compute=bf16", "precision.fp8=blockwise"],
        ],
    ),
    "fp8_experts_have_kernels": (
        "moe",
        ["precision.compute=bf16", "precision.fp8.experts=true"],
        [
            ["precision.compute=bf16", "precision.fp8.experts=true", "precision.fp8.recipe=delayed"],
            ["precision.compute=bf16", "precision.fp8.experts=true", "model.moe.width=90"],
            ["precision.compute=bf16", "precision.fp8.experts=true", "model.moe.first_dense_layers=7"],
        ],
    ),
    "fp8_divides_tokens": (
        "dense",
        ["precision.compute=bf16", "precision.fp8=mxfp8"],
        [["precision.compute=bf16", "precision.fp8=current", "data.sequence_length=9"]],
    ),
    "delayed_scaling_needs_weights_on_device": (
        "dense",
        ["precision.compute=bf16", "precision.fp8=delayed"],
        [["precision.compute=bf16", "precision.fp8=delayed", "memory.offload=[parameters]"]],
    ),
    "cached_fp8_weights_are_unsharded": (
        "dense",
        ["precision.compute=bf16", "precision.fp8.cast_weights=per_step"],
        [
            ["precision.compute=bf16", "precision.fp8.cast_weights=per_step", "parallel.zero=3"],
            ["precision.compute=bf16", "precision.fp8.cast_weights=per_step", "memory.offload=[parameters]"],
        ],
    ),
    "cuda_graphs_hold_a_microbatch": (
        "dense",
        ["device=cuda", "cuda_graphs=true", "parallel.dp_shard=2", "parallel.zero=1"],
        [
            ["device=cuda", "cuda_graphs=true", "parallel.tp=2"],
            ["device=cuda", "cuda_graphs=true", "parallel.dp_shard=2", "parallel.zero=2"],
            ["device=cpu", "cuda_graphs=true"],
            ["device=cuda", "cuda_graphs=true", "model.dropout=0.1"],
            ["device=cuda", "cuda_graphs=true", "observe.histograms.every_steps=5"],
            ["device=cuda", "cuda_graphs=true", "adapter={rank: 4, alpha: 8, base: nf4}"],
        ],
    ),
    "noise_scale_compares_parts": (
        "dense",
        ["observe.noise_scale.every_steps=5"],
        [["observe.noise_scale.every_steps=5", "data.microbatch_sequences=16"]],
    ),
    "schedule_fits_steps": (
        "dense",
        ["schedule.warmup_steps=60", "schedule.kind=wsd", "schedule.decay_steps=40"],
        [
            ["schedule.warmup_steps=101"],
            ["schedule.warmup_steps=61", "schedule.kind=wsd", "schedule.decay_steps=40"],
        ],
    ),
    "wsd_has_a_decay": (
        "dense",
        ["schedule.kind=wsd", "schedule.decay_steps=10"],
        [["schedule.kind=wsd"]],
    ),
    "decays_are_valid": (
        "dense",
        ["optim.ema_decay=0.999"],
        [
            ["optim.beta1=1"],
            ["optim.beta2=1"],
            ["optim.kind=muon", "optim.momentum=1"],
            ["optim.ema_decay=1"],
            ["optim.weight_decay=-0.1"],
        ],
    ),
    "groups_have_parameters": (
        "dense",
        ["optim.groups=[{pattern: '*', lr_factor: 0.5}, {pattern: '*norm*', weight_decay: 0.1}]"],
        [
            ["optim.groups=[{pattern: '*.bias', lr_factor: 0.5}]"],
            ["optim.groups=[{pattern: 'head.*', lr_factor: 2}, {pattern: '*', lr_factor: 0.5}]"],
            ["optim.groups=[{pattern: '*norm*'}]"],
            ["optim.groups=[{pattern: '*norm*', weight_decay: -1}]"],
        ],
    ),
    "rollback_has_checkpoints": (
        "dense",
        ["resilience.bad_steps.action=rollback", "checkpoint.every_steps=2"],
        [["resilience.bad_steps.action=rollback"]],
    ),
    "elastic_ranks_can_change": (
        "dense",
        ["parallel.dp_replicate=4", "resilience.elastic.min_ranks=2"],
        [
            ["parallel.dp_replicate=4", "resilience.elastic.min_ranks=5"],
            [
                *("parallel.dp_replicate=4", "resilience.elastic.min_ranks=2"),
                "resilience.restart.max_restarts=0",
            ],
        ],
    ),
    "replay_is_deterministic": (
        "dense",
        ["resilience.replay.every_steps=2", "deterministic=true"],
        [
            ["resilience.replay.every_steps=2"],
            ["resilience.replay={}", "deterministic=true", "cuda_graphs=true"],
        ],
    ),
    "settings_have_effect": (
        "dense",
        ["optim.kind=sgd"],
        [
            ["parallel.cp_kind=ring"],
            ["parallel.cp=4", "parallel.cp_inner=2"],
            ["parallel.cp=4", "parallel.cp_kind=ring", "parallel.cp_stripes=2"],
            ["parallel.schedule=gpipe"],
            ["parallel.virtual_stages=2"],
            ["parallel.etp=2", "parallel.tp=2"],
            ["parallel.ep_overlap=halves"],
            ["parallel.grad_reduce=last_microbatch"],
            ["memory.regather_tp_inputs=true"],
            ["memory.recompute_every=2"],
            ["data.curriculum=[{before_step: 2, weights: [1, 0]}]"],
            ["memory.on_oom=halve_microbatch", "data.microbatch_sequences=1"],
            ["precision.compute=bf16", "precision.fp8.history_steps=4"],
            ["precision.compute=bf16", "precision.fp8.experts=true"],
            ["precision.compute=bf16", "precision.fp8.min_gradient_cosine=0.9"],
            ["optim.kind=sgd", "optim.beta2=0.99"],
            ["optim.kind=lars", "optim.eps=1e-6"],
            ["optim.momentum=0.9"],
            ["optim.kind=lamb", "optim.trust_coefficient=0.01"],
            ["precision.compute=bf16", "precision.gradients=bf16"],
            ["optim.kind=lamb", "optim.state=bf16"],
            ["optim.weight_decay=0", "optim.weight_decay_on=all"],
            ["resilience.step_timeout_seconds=60"],
            ["resilience.start_timeout_seconds=60"],
            ["resilience.evaluate_timeout_seconds=60"],
            ["resilience.save_timeout_seconds=60"],
            ["resilience.hang_factor=5"],
            ["resilience.straggler_factor=2"],
            ["resilience.compare_replicas_every_steps=5"],
            ["resilience.restart.max_restarts=0"],
            ["resilience.restart.max_cycles_without_progress=5"],
            ["resilience.restart.backoff_seconds=5"],
            ["resilience.restart.max_backoff_seconds=5"],
            ["parallel.dp_replicate=2", "resilience.restart.single_rank=true"],
            ["resilience.bad_steps.spike_factor=5"],
            ["resilience.bad_steps.loss_spike_factor=5"],
            ["resilience.bad_steps.max_in_a_row=2"],
            ["schedule.decay_steps=5"],
            ["schedule.kind=constant", "schedule.min_lr_ratio=0.2"],
            ["model.moe={num_experts: 4, top_k: 1, width: 8, top_groups: 2}"],
            ["model.moe={num_experts: 4, top_k: 1, width: 8, group_score: top2_sum}"],
            ["model.rope.scaling={kind: linear, factor: 2, original_positions: 64}"],
            ["model.rope.scaling={kind: linear, factor: 2, low_frequency_factor: 2}"],
            ["model.rope.scaling={kind: linear, factor: 2, high_frequency_factor: 2}"],
            ["model.rope.scaling={kind: llama3, factor: 2, beta_fast: 2}"],
            ["model.rope.scaling={kind: llama3, factor: 2, beta_slow: 2}"],
            ["model.rope.scaling={kind: llama3, factor: 2, mscale: 2}"],
            ["model.rope.scaling={kind: llama3, factor: 2, mscale_all_dims: 2}"],
        ],
    ),
    "checkpoints_have_an_interval": (
        "dense",
        ["checkpoint.every_steps=10", "checkpoint.asynchronous=false", "checkpoint.keep_every_steps=20"],
        [["checkpoint.asynchronous=false"], ["checkpoint.keep_every_epochs=1"]],
    ),
    "kept_steps_are_saved": (
        "dense",
        ["checkpoint.every_steps=10", "checkpoint.keep_every_steps=30"],
        [["checkpoint.every_steps=10", "checkpoint.keep_every_steps=25"]],
    ),
    "uploaded_steps_are_saved": (
        "dense",
        ["checkpoint.every_steps=10", "checkpoint.upload={destination: s3://a/b, interval_steps: 30}"],
        [
            ["checkpoint.every_steps=10", "checkpoint.upload={destination: s3://a/b, interval_steps: 25}"],
            ["checkpoint.upload={destination: s3://a/b, interval_steps: 25}"],
        ],
    ),
    "local_checkpoints_are_more_frequent": (
        "dense",
        ["checkpoint.every_steps=10", "checkpoint.local={save_every_steps: 5}"],
        [
            ["checkpoint.every_steps=10", "checkpoint.local={save_every_steps: 4}"],
            ["checkpoint.every_steps=10", "checkpoint.local={save_every_steps: 10}"],
            ["checkpoint.local={save_every_steps: 5}"],
        ],
    ),
    "best_checkpoints_are_evaluated": (
        "dense",
        [
            "checkpoint.every_steps=10",
            "checkpoint.keep_best=1",
            "observe.evaluate.every_steps=5",
            "data.holdout_sequences=4",
        ],
        [
            ["checkpoint.every_steps=10", "checkpoint.keep_best=1"],
            ["checkpoint.every_steps=10", "checkpoint.keep_best=1", "observe.evaluate.every_steps=4"],
        ],
    ),
    "kept_epochs_are_of_one_dataset": (
        "dense",
        ["checkpoint.every_steps=10", "checkpoint.keep_every_epochs=2"],
        [[AB, "data.synthetic=null", "checkpoint.every_steps=10", "checkpoint.keep_every_epochs=2"]],
    ),
    "nccl_settings_have_effect": (
        "dense",
        ["parallel.dp_replicate=2", "launch.nccl.algorithms=[ring]"],
        [
            ["launch.nccl.algorithms=[ring]"],
            ["parallel.dp_replicate=2", "device=cpu", "launch.nccl.high_priority_stream=true"],
        ],
    ),
    "gloo_settings_have_effect": (
        "dense",
        ["parallel.dp_replicate=2", "launch.gloo.interfaces=[eth0]"],
        [["launch.gloo.interfaces=[eth0]"]],
    ),
    "infiniband_settings_have_effect": (
        "dense",
        ["parallel.dp_replicate=2", "launch.nccl={hcas: [mlx5_0], ib_timeout: 22}"],
        [["parallel.dp_replicate=2", "launch.nccl={hcas: [mlx5_0], infiniband: false}"]],
    ),
    "cta_limits_are_in_order": (
        "dense",
        ["parallel.dp_replicate=2", "launch.nccl={min_ctas: 4, max_ctas: 8}"],
        [["parallel.dp_replicate=2", "launch.nccl={min_ctas: 9, max_ctas: 8}"]],
    ),
}
RULE_BY_NAME = {rule.__name__: rule for rule in RULES}


def test_every_rule_has_cases_and_a_text():
    assert list(RULE_BY_NAME) == list(CASES)
    assert all(inspect.getdoc(rule) for rule in RULES)


@pytest.mark.parametrize("name", CASES)
def test_a_good_run_passes_every_rule(name: str):
    base, good, _ = CASES[name]
    assert check(parse_run(VALID[base], good).run) == []


@pytest.mark.parametrize(
    ("name", "bad"), [(name, bad) for name, (_, _, all_bad) in CASES.items() for bad in all_bad], ids=str
)
def test_a_bad_run_breaks_the_rule(name: str, bad: list[str]):
    run = parse_run(VALID[CASES[name][0]], bad).run
    violations = list(RULE_BY_NAME[name](run))
    assert len(violations) == 1
    assert violations[0].where and violations[0].hint


def test_every_condition_is_broken_by_a_case():
    found = {
        violation.where
        for bad in CASES["settings_have_effect"][2]
        for violation in RULE_BY_NAME["settings_have_effect"](parse_run(VALID["dense"], bad).run)
    }
    assert found == {condition.key for condition in CONDITIONS}


def test_texts_of_broken_rules():
    lines: list[str] = []
    for name, (base, _, all_bad) in CASES.items():
        lines += [f"# {name}: {inspect.getdoc(RULE_BY_NAME[name])}"]
        for bad in all_bad:
            run = parse_run(VALID[base], bad).run
            lines += [f"$ {base} {' '.join(bad)}", *map(str, RULE_BY_NAME[name](run)), ""]
    assert_golden("errors/rules.txt", "\n".join(lines))


def test_all_violations_are_told_at_once():
    run = parse_run(VALID["dense"], ["parallel.tp=3", "schedule.warmup_steps=200", "data.synthetic=null"]).run
    with pytest.raises(SpecErrors) as caught:
        require_valid(run)
    assert {violation.where for violation in caught.value.violations} >= {
        "parallel.tp",
        "schedule.warmup_steps",
        "data",
    }


def test_a_valid_run_comes_back():
    run = parse_run(VALID["dense"]).run
    assert require_valid(run) is run
