"""The page of private torch APIs names every file that uses one."""

import ast
from pathlib import Path

import meshwright

SOURCE = Path(meshwright.__file__).parent
PAGE = SOURCE.parents[1] / "docs/decisions/2026-11-15-private-torch-apis.md"
# Attributes of a value that torch made; modules and classes are found by their path.
PRIVATE_ATTRIBUTES = {"_cdata", "_version", "_overloadpacket", "_schema", "_boxed_call", "_inference_mode"}


def uses_private_torch(path: Path) -> bool:
    return any(_is_private(node) for node in ast.walk(ast.parse(path.read_text())))


def _is_private(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
        names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        return any(name.startswith("_") for name in names)
    if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
        owner = ast.unparse(node.value)
        is_torch = owner.split(".")[0] in ("torch", "_aten", "distributed_c10d", "schedules")
        return is_torch or node.attr in PRIVATE_ATTRIBUTES or (owner, node.attr) == ("super()", "_apply")
    return isinstance(node, ast.ImportFrom) and node.module == "unittest.mock"


def test_every_file_is_on_the_page() -> None:
    files = [path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if uses_private_torch(path)]
    page = PAGE.read_text()
    assert len(files) > 15
    assert [file for file in files if f"`{file}`" not in page] == []


def test_every_file_of_the_page_exists() -> None:
    named = {word for word in PAGE.read_text().split("`") if word.endswith(".py") and "/" in word}
    assert [name for name in named if not (SOURCE / name).exists()] == []
