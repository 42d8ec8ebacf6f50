"""Optimizers on full parameters, written independently from their papers; sharded ones must equal them."""

import hashlib
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.spec import OptimSpec


class PlainOptimizer:
    """As much of torch's interface as the oracle uses; one group per parameter."""

    def __init__(self, groups: list[dict[str, Any]], optim: OptimSpec, names: list[str]) -> None:
        self.param_groups, self.optim, self.names = groups, optim, names
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {group["params"][0]: {} for group in groups}
        self.num_updates = 0

    def zero_grad(self) -> None:
        for parameter in self.state:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.num_updates += 1
        update = getattr(self, f"_{self.optim.kind}")
        for name, group in zip(self.names, self.param_groups, strict=True):
            (w,) = group["params"]
            g = torch.zeros_like(w) if w.grad is None else w.grad
            w.copy_(update(name, w, g, self.state[w], group["lr"], group["weight_decay"]))

    def _lars(self, name, w, g, state, lr, decay) -> Tensor:
        ratio = 1.0
        if w.ndim >= 2:
            w_norm, g_norm = math.sqrt((w**2).sum()), math.sqrt((g**2).sum())
            if w_norm and g_norm:
                ratio = self.optim.trust_coefficient * w_norm / (g_norm + decay * w_norm)
        before = state.get("momentum_buffer", torch.zeros_like(w))
        state["momentum_buffer"] = self.optim.beta1 * before + ratio * (g + decay * w)
        return w - lr * state["momentum_buffer"]

    def _adam(self, g, first, second) -> tuple[Tensor, Tensor, Tensor]:
        beta1, beta2, t = self.optim.beta1, self.optim.beta2, self.num_updates
        first = beta1 * first + (1 - beta1) * g
        second = beta2 * second + (1 - beta2) * g**2
        corrected = first / (1 - beta1**t), second / (1 - beta2**t)
        return corrected[0] / (corrected[1].sqrt() + self.optim.eps), first, second

    def _exact_adam(self, g, state) -> Tensor:
        zero = torch.zeros_like(g)
        along, state["exp_avg"], state["exp_avg_sq"] = self._adam(
            g, state.get("exp_avg", zero), state.get("exp_avg_sq", zero)
        )
        return along

    def _lamb(self, name, w, g, state, lr, decay) -> Tensor:
        along = self._exact_adam(g, state) + decay * w
        w_norm, length = math.sqrt((w**2).sum()), math.sqrt((along**2).sum())
        ratio = w_norm / length if w.ndim >= 2 and w_norm and length else 1.0
        return w - lr * ratio * along

    def _adafactor(self, name, w, g, state, lr, decay) -> Tensor:
        beta2 = 1 - self.num_updates**-0.8
        square = g**2 + 1e-30
        if w.ndim < 2:
            second = beta2 * state.get("exp_avg_sq", torch.zeros_like(w)) + (1 - beta2) * square
            state["exp_avg_sq"] = second
        else:
            for key, dim in (("row_mean_sq", -1), ("column_mean_sq", -2)):
                mean = square.mean(dim)
                state[key] = beta2 * state.get(key, torch.zeros_like(mean)) + (1 - beta2) * mean
            rows, columns = state["row_mean_sq"], state["column_mean_sq"]
            second = rows[..., :, None] * columns[..., None, :] / rows.mean(-1)[..., None, None]
        along = g / second.sqrt()
        along = along / max(1.0, math.sqrt((along**2).mean()))
        if self.optim.beta1:
            before = state.get("exp_avg", torch.zeros_like(w))
            along = state["exp_avg"] = self.optim.beta1 * before + (1 - self.optim.beta1) * along
        return w - lr * along - lr * decay * w

    def _muon(self, name, w, g, state, lr, decay) -> Tensor:
        if w.ndim < 2 or name.startswith(("embedding", "head")):
            return w - lr * self._exact_adam(g, state) - lr * decay * w
        mu = self.optim.momentum
        state["momentum_buffer"] = mu * state.get("momentum_buffer", torch.zeros_like(w)) + g
        ahead = g + mu * state["momentum_buffer"]
        matrices = ahead[None] if w.ndim == 2 else ahead
        along = torch.stack([_newton_schulz(matrix) for matrix in matrices]).view_as(w)
        return w - lr * 0.2 * math.sqrt(max(w.shape[-2:])) * along - lr * decay * w

    def _adamw_8bit(self, name, w, g, state, lr, decay) -> Tensor:
        if w.ndim < 2:
            return w - lr * self._exact_adam(g, state) - lr * decay * w
        if not state:
            state |= _encoded("exp_avg", torch.zeros_like(w), name, 0)
            state |= _encoded("exp_avg_sq", torch.zeros_like(w), name, 0)
        along, first, second = self._adam(g, _decoded("exp_avg", state), _decoded("exp_avg_sq", state))
        state |= _encoded("exp_avg", first, name, self.num_updates)
        state |= _encoded("exp_avg_sq", second, name, self.num_updates)
        return w - lr * along - lr * decay * w


