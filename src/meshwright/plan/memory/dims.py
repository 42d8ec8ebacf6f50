"""The named dims that tensors of one block are products of, for one rank and one micro-batch.

    T   tokens on one rank of cp (B S / cp)   t   the same sharded over tp (sequence parallel)
    D   model width                           F   width of the MLP / tp         U   of the shared expert / tp
    HK  query heads x head width / tp         GK  key/value heads x head width / tp     H, G   heads / tp
    K   width of the rotary tables            B, S   sequences, positions       cp   ranks of cp
    E   experts   M   width of one expert     n   routed rows (t x top-k)       EDM  one expert matrix / ep
    Q, C, R   ranks of latent queries and keys, rotary width      HN, HP   heads x nope, value width / tp
    W   pairs of the largest masked attention call over cp      w   the same of one sequence

A monomial is written `T*D`; the generator (rehearse/block_table.py) finds which one a traced tensor is, the
planner evaluates it for many layouts at once.
"""

import math

import numpy as np

from meshwright.plan.workload.layouts import CP_KINDS, Floats, Layouts
from meshwright.spec.model import ModelSpec

MOST_BAND_ROWS = 2048
"""Queries of one attention call that reads a mask, over cp."""

Dims = dict[str, Floats]

TOKEN_MONOMIALS = (
    *("t*D", "T*D", "T*HK", "T*GK", "T*F", "T*U", "n*D", "n*M", "T*H", "T*K", "t", "T"),
    *("n", "t*E", "cp*T*GK", "t*Q", "t*C", "t*R", "T*Q", "T*C", "T*R", "T*HN", "T*HP", "T*G", "cp*T"),
)
PAIR_MONOMIALS = ("B*S*S", "S*S", "W", "w")
WEIGHT_MONOMIALS = (
    *("D*HK", "D*GK", "D*F", "D*U", "EDM", "D*E", "D*Q", "Q*HK", "D*C", "D*R", "C*HN", "C*HP", "D*HP", "D"),
)
MONOMIALS = (*TOKEN_MONOMIALS, *PAIR_MONOMIALS, *WEIGHT_MONOMIALS)


def dims_of(model: ModelSpec, sequence_length: int, at: Layouts) -> Dims:
    """Every dim of every layout; arrays of shape (N,)."""
    attention, moe, latent = model.attention, model.moe, model.attention.latent
    tp, one = at.tp.astype(np.float64), np.ones(len(at))
    tokens = at.microbatch_tokens(sequence_length)
    rows = tokens / tp
    found = {
        "T": tokens,
        "t": rows,
        "B": at.microbatch_sequences.astype(np.float64),
        "S": float(sequence_length) * one,
        "cp": at.cp.astype(np.float64),
        "D": model.width * one,
        "HK": attention.num_heads * attention.head_width / tp,
        "GK": attention.num_kv_heads * attention.head_width / tp,
        "H": attention.num_heads / tp,
        "G": attention.num_kv_heads / tp,
        "K": (latent.rope_width if latent else attention.head_width) * one,
        "F": model.mlp.width / tp,
        "W": band_pairs(sequence_length, at),
        "w": band_pairs(sequence_length, at) / at.microbatch_sequences,
    }
    if moe is not None:
        found |= {
            "U": moe.shared_width / tp,
            "E": moe.num_experts * one,
            "M": moe.width * one,
            "n": rows * moe.top_k,
            "EDM": moe.num_experts * model.width * moe.width / at.ep,
        }
    if latent is not None:
        found |= {
            "Q": (latent.query_rank or 0) * one,
            "C": latent.kv_rank * one,
            "R": latent.rope_width * one,
            "HN": attention.num_heads * latent.nope_width / tp,
            "HP": attention.num_heads * latent.value_width / tp,
        }
    return found


def band_pairs(sequence_length: int, at: Layouts) -> Floats:
    """Query-key pairs of one masked attention call over cp: a chunk of the queries and one of the keys."""
    kind = np.asarray(CP_KINDS)[at.cp_kind]
    rings = np.where(kind == "hierarchical", at.cp // np.maximum(at.cp_inner, 1), at.cp)
    chunk = sequence_length / (2.0 * rings)
    return at.microbatch_sequences * np.minimum(chunk, MOST_BAND_ROWS) * chunk


def evaluate(monomial: str, dims: Dims) -> Floats:
    """The product of the dims of a monomial; 0 where the model has no such dim."""
    names = monomial.split("*")
    if any(name not in dims for name in names):
        return np.zeros_like(dims["T"])
    return math.prod((dims[name] for name in names[1:]), start=dims[names[0]])
