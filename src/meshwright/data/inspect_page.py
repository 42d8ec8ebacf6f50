"""An HTML page that shows records of any source decoded: images as thumbnails, texts, sounds."""

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.data.decode import AUDIO_FIELDS, VIDEO_FIELDS, decode_image, decoder_of, shown_field
from meshwright.data.readers.extras import package
from meshwright.data.records import KEY, Field, RecordSource
from meshwright.errors import DataError

_THUMBNAIL_PIXELS = 200
# A larger file is not put into the page.
_MAX_MEDIA_BYTES = 4 << 20
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem; color: #1c1c1c; background: #fafafa }
h1 { font-size: 1.3rem } .facts { color: #555; margin-bottom: 1.5rem }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(240px, 1fr)); gap: 1rem }
.record { background: white; border: 1px solid #ddd; border-radius: 6px; padding: .8rem; overflow: hidden }
.record img { max-width: 100%; border-radius: 3px; display: block; margin-bottom: .4rem }
.key { font: 12px ui-monospace, monospace; color: #777; word-break: break-all; margin-bottom: .4rem }
.name { color: #0b5; font-size: 12px } .bad { color: #b00 }
p { margin: .2rem 0; overflow-wrap: anywhere; white-space: pre-wrap }
@media (prefers-color-scheme: dark) {
  body { background: #16181b; color: #e4e4e4 } .record { background: #1f2226; border-color: #353a40 }
}
"""


def inspect_page(source: RecordSource, *, kind: str, indices: Sequence[int]) -> str:
    """The page with these records; a record that cannot be read is shown with its error."""
    cards = "\n".join(_card(source, index) for index in indices)
    title = html.escape(source.name)
    facts = f"{len(source):,} records ({html.escape(kind)}), fingerprint {source.fingerprint}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f'<h1>{title}</h1><div class="facts">{facts}</div><div class="grid">\n{cards}\n</div></html>\n'
    )


def _card(source: RecordSource, index: int) -> str:
    try:
        record = source.record(index)
    except DataError as error:
        text = html.escape(str(error))
        return f'<div class="record"><div class="key">{index}</div><p class="bad">{text}</p></div>'
    key = html.escape(str(record.get(KEY, index)))
    fields = "".join(_field(name, value) for name, value in record.items() if name != KEY)
    return f'<div class="record"><div class="key">{index} · {key}</div>{fields}</div>'


def _field(name: str, value: Field) -> str:
    label = f'<span class="name">{html.escape(name)}</span> '
    if not isinstance(value, bytes):
        return f"<p>{label}{html.escape(shown_field(value))}</p>"
    ending = name.rpartition(".")[2].lower()
    try:
        decoder = decoder_of(name)
        if decoder is decode_image:
            image = decode_image(value, at_least=_THUMBNAIL_PIXELS)
            return f'<img alt="{html.escape(name)}" src="{_thumbnail(image)}">'
        if ending in AUDIO_FIELDS + VIDEO_FIELDS and len(value) <= _MAX_MEDIA_BYTES:
            return _media(ending, value)
        shown = decoder(value) if decoder else value
    except Exception as error:
        return f'<p class="bad">{label}cannot be decoded: {html.escape(str(error))}</p>'
    return f"<p>{label}{html.escape(shown_field(shown))}</p>"


def _thumbnail(image: Any) -> str:
    pillow = package("PIL.Image", extra="images", needed_for="thumbnails")
    picture = pillow.fromarray(np.asarray(image))
    picture.thumbnail((_THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS))
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode()


def _media(ending: str, content: bytes) -> str:
    tag = "video" if ending in VIDEO_FIELDS else "audio"
    encoded = base64.b64encode(content).decode()
    return f'<{tag} controls src="data:{tag}/{ending};base64,{encoded}"></{tag}>'
