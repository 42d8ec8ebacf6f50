"""The folders that a run starts from, compared with the run before any tensor is read, and without torch.

`check` says with it what `train` would refuse: a Hugging Face folder of another model, adapters of another
shape or of another base.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.adapters.peft_folder import PeftFolder, damage_reported, is_peft_folder
from meshwright.checkpoint.json_file import read_json
from meshwright.errors import CheckpointError
from meshwright.spec import AdapterSpec, ModelSpec, RunSpec
from meshwright.spec.adapter import trained_in_full
from meshwright.spec.huggingface import model_at
from meshwright.spec.huggingface.names import state_shapes
from meshwright.spec.huggingface.tensor_file import TensorFile

CONFIG = "config.json"
_MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 2**28
_RUN_FILES = (_MANIFEST, "checkpoints")
# Settings that a run may change without a note: they do not change what the weights compute.
_TRAINING_SETTINGS = ("family", "dropout", "init_std", "scaled_residual_init")
_SAMPLE_BYTES = 2**16
_NUM_SAMPLES = 16
START_HINT = "name a peft folder, or a checkpoint or run directory of a run with `adapter`"


def require_start(run: RunSpec) -> None:
    """Refuse a Hugging Face or peft folder that `train` would refuse to start from; it need not be here."""
    base = _hugging_face_folder(run.checkpoint.start_from)
    if base is not None:
        require_same_model(run, base)
        _require_full_files(base)
    if run.adapter is None or run.adapter.start_from is None:
        return
    folder = Path(run.adapter.start_from).expanduser()
    if is_peft_folder(folder):
        trained = trained_in_full(run.model, run.adapter, run.train_only)
        there = PeftFolder(folder, run.model, run.adapter, trained=trained)
        if base is not None and there.base_digest is not None:
            require_base_of(there, _record(base))
    elif _has_checkpoints(folder):
        _require_same_run(run, folder, base)
    elif folder.exists():
        raise no_adapters(folder)


def _require_same_run(run: RunSpec, folder: Path, base: Path | None) -> None:
    """Refuse a checkpoint, or the newest one of a run, with other adapters or of another base."""
    manifests = [folder / _MANIFEST, *sorted(folder.glob(f"step-*/{_MANIFEST}"))]
    manifests += sorted(folder.glob(f"checkpoints/step-*/{_MANIFEST}"))
    found = [path for path in manifests if path.is_file()]
    if not found:
        return  # its run has not saved one yet
    manifest, place = read_json(found[-1], max_bytes=_MAX_MANIFEST_BYTES), found[-1].parent
    require_adapters(manifest, place)
    require_same_adapter(saved_adapter(manifest, place), run.adapter, place)
    if base is not None:
        require_same_base(manifest.get("base"), _record(base), place)


def _record(base: Path) -> dict[str, str]:
    """Path and digest of a Hugging Face folder, as a checkpoint of adapters has them."""
    return {"path": str(base.resolve()), "digest": folder_digest(base)}


def _hugging_face_folder(text: str | None) -> Path | None:
    """The folder where it is one of Hugging Face; None for others, and where it is not here."""
    folder = None if text is None else Path(text).expanduser()
    if folder is None or not (folder / CONFIG).is_file():
        return None
    return None if _has_checkpoints(folder) else folder


def _require_full_files(folder: Path) -> None:
    """Refuse weights of which only the beginning was downloaded or copied."""
    for path in sorted(folder.glob("model*.safetensors")):
        with damage_reported(path, hint="download or copy the file again"):
            file = TensorFile(path)
            for name in file.names():
                file.tensor(name)


def _has_checkpoints(folder: Path) -> bool:
    """Whether this is a checkpoint or a run directory, or a folder of checkpoints."""
    return any((folder / name).exists() for name in _RUN_FILES) or any(folder.glob("step-*"))


def no_adapters(folder: Path) -> CheckpointError:
    """The error of a model in the place of adapters."""
    where = f"adapter.start_from: {folder}"
    return CheckpointError("this folder has no adapters", where=where, hint=START_HINT)


def require_same_model(run: RunSpec, folder: Path) -> ModelSpec:
    """The model of a Hugging Face folder, which must be that of the run but for new tokens."""
    there, num_new = model_at(folder), run.checkpoint.new_tokens
    _refuse_counted_twice(run, there)
    expected = without_new_tokens(run.model, num_new)
    require_same_tensors(expected, state_shapes(there), folder, theirs=there.model_dump(mode="json"))
    return there


def without_new_tokens(model: ModelSpec, num_new: int) -> ModelSpec:
    """The model with the vocabulary of the weights that a run starts from."""
    return model.with_(vocab_size=model.vocab_size - num_new) if num_new else model


def _refuse_counted_twice(run: RunSpec, there: ModelSpec) -> None:
    """Refuse new tokens that the vocabulary of the run does not count: it is that of the folder."""
    count, vocabulary = run.checkpoint.new_tokens, run.model.vocab_size
    if count and there.vocab_size == vocabulary:
        raise CheckpointError(
            f"new_tokens={count} with model.vocab_size={vocabulary}, and the weights have all of these rows",
            where="checkpoint.new_tokens",
            hint=f"model.vocab_size counts the new tokens too: set it to {vocabulary + count}",
        )


def require_same_tensors(
    model: ModelSpec, shapes: Mapping[str, tuple[int, ...]], folder: Path, *, theirs: Mapping[str, Any]
) -> None:
    """Refuse weights whose tensors are not those of the model, and name the settings that differ."""
    ours = state_shapes(model)
    different = [name for name in sorted(ours.keys() | shapes.keys()) if ours.get(name) != shapes.get(name)]
    if not different:
        return
    settings = "; ".join(differing_settings(theirs, model.model_dump(mode="json")))
    name = different[0]
    raise CheckpointError(
        f"the weights are of another model: {name} has shape {shapes.get(name, 'none')} there and "
        f"{ours.get(name, 'none')} in this run, and so on for {len(different)} tensors"
        + (f" ({settings})" if settings else ""),
        where=str(folder),
        hint="use the model of the weights: name its folder as `model`, or correct the values above",
    )


def differing_settings(theirs: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Texts such as `model.width is 64 there and 32 here`, for settings that change what is computed."""
    for name, value in ours.items():
        if not theirs or (not prefix and name in _TRAINING_SETTINGS) or theirs.get(name) == value:
            continue
        inner = theirs.get(name)
        if isinstance(value, dict) and isinstance(inner, dict):
            yield from differing_settings(inner, value, f"{prefix}{name}.")
        else:
            yield f"model.{prefix}{name} is {inner} there and {value} here"


