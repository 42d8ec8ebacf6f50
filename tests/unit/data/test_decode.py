"""Decoding by the name of a field: images as Pillow gives them, texts, sound, and damage named."""

import io
import struct
import wave
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.data import decode
from meshwright.data.decode import decode_image, decode_record, decode_text, decode_wav
from meshwright.data.loader import open_loader
from meshwright.data.records import Record, RecordError, RecordsInMemory
from meshwright.errors import DataError

Image = pytest.importorskip("PIL.Image")


def picture(kind: str, *, size: tuple[int, int] = (64, 48), mode: str = "RGB") -> tuple[bytes, np.ndarray]:
    x, y = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
    pixels = np.stack([x * 3, y * 4, (x + y) * 2], axis=-1).clip(0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, kind)
    return stream.getvalue(), pixels


def test_lossless_images_come_back() -> None:
    content, pixels = picture("PNG")
    assert np.array_equal(decode_image(content), pixels)
    assert decode.image_size(content) == (48, 64)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("with_simplejpeg", [True, False])
def test_jpeg_is_what_pillow_decodes(
    mode: str, with_simplejpeg: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_simplejpeg:
        pytest.importorskip("simplejpeg")
    monkeypatch.setattr(decode, "is_installed", lambda name: with_simplejpeg)
    content, _ = picture("JPEG", mode=mode)
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(int)
    image = decode_image(content)
    assert image.shape == (48, 64, 3)
    assert abs(image.astype(int) - expected).max() <= 4  # two builds of one library
    small = decode_image(picture("JPEG", size=(640, 480))[0], at_least=100)
    assert min(small.shape[:2]) in range(100, 240)


def test_a_truncated_image_is_named() -> None:
    content, _ = picture("JPEG")
    with pytest.raises(RecordError, match="the field jpg cannot be decoded") as caught:
        decode_record({"__key__": "17", "jpg": content[: len(content) // 2]})
    assert caught.value.key == "17"


def test_a_picture_that_claims_to_be_huge_is_refused() -> None:
    content = bytearray(picture("PNG")[0])
    content[16:24] = struct.pack(">II", 1 << 20, 1 << 20)
    with pytest.raises((ValueError, OSError)):
        decode_image(bytes(content))


def test_fields_are_decoded_by_their_last_ending() -> None:
    record = {"__key__": "1", "cap.txt": b"tr\xc3\xaas", "json": b'{"a": 1}', "bin": b"\0", "n": 3}
    assert decode_record(record) == {
        "__key__": "1",
        "cap.txt": "três",
        "json": {"a": 1},
        "bin": b"\0",
        "n": 3,
    }
    assert decode_record({"bin": b"ab"}, {"bin": len})["bin"] == 2


def test_invalid_utf8_is_named() -> None:
    with pytest.raises(ValueError, match="byte 0xff after 2 bytes"):
        decode_text(b"ab\xff")


@pytest.mark.parametrize("width", [1, 2, 4])
def test_sound_comes_back(width: int) -> None:
    waveform = np.sin(np.linspace(0, 20, 400)).reshape(-1, 2)
    scaled = (waveform * (2 ** (8 * width - 1) - 1)).astype(f"<i{width}")
    raw = (scaled.astype(np.int16) + 128).astype(np.uint8) if width == 1 else scaled
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(width)
        file.setframerate(8000)
        file.writeframes(raw.tobytes())
    assert np.allclose(decode_wav(stream.getvalue()), waveform, atol=0.02)


def test_what_is_not_installed_is_said() -> None:
    if not decode.is_installed("torchcodec"):
        with pytest.raises(DataError, match="torchcodec, which is not installed"):
            decode.video_decoder(8)
        assert "pip install" in str(decode.missing_decoder("mp4"))
    with pytest.raises(DataError, match="no decoder 'dali'"):
        decode.video_decoder(8, backend="dali")
    assert decode.missing_decoder("jpg") is None


def frames_of(content: bytes) -> np.ndarray:
    """A decoder of the user's own: raw frames of 4 x 6 pixels."""
    return np.frombuffer(content, dtype=np.uint8).reshape(-1, 4, 6, 3).copy()


def decoded_clip(record: Record, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    decoded = decode_record(record, {"mp4": frames_of})
    first = int(rng.integers(len(decoded["mp4"]) - 1))
    return decoded["mp4"][first : first + 2], decoded["wav"]


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "workers": "threads"}, {"num_workers": 1}])
def test_clips_go_through_a_decoder_of_the_user(workers: dict[str, Any]) -> None:
    """Video as raw bytes and sound as wav, in a loader; the random frames do not depend on workers."""
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(np.arange(100, dtype="<i2").tobytes())
    clips = [
        np.full((5, 4, 6, 3), number, np.uint8) + np.arange(5, dtype=np.uint8)[:, None, None, None]
        for number in range(12)
    ]
    records = [
        {"__key__": str(n), "mp4": clip.tobytes(), "wav": stream.getvalue()} for n, clip in enumerate(clips)
    ]
    source = RecordsInMemory("clips", records)
    plain = next(open_loader(source, batch_samples=6, transform=decoded_clip))
    loader = open_loader(source, batch_samples=6, transform=decoded_clip, **workers)
    video, sound = next(loader)
    loader.close()
    assert video.shape == (6, 2, 4, 6, 3) and sound.shape == (6, 100, 1)
    assert torch.equal(video, plain[0])
    broken = RecordsInMemory("clips", [{"__key__": "0", "mp4": b"abc"}])
    with pytest.raises(RecordError, match="the field mp4 cannot be decoded"):
        next(open_loader(broken, batch_samples=1, transform=decoded_clip))