def _newton_schulz(matrix: Tensor) -> Tensor:
    """Through the singular values: the polynomial acts on each of them alone."""
    if not matrix.any():  # of A at the first step: B is zero
        return matrix
    u, values, vh = torch.linalg.svd(matrix / math.sqrt((matrix**2).sum()), full_matrices=False)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return u @ torch.diag(values) @ vh


BLOCK = 256
TABLES = {
    "exp_avg": np.concatenate([[0.0], 2.0 ** (16.0 * (np.arange(1, 128) - 127) / 126)]),
    "exp_avg_sq": np.concatenate([[0.0], 2.0 ** (24.0 * (np.arange(1, 256) - 255) / 254)]),
}


def _scales(moment: Tensor) -> Tensor:
    """Of each element's block: runs of 256 in a row."""
    parts = [part.abs().amax(-1, keepdim=True) for part in moment.split(BLOCK, dim=-1)]
    return torch.cat(parts, dim=-1).float()


def _spread(scales: Tensor, width: int) -> Tensor:
    return scales.double().repeat_interleave(BLOCK, dim=-1)[..., :width]


def _decoded(key: str, state: dict[str, Tensor]) -> Tensor:
    code = state[f"{key}_code"].numpy().astype(np.int64)
    values = torch.from_numpy(np.sign(code) * TABLES[key][np.abs(code)])
    return values * _spread(state[f"{key}_scale"], values.shape[-1])


def _encoded(key: str, moment: Tensor, name: str, step: int) -> dict[str, Tensor]:
    table, scales = TABLES[key], _scales(moment)
    spread = _spread(scales, moment.shape[-1]).numpy()
    part = np.divide(moment.abs().numpy(), spread, out=np.zeros(moment.shape), where=spread > 0)
    lower = np.clip(np.searchsorted(table, part, side="right") - 1, 0, len(table) - 2)
    probability = (part - table[lower]) / (table[lower + 1] - table[lower])
    code = lower + (_noise(name, key, step, moment.shape) < probability)
    if key == "exp_avg_sq":
        code = np.where(part > 0, np.maximum(code, 1), 0)
    signed = torch.from_numpy(code) * moment.sign()
    dtype = torch.int8 if key == "exp_avg" else torch.uint8
    return {f"{key}_code": signed.to(dtype), f"{key}_scale": scales}


def _noise(name: str, key: str, step: int, shape: torch.Size) -> np.ndarray:
    """Halves of 32-bit hashes of name, row, column and step, in unsigned arithmetic."""
    digest = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=8).digest(), dtype="<u4")
    rows = _mixed(np.arange(shape[:-1].numel(), dtype=np.uint32) ^ digest[0])
    columns = _mixed(np.arange(shape[-1], dtype=np.uint32) ^ digest[1])
    bits = _mixed(rows[:, None] + columns[None, :] + np.uint32(step * 0x9E3779B1 % 2**32))
    low, high = bits & np.uint32(0xFFFF), bits >> np.uint32(16)
    return ({"weight": low, "exp_avg": high, "exp_avg_sq": low ^ high}[key] / 2.0**16).reshape(shape)


def _mixed(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B)
    return bits ^ (bits >> np.uint32(16))
