"""Names of adapters in a peft folder, and what one of our adapters is made of there.

A matrix of ours is one module of the Hugging Face model; routed experts are one module per expert, or parts
of a stacked parameter (`expert_stack.py`). Of the embedding peft stores both factors transposed and under the
other letter. Beside adapters a folder may have trained rows of single tokens, and modules that are trained in
full (`modules_to_save`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.adapters.expert_stack import ExpertStack, expert_stack
from meshwright.errors import CheckpointError
from meshwright.spec import AdapterSpec, ModelSpec
from meshwright.spec.adapter import (
    EMBEDDING,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    AdaptedMatrix,
    adapted_matrices,
    token_changes,
    token_tables,
)
from meshwright.spec.huggingface.names import Source, sources

PREFIX = "base_model.model."
_SUFFIXES = {LORA_A: "lora_A.weight", LORA_B: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
_EMBEDDING_SUFFIXES = {LORA_A: "lora_embedding_B", LORA_B: "lora_embedding_A"}
ROWS_SUFFIX = "token_adapter.trainable_tokens_delta"
_MERGE = "merge the adapters instead: `convert` without --to peft"
_TIED_HEAD = Source(("lm_head.weight",))
TIED_HEAD_KEY = f"{PREFIX}lm_head.weight"


@dataclass(frozen=True)
class PeftMatrix:
    """A matrix with an adapter, and the Hugging Face modules that it consists of: one, or one per expert."""

    matrix: AdaptedMatrix
    modules: tuple[str, ...]
    stack: ExpertStack | None = None
    """Where the experts are parts of: then the only module is that parameter."""

    def keys(self, own: str) -> list[str]:
        """Tensors in the peft file that lora_A, lora_B or magnitude of this matrix consist of."""
        suffixes = _EMBEDDING_SUFFIXES if self.is_transposed else _SUFFIXES
        modules = self.modules if self.stack is None else (self.stack.module,)
        return [f"{PREFIX}{module}.{suffixes[own]}" for module in modules]

    @property
    def is_transposed(self) -> bool:
        """Whether peft stores the factors transposed: those of the embedding."""
        return self.matrix.weight.kind == "embedding"


def peft_matrices(
    model: ModelSpec, adapter: AdapterSpec, *, where: str, has_stacks: bool = False
) -> list[PeftMatrix]:
    """The adapted matrices with their modules in a Hugging Face model; with stacks, of its newer form."""
    on_disk, adapted = sources(model), adapted_matrices(model, adapter)
    names = {one.weight.name for one in adapted}
    found: list[PeftMatrix] = []
    for matrix in adapted:
        source = on_disk.get(matrix.weight.name, _TIED_HEAD)
        if source.third is not None:
            raise CheckpointError(
                "peft has one adapter for GPT-2's fused query, key and value, and this run has three",
                where=where,
                hint=_MERGE,
            )
        if matrix.is_expert and matrix.kind == "dora":
            raise CheckpointError("peft has no DoRA for routed experts", where=where, hint=_MERGE)
        if has_stacks and matrix.is_expert:
            stack = expert_stack(matrix, source.names[0], names, where=where)
            found.append(PeftMatrix(matrix, (stack.parameter,), stack))
            continue
        modules = tuple(name.removesuffix(".weight") for name in source.names)
        found.append(PeftMatrix(matrix, modules))
    return found


@dataclass(frozen=True)
class PeftRows:
    """Trained rows of single tokens: peft stores the rows themselves, and ours is a change of them."""

    change: str
    """The name of our parameter."""
    table: str
    """The name of our embedding or head."""
    module: str

    @property
    def key(self) -> str:
        """The tensor in the peft file."""
        return f"{PREFIX}{self.module}.{ROWS_SUFFIX}"


def peft_rows(model: ModelSpec, adapter: AdapterSpec) -> list[PeftRows]:
    """The tables with trained rows of single tokens."""
    on_disk, changes = sources(model), token_changes(model, adapter)
    return [
        PeftRows(change.name, table.name, on_disk[table.name].names[0].removesuffix(".weight"))
        for change, table in zip(changes, token_tables(model), strict=False)
    ]


@dataclass(frozen=True)
class PeftModule:
    """A module that is trained in full beside adapters, and the parameters it consists of."""

    name: str
    parameters: dict[str, str]
    """Key in the peft file -> our name."""


def peft_modules(
    model: ModelSpec, adapter: AdapterSpec, trained: Iterable[str], *, where: str
) -> list[PeftModule]:
    """The modules of parameters that are trained in full; peft saves a module as a whole."""
    on_disk = sources(model)
    adapted = {module for one in peft_matrices(model, adapter, where=where) for module in one.modules}
    by_module: dict[str, dict[str, str]] = {}
    for name, source in on_disk.items():
        module = source.names[0].rpartition(".")[0]
        by_module.setdefault(module, {})[PREFIX + source.names[0]] = name
        if name == EMBEDDING and model.tied_head:
            by_module[module][TIED_HEAD_KEY] = name  # peft reads the table of a tied head as well
    names = dict.fromkeys(on_disk[name].names[0].rpartition(".")[0] for name in trained)
    for name in trained:
        source, module = on_disk[name], on_disk[name].names[0].rpartition(".")[0]
        if source.stacked or source.transposed or module in adapted:
            raise CheckpointError(
                f"{name} is trained in full, and peft cannot save {module} as a module",
                where=where,
                hint=_MERGE,
            )
    return [PeftModule(module, by_module[module]) for module in names]
