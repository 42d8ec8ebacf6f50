"""A folder of packages as `pip install meshwright` installs them: the base requirements, no torch."""

import importlib.metadata
from pathlib import Path

from packaging.requirements import Requirement


def base_packages(name: str = "meshwright") -> set[str]:
    """The distributions that installing `name` without extras brings, itself left out."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for text in importlib.metadata.requires(waiting.pop()) or []:
            requirement = Requirement(text)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and requirement.name.lower() not in found:
                found.add(requirement.name.lower())
                waiting.append(requirement.name)
    return found


def link_packages(folder: Path) -> None:
    """Link exactly those distributions into `folder`."""
    for package in base_packages():
        distribution = importlib.metadata.distribution(package)
        tops = {
            file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")
        }
        for top in tops:
            (folder / top).symlink_to(Path(str(distribution.locate_file(top))))
