"""Small valid run files that tests change."""

DENSE = """\
name: tiny
model:
  vocab_size: 512
  num_layers: 8
  width: 64
  max_positions: 256
  attention: {num_heads: 8, num_kv_heads: 4, head_width: 8}
  mlp: {width: 128}
  rope: {theta: 10000}
schedule:
  num_steps: 100
data:
  synthetic: {}
  sequence_length: 128
  batch_sequences: 16
"""

MOE = DENSE.replace(
    "  rope:",
    "  moe: {num_experts: 8, top_k: 2, width: 96, shared_width: 64, first_dense_layers: 1}\n  rope:",
)

LATENT = DENSE.replace(
    "{num_heads: 8, num_kv_heads: 4, head_width: 8}",
    "{num_heads: 8, num_kv_heads: 8, head_width: 12,\n"
    "    latent: {kv_rank: 16, nope_width: 8, rope_width: 4, value_width: 8}}",
)

GOOD = {"dense": DENSE, "moe": MOE, "latent": LATENT}
