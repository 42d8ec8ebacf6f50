"""A profile as one self-contained HTML file: inline pictures, no scripts, nothing fetched."""

from collections.abc import Mapping
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined

import meshwright
from meshwright import svg
from meshwright.observe.profile.pictures import (
    breakdown_picture,
    classes_picture,
    lanes_picture,
    memory_picture,
    pipeline_picture,
)
from meshwright.observe.profile.terminal import gain_text, rates_line
from meshwright.units import show_bytes, show_count, show_seconds


def profile_page(document: Mapping[str, Any], timeline: Mapping[str, Any] | None) -> str:
    """The page of a profile document, and of its pipeline timeline where there is one."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"seconds": show_seconds, "bytes": show_bytes, "count": show_count}
    source = (
        resources.files("meshwright.observe.profile").joinpath("profile.html.j2").read_text(encoding="utf-8")
    )
    memory = document["memory"]
    return environment.from_string(source).render(
        profile=document,
        cards=_cards(document),
        rates=rates_line(document),
        changes=[{**change, "gain_text": gain_text(change)} for change in document["changes"]],
        svg_style=svg.style_sheet(),
        lanes=lanes_picture(document),
        breakdown=breakdown_picture(document),
        class_bars=classes_picture(document),
        memory=memory_picture(memory) if memory else "",
        pipeline=pipeline_picture(timeline) if timeline else "",
        footer=f"meshwright {meshwright.__version__}, fingerprint {document['fingerprint']}",
    )


def _cards(document: Mapping[str, Any]) -> list[dict[str, str]]:
    step = document["shares_of_seconds"]
    mfu = document["mfu"]
    share = document["tensor_core_share"]
    peak = document["peak_bytes"] or (document["memory"] or {}).get("peak_bytes")
    values = (
        (
            "step",
            show_seconds(document["step_seconds"]),
            "without the profiler" if document["is_timed"] else "profiled",
        ),
        ("tokens per second", show_count(document["tokens_per_second"]), "all ranks"),
        ("MFU", "not known" if mfu is None else f"{mfu:.1%}", "of the dense data-sheet peak"),
        ("tensor cores", "none" if share is None else f"{share:.0%}", "of the kernel time"),
        ("gaps", f"{document['gap_seconds'] / step:.1%}", "of the step, nothing runs"),
        ("exposed communication", f"{document['exposed_seconds'] / step:.1%}", "of the step"),
        ("data wait", f"{document['data_seconds'] / step:.1%}", "of the step"),
        ("peak memory", "not known" if peak is None else show_bytes(peak), "allocated on a rank"),
    )
    return [{"name": name, "value": value, "note": note} for name, value, note in values]