def folder_digest(folder: Path) -> str:
    """A digest of the weights in a Hugging Face folder, of samples of its files.

    Of each safetensors file it has size, header and 16 samples of 64 KiB, so that a base of hundreds of GB
    takes a moment; a change of a few weights alone may be missed.
    """
    try:
        return _samples_digest(folder)
    except OSError as error:
        fact = f"the weights cannot be read: {error.strerror or error}"
        where = str(error.filename or folder)
        raise CheckpointError(fact, where=where, hint="check the permissions of its files") from None


def _samples_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    digest.update((folder / CONFIG).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as stream:
            for sample in range(_NUM_SAMPLES):
                stream.seek(sample * max(0, size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def require_base_of(there: PeftFolder, found: Mapping[str, str] | None) -> None:
    """Refuse a peft folder whose writer recorded another base."""
    assert there.base_digest is not None
    require_same_base({"path": "their base", "digest": there.base_digest}, found, there.folder)


def require_same_base(saved: Mapping[str, str] | None, found: Mapping[str, str] | None, where: Path) -> None:
    """Refuse adapters that were trained on other weights."""
    if saved and found and saved["digest"] != found["digest"]:
        raise CheckpointError(
            f"the adapters were trained on other weights: {saved['path']} had digest {saved['digest'][:12]}, "
            f"and {found['path']} has {found['digest'][:12]}",
            where=str(where),
            hint="name the base that they were trained on in checkpoint.start_from",
        )


def require_adapters(manifest: Mapping[str, Any], folder: Path) -> None:
    """Refuse a checkpoint without adapters."""
    if not has_adapters(manifest):
        hint = "name a run with `adapter`, or a peft folder; a full model is named in checkpoint.start_from"
        raise CheckpointError("this checkpoint has no adapters", where=str(folder), hint=hint)


def has_adapters(manifest: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has adapters in the place of a full model."""
    run = manifest.get("run")
    return isinstance(run, dict) and run.get("adapter") is not None


def require_same_adapter(there: AdapterSpec | None, here: AdapterSpec | None, folder: Path) -> None:
    """Refuse adapters of another kind, rank or scale."""
    for key in ("kind", "rank", "alpha", "targets", "ranks", "tokens"):
        if getattr(there, key) != getattr(here, key):
            raise CheckpointError(
                f"adapter.{key} is {getattr(there, key)} there and {getattr(here, key)} in this run",
                where=str(folder),
                hint=f"set adapter.{key} to the value there",
            )


def saved_adapter(manifest: Mapping[str, Any], folder: Path) -> AdapterSpec | None:
    """The adapter of the run of a checkpoint."""
    try:
        return RunSpec.model_validate(manifest["run"]).adapter
    except ValueError as error:
        fact = f"the run in the manifest cannot be read: {str(error).splitlines()[0]}"
        raise CheckpointError(fact, where=str(folder), hint="use an older checkpoint") from None
