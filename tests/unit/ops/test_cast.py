"""No Function ends in a call that may hand its input through: see `meshwright.ops.cast`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import meshwright

SOURCE = Path(meshwright.__file__).parent
HANDED_THROUGH = {"to", "float", "double", "bfloat16", "half", "type", "type_as", "contiguous", "cuda", "cpu"}


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any("autograd.Function" in ast.unparse(b) for b in node.bases):
            yield from (
                (node.name, one)
                for one in node.body
                if isinstance(one, ast.FunctionDef) and one.name == "forward"
            )


def _ends(function: ast.FunctionDef, module: dict[str, ast.FunctionDef]) -> Iterator[ast.expr]:
    """What is returned, one by one, looked up where it is a local name or a function of the same file."""
    values = {
        node.targets[0].id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            for part in parts:
                end = values.get(part.id, part) if isinstance(part, ast.Name) else part
                called = end.func.id if isinstance(end, ast.Call) and isinstance(end.func, ast.Name) else ""
                if called in module:
                    yield from _ends(module[called], module)
                else:
                    yield end


def _faults(text: str) -> list[str]:
    tree = ast.parse(text)
    module = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    return [
        f"{name}: {ast.unparse(end)}"
        for name, forward in _functions(tree)
        for end in _ends(forward, module)
        if isinstance(end, ast.Call)
        and isinstance(end.func, ast.Attribute)
        and end.func.attr in HANDED_THROUGH
    ]


def test_no_function_ends_in_a_cast() -> None:
    files = [path for path in SOURCE.rglob("*.py") if "autograd.Function" in path.read_text()]
    assert len(files) > 8
    assert {path.name: faults for path in files if (faults := _faults(path.read_text()))} == {}


def test_such_an_end_is_seen() -> None:
    text = """
def helper(x):
    return (x * 2).to(x.dtype)

class Direct(torch.autograd.Function):
    def forward(ctx, x):
        y = x.contiguous()
        return y, 3

class Through(torch.autograd.Function):
    def forward(ctx, x):
        return helper(x)

class Sound(torch.autograd.Function):
    def forward(ctx, x):
        return x.to(torch.float32) * 2
"""
    assert _faults(text) == ["Direct: x.contiguous()", "Through: (x * 2).to(x.dtype)"]
