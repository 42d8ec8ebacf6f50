"""Loaders of other projects over the images of `bench.data`: bytes in process, decoded by two workers."""

import glob
import importlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from meshwright.data.decode import decode_image
from meshwright.data.order import SampleOrder
from meshwright.data.readers.tar import TarShards

Samples = Iterator[Any]
"""One item for each sample, or for each batch of samples."""
BATCH = 50


class Indexed(torch.utils.data.Dataset[Any]):
    """A map-style dataset of torch over the same index: what a user would write by hand."""

    def __init__(self, folder: Path, decode: Callable[[bytes], Any] | None = None) -> None:
        self.source, self.decode = TarShards(folder), decode

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        record = self.source.record(index)
        return record if self.decode is None else (self.decode(record["jpg"]), record["txt"])  # pyright: ignore


def pillow_image(content: bytes) -> np.ndarray:
    """A JPEG by Pillow, as the peers decode it."""
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def stacked(items: list[tuple[np.ndarray, bytes]]) -> tuple[torch.Tensor, list[bytes]]:
    """Images as one tensor."""
    return torch.from_numpy(np.stack([image for image, _ in items])), [text for _, text in items]


def torch_bytes(folder: Path) -> Samples:
    """torch's DataLoader over our index, in process."""
    order = SampleOrder(len(TarShards(folder)), seed=0).sample_ids(0, len(TarShards(folder))).tolist()
    loader = torch.utils.data.DataLoader(Indexed(folder), batch_size=BATCH, sampler=order, collate_fn=list)
    for batch in loader:
        yield from batch


def torch_images(folder: Path) -> Samples:
    """torch's DataLoader over our index, Pillow, two workers."""
    loader = torch.utils.data.DataLoader(
        Indexed(folder, pillow_image), batch_size=BATCH, shuffle=True, num_workers=2, collate_fn=stacked
    )
    yield from loader


def our_decoder_in_torch(folder: Path) -> Samples:
    """The same with our decoder: how much of a difference is the decoder's."""
    loader = torch.utils.data.DataLoader(
        Indexed(folder, decode_image), batch_size=BATCH, shuffle=True, num_workers=2, collate_fn=stacked
    )
    yield from loader


def webdataset_bytes(folder: Path) -> Samples:
    """webdataset with its shuffle buffer."""
    webdataset = importlib.import_module("webdataset")
    urls = sorted(glob.glob(f"{folder}/*.tar"))
    yield from webdataset.WebDataset(urls, shardshuffle=100, empty_check=False).shuffle(1000)


def webdataset_images(folder: Path) -> Samples:
    """webdataset with its own decoder, two workers."""
    webdataset = importlib.import_module("webdataset")
    urls = sorted(glob.glob(f"{folder}/*.tar"))
    dataset = webdataset.WebDataset(urls, shardshuffle=100, empty_check=False).shuffle(1000)
    dataset = dataset.decode("rgb8").to_tuple("jpg", "txt").batched(BATCH)
    for images, texts in webdataset.WebLoader(dataset, batch_size=None, num_workers=2):
        yield torch.as_tensor(np.asarray(images)), texts


def litdata_bytes(folder: Path) -> Samples:
    """litdata over its own chunks, shuffled."""
    litdata = importlib.import_module("litdata")
    for item in litdata.StreamingDataset(_litdata_chunks(folder), shuffle=True):
        yield bytes(item["jpg"])


def litdata_images(folder: Path) -> Samples:
    """litdata, Pillow, two workers."""
    litdata = importlib.import_module("litdata")

    class Decoded(litdata.StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            item = super().__getitem__(index)
            return pillow_image(bytes(item["jpg"])), bytes(item["txt"])

    dataset = Decoded(_litdata_chunks(folder), shuffle=True)
    yield from litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=2, collate_fn=stacked)


def _litdata_chunks(folder: Path) -> str:
    litdata = importlib.import_module("litdata")
    target = folder.with_name(f"{folder.name}-litdata")
    if not (target / "index.json").is_file():
        items = list(range(len(TarShards(folder))))
        make = _LitdataItem(folder)
        litdata.optimize(make, items, str(target), chunk_bytes="16MB", num_workers=1, verbose=False)
    return str(target)


class _LitdataItem:
    """The item of an index, for the processes that write litdata's chunks."""

    def __init__(self, folder: Path) -> None:
        self.source = TarShards(folder)

    def __call__(self, index: int) -> dict[str, Any]:
        record = self.source.record(index)
        return {"jpg": record["jpg"], "txt": record["txt"]}


def energon_bytes(folder: Path) -> Samples:
    """Energon over the same shards, with its shuffle buffer."""
    yield from _energon(folder, decoder=None, num_workers=0)


def energon_images(folder: Path) -> Samples:
    """Energon with its own decoder, two workers."""
    energon = importlib.import_module("megatron.energon")
    yield from _energon(folder, decoder=energon.SampleDecoder(image_decode="rgb8"), num_workers=2)


def _energon(folder: Path, *, decoder: Any, num_workers: int) -> Samples:
    energon = importlib.import_module("megatron.energon")

    @energon.stateless
    def cook(sample: Any) -> Any:
        return sample

    class Encoder(energon.DefaultTaskEncoder):
        cookers = (energon.Cooker(cook),)

        def batch(self, samples: list[Any]) -> Any:
            return samples

    Encoder.decoder = decoder
    config = energon.WorkerConfig(rank=0, world_size=1, num_workers=num_workers)
    dataset = energon.get_train_dataset(
        str(folder),
        batch_size=BATCH,
        shuffle_buffer_size=1000,
        max_samples_per_sequence=100,
        worker_config=config,
        task_encoder=Encoder(),
        repeat=False,
    )
    for batch in energon.get_loader(dataset):
        if num_workers:
            yield torch.as_tensor(np.stack([np.asarray(sample["jpg"]) for sample in batch]))
        else:
            yield from batch


BYTES: dict[str, tuple[str, Callable[[Path], Samples]]] = {
    "torch DataLoader over the same index": ("torch", torch_bytes),
    "litdata": ("litdata", litdata_bytes),
    "webdataset": ("webdataset", webdataset_bytes),
    "megatron-energon": ("megatron.energon", energon_bytes),
    "mosaicml-streaming": ("streaming", lambda folder: iter(())),
}
IMAGES: dict[str, tuple[str, Callable[[Path], Samples]]] = {
    "torch DataLoader over the same index, Pillow": ("torch", torch_images),
    "litdata, Pillow": ("litdata", litdata_images),
    "webdataset": ("webdataset", webdataset_images),
    "megatron-energon": ("megatron.energon", energon_images),
}
