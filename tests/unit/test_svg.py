"""The SVG writer: well-formed, escaped, and readable on light and on dark pages."""

from xml.etree import ElementTree

import pytest

from meshwright import svg

NAMESPACE = "{http://www.w3.org/2000/svg}"


def test_text_and_attributes_are_escaped() -> None:
    drawn = svg.document(
        [svg.text(1, 2, "a < b & c"), svg.rect(0, 0, 1, 1, title='"q"')], 10, 10, label='"<&'
    )
    root = ElementTree.fromstring(drawn)
    assert root.get("aria-label") == '"<&'
    assert root.findtext(f"{NAMESPACE}text") == "a < b & c"
    assert root.findtext(f"{NAMESPACE}rect/{NAMESPACE}title") == '"q"'


def test_named_colours_are_classes_and_others_attributes() -> None:
    assert svg.rect(0, 0, 1, 1, fill="ink") == '<rect class="fill-ink" x="0" y="0" width="1" height="1"/>'
    assert 'fill="#4c78a8"' in svg.rect(0, 0, 1, 1, fill="#4c78a8")
    assert 'class="grid stroke-grid"' in svg.element("path", class_="grid", stroke="grid")


def test_every_named_colour_exists_for_light_and_for_dark_pages() -> None:
    assert svg.LIGHT.keys() == svg.DARK.keys()
    light, dark = svg.style_sheet().split("@media (prefers-color-scheme: dark)")
    for name in svg.LIGHT:
        assert f".fill-{name}{{fill:{svg.LIGHT[name]}}}" in light
        assert f".fill-{name}{{fill:{svg.DARK[name]}}}" in dark


def luminance(colour: str) -> float:
    """Relative luminance of a colour by WCAG."""
    channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [svg.LIGHT, svg.DARK], ids=["light", "dark"])
@pytest.mark.parametrize(("name", "least"), [("ink", 10.0), ("soft", 5.0), ("faint", 4.5)])
def test_text_can_be_read_on_its_page(colours: dict[str, str], name: str, least: float) -> None:
    for ground in ("page", "panel"):
        assert contrast(colours[name], colours[ground]) >= least


def test_a_file_has_a_ground_of_its_own() -> None:
    root = ElementTree.fromstring(svg.document([], 20, 10))
    ground = root.find(f"{NAMESPACE}rect")
    assert ground is not None and ground.attrib == {
        "class": "fill-page", "x": "0", "y": "0", "width": "20", "height": "10"
    }  # fmt: skip
    assert "prefers-color-scheme" in (root.findtext(f"{NAMESPACE}style") or "")


def test_scales_place_values() -> None:
    assert svg.Scale(0, 10, 100, 200).place(5) == 150
    assert svg.Scale(1, 100, 0, 10, is_log=True).place(10) == pytest.approx(5)
    assert svg.Scale(3, 3, 7, 9).place(3) == 7


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 5.1, [0, 1, 2, 3, 4, 5]),
        (0.0, 0.31, [0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3]),
        (-1.0, 1.0, [-1.0, -0.5, 0.0, 0.5, 1.0]),
        (0.0, 40_000.0, [0, 10_000, 20_000, 30_000, 40_000]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert svg.round_ticks(low, high) == expected


def test_a_legend_wraps_into_rows() -> None:
    entries = [svg.Entry(f"part {index}", "#4c78a8") for index in range(20)]
    parts, last = svg.box_legend(entries, left=0, right=400, y=14)
    assert len(parts) == 40 and last > 14
