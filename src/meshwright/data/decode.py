"""Bytes to arrays: images, audio and video frames, texts and JSON, by the name of a field.

Images are decoded without torchvision: by simplejpeg (libjpeg-turbo) for JPEG where it is installed, and else
by Pillow. Audio is decoded from wav without any package. Everything else goes through one hook: a `Decoder`
is a function of bytes, so DALI, torchcodec and PyNvVideoCodec are used by passing one of theirs.
"""

import io
import json
import wave
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.readers.extras import is_installed, package
from meshwright.data.records import KEY, Field, Record, RecordError
from meshwright.errors import DataError

Decoder = Callable[[bytes], Any]
IMAGE_FIELDS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm")
TEXT_FIELDS = ("txt", "text", "caption", "cls")
VIDEO_FIELDS = ("mp4", "mkv", "webm", "avi", "mov")
AUDIO_FIELDS = ("wav", "flac", "mp3", "ogg", "m4a")
# A picture of a few kilobytes may claim to be gigabytes large.
MAX_PIXELS = 1 << 28
_JPEG_MAGIC = b"\xff\xd8\xff"


def decode_record(record: Record, decoders: Mapping[str, Decoder] | None = None) -> dict[str, Any]:
    """A record with its fields decoded by their names; `decoders` come first, unknown fields stay bytes.

    The name of a field is its last ending: `cap.txt` is decoded as `txt`.
    """
    decoded: dict[str, Any] = {}
    for name, value in record.items():
        decoder = (decoders or {}).get(name) or decoder_of(name)
        if decoder is None or not isinstance(value, bytes):
            decoded[name] = value
            continue
        try:
            decoded[name] = decoder(value)
        except DataError:
            raise
        except Exception as error:  # the decoders of other packages raise anything
            fact = f"the field {name} cannot be decoded: {_first_line(error)}"
            raise RecordError(fact, file="record", key=str(record.get(KEY, "?"))) from error
    return decoded


def decoder_of(name: str) -> Decoder | None:
    """The decoder for fields of this name; None for fields that stay bytes."""
    ending = name.rpartition(".")[2].lower()
    if ending in IMAGE_FIELDS:
        return decode_image
    if ending in TEXT_FIELDS:
        return decode_text
    if ending == "json":
        return json.loads
    if ending == "npy":
        return decode_npy
    if ending == "wav":
        return decode_wav
    return None


def decode_image(content: bytes, *, at_least: int | None = None) -> NDArray[np.uint8]:
    """An RGB image as height x width x 3.

    With `at_least`, a JPEG is decoded at a fraction of its size (down to 1/8) where both sides stay at least
    that long: several times faster, for a training that resizes the image anyway.
    """
    if content.startswith(_JPEG_MAGIC) and is_installed("simplejpeg"):
        return _decode_jpeg(content, at_least)
    return _decode_with_pillow(content, at_least)


def image_size(content: bytes) -> tuple[int, int]:
    """(height, width) from the header; the pixels are not decoded."""
    with _opened_image(content) as image:
        return image.height, image.width


def decode_text(content: bytes) -> str:
    """UTF-8 text; ValueError with the position of the first wrong byte."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"byte 0x{content[error.start]:02x} after {error.start} bytes is not UTF-8"
        ) from None


def decode_npy(content: bytes) -> NDArray[Any]:
    """An array in NumPy's own format; arrays of objects, which would be pickled, are refused."""
    return np.load(io.BytesIO(content), allow_pickle=False)


def decode_wav(content: bytes) -> NDArray[np.float32]:
    """Samples of a PCM wav file as time x channels, from -1 to 1."""
    with wave.open(io.BytesIO(content)) as file:
        width, channels = file.getsampwidth(), file.getnchannels()
        raw = file.readframes(file.getnframes())
    if width == 1:
        samples = (np.frombuffer(raw, dtype=np.uint8).astype(np.float32) - 128) / 128
    elif width in (2, 4):
        samples = np.frombuffer(raw, dtype=f"<i{width}").astype(np.float32) / float(1 << (8 * width - 1))
    else:
        raise ValueError(f"wav samples of {width} bytes are not supported")
    return samples.reshape(-1, channels)


def video_decoder(num_frames: int, *, backend: str = "torchcodec", device: str = "cpu") -> Decoder:
    """A decoder of evenly spaced frames (frames x height x width x 3) by an optional package.

    `torchcodec` decodes on the CPU or, with device "cuda", on the GPU. Frames of a GPU differ in single bits
    from those of a CPU. DALI and PyNvVideoCodec build pipelines of their own: pass a function of bytes as a
    decoder, and call it in the process of the rank.
    """
    if backend != "torchcodec":
        hint = 'pass any function of bytes instead: decode_record(record, {"mp4": my_decoder})'
        raise DataError(
            f"there is no decoder {backend!r} here; torchcodec is built in", where=backend, hint=hint
        )
    decoders = package("torchcodec.decoders", extra="video", needed_for="video frames")

    def decode(content: bytes) -> Any:
        video = decoders.VideoDecoder(content, device=device, dimension_order="NHWC")
        indices = np.linspace(0, len(video) - 1, num=min(num_frames, len(video))).round().astype(int)
        return video.get_frames_at(indices=indices.tolist()).data

    return decode


def audio_decoder(*, sample_rate: int | None = None) -> Decoder:
    """A decoder of flac, mp3, ogg and m4a (time x channels) by the optional package torchcodec."""
    decoders = package("torchcodec.decoders", extra="video", needed_for="compressed audio")

    def decode(content: bytes) -> Any:
        return decoders.AudioDecoder(content, sample_rate=sample_rate).get_all_samples().data.T

    return decode


def missing_decoder(field: str) -> str | None:
    """Why a field stays bytes, in one sentence; None where it is decoded or is no media."""
    ending = field.rpartition(".")[2].lower()
    if ending in VIDEO_FIELDS or (ending in AUDIO_FIELDS and ending != "wav"):
        kind = "video" if ending in VIDEO_FIELDS else "audio"
        state = "is installed" if is_installed("torchcodec") else 'is not: pip install "meshwright[video]"'
        return f"{kind} stays bytes; decode it with torchcodec (which {state}), DALI or a function of yours"
    return None


def _decode_jpeg(content: bytes, at_least: int | None) -> NDArray[np.uint8]:
    simplejpeg = package("simplejpeg", extra="images", needed_for="fast JPEG decoding")
    height, width, colorspace, _ = simplejpeg.decode_jpeg_header(content)
    if height * width > MAX_PIXELS:
        raise ValueError(f"the image has {height} x {width} pixels, more than {MAX_PIXELS}")
    if colorspace in ("CMYK", "YCCK"):
        return _decode_with_pillow(content, at_least)
    least = at_least or 0
    return simplejpeg.decode_jpeg(content, "RGB", fastdct=False, min_height=least, min_width=least)


def _decode_with_pillow(content: bytes, at_least: int | None) -> NDArray[np.uint8]:
    with _opened_image(content) as image:
        if at_least is not None:
            image.draft("RGB", (at_least, at_least))
        return np.asarray(image.convert("RGB"))


def _opened_image(content: bytes) -> Any:
    pillow = package("PIL.Image", extra="images", needed_for="images")
    image = pillow.open(io.BytesIO(content))
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"the image has {image.height} x {image.width} pixels, more than {MAX_PIXELS}")
    return image


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def shown_field(value: Field) -> str:
    """A field in one short line, for people."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype.name} {' x '.join(map(str, value.shape))}"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    text = str(value)
    return text if len(text) <= 300 else text[:300].rstrip() + " ..."
