"""Reads adapters from a peft folder; a rank reads only the slices of its shards."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.adapters.expert_stack import ExpertStack
from meshwright.adapters.peft_folder import RANK_DIMS, WEIGHTS_FILE, PeftFolder, unreadable
from meshwright.adapters.peft_names import PeftRows
from meshwright.spec import AdapterSpec, ModelSpec
from meshwright.spec.adapter import LORA_A, LORA_B

ReadBaseRows = Callable[[str, list[int]], Tensor]
"""Reads rows of a table of the base, by our name."""


class PeftReader:
    """The adapters of a folder under our names, at the scales of a run's own adapters."""

    def __init__(
        self,
        folder: Path,
        model: ModelSpec,
        adapter: AdapterSpec,
        *,
        trained: Iterable[str] = (),
        read_base_rows: ReadBaseRows | None = None,
    ) -> None:
        """Open the folder and check that it has exactly these adapters.

        `trained` is as for `PeftFolder`. `read_base_rows` is needed for trained rows of single tokens.
        """
        self.there = PeftFolder(folder, model, adapter, trained=trained)
        """What is in the folder."""
        self._read_base_rows = read_base_rows
        self._file = _open(folder / WEIGHTS_FILE)

    def names(self) -> list[str]:
        """Our names of everything in the folder."""
        return [*self.there.parts, *self.there.rows, *self.there.full]

    def read_slice(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """A slice of a parameter of one of our adapters, or of one that is trained in full."""
        if name in self.there.full:
            return self._slices(self.there.full[name])[index]
        if name in self.there.rows:
            return self._row_changes(self.there.rows[name])[index]
        one, own = self.there.parts[name]
        index = _within_rank(index, own, one.matrix.rank)
        keys = one.keys(own)
        if one.stack is not None:
            value = _of_stack(self._slices(keys[0]), one.stack, own, index, rank=self.there.rank_there(one))
        elif one.is_transposed:
            value = self._slices(keys[0])[index[::-1]].mT
        elif one.matrix.is_expert:
            first, *rest = index
            value = torch.stack([self._slices(key)[tuple(rest)] for key in keys[first]])
        else:
            value = self._slices(keys[0])[index]
        return value.float() * self.there.scale_ratio(one) if own == LORA_B else value

    def _slices(self, key: str) -> Any:
        """The tensor of a key of peft, to take a slice of."""
        return self._file.get_slice(self.there.disk_name[key])

    def _row_changes(self, rows: PeftRows) -> Tensor:
        """The rows of single tokens there minus those of the base."""
        assert self._read_base_rows is not None
        there = self._file.get_tensor(self.there.disk_name[rows.key]).float()
        ids = self.there.token_ids(rows)
        in_order = torch.tensor([ids.index(one) for one in sorted(ids)])
        return there[in_order] - self._read_base_rows(rows.table, sorted(ids)).float()


def _of_stack(factor: Any, stack: ExpertStack, own: str, index: tuple[slice, ...], *, rank: int) -> Tensor:
    """A slice of the experts' A[experts, rank, inputs] or B[experts, outputs, rank] of a stacked parameter.

    Of A only the rows of the experts are read; of B the rows of the outputs, which have all experts.
    """
    if own == LORA_A:
        experts, ranks, inputs = index
        first, end, _ = experts.indices(stack.num_experts)
        rows = factor[first * rank : end * rank, inputs]
        return rows.unflatten(0, (end - first, rank))[:, ranks].clone()
    experts, outputs, ranks = index
    first, end, _ = outputs.indices(stack.own_outputs.stop - stack.own_outputs.start)
    rows = factor[stack.own_outputs.start + first : stack.own_outputs.start + end, :]
    return rows.unflatten(1, (rank, stack.num_experts))[:, ranks, experts].permute(2, 0, 1).contiguous()


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise unreadable(path, error) from None


def _within_rank(index: tuple[slice, ...], own: str, rank: int) -> tuple[slice, ...]:
    """The index of a factor, without the ranks that are padding there."""
    if own not in RANK_DIMS:
        return index
    bounded, dim = list(index), RANK_DIMS[own]
    bounded[dim] = slice(*bounded[dim].indices(rank))
    return tuple(bounded)
