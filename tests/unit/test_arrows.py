"""The import arrows: a layer uses only layers below it, and the pure ones touch nothing outside."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = [
    "blocks", "config", "catalog", "formats", "wire", "policy", "transport", "tiers",
    "cache", "server", "fs", "fuse", "control", "app", "cli",
]  # fmt: skip
HEIGHT = {layer: height for height, layer in enumerate(LAYERS)}
PURE = {"policy", "wire", "formats", "blocks"}
IMPURE_MODULES = {
    "trio", "os", "socket", "threading", "time", "random", "sqlite3", "pyfuse3", "asyncio", "subprocess", "secrets",
    "select", "ssl", "mmap", "ctypes", "tempfile", "shutil", "multiprocessing", "concurrent", "io", "logging",
}  # fmt: skip
ONLY_IN = {"pyfuse3": {"fuse"}, "typer": {"cli"}, "rich": {"cli"}}
FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "tierfs").rglob("*.py") if "__pycache__" not in path.parts)


def imports(path: Path) -> list[tuple[int, str]]:
    """Every module a file imports, anywhere in it, with its line; ``from a import b`` counts as a.b too."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse((ROOT / path).read_bytes())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    return (
        parts[1] if parts[0] == "tierfs" and len(parts) > 1 and (parts[1] in HEIGHT or parts[1] == "testing") else None
    )


def violations(path: Path, modules: list[tuple[int, str]]) -> list[str]:
    layer = path.parts[1] if len(path.parts) > 2 else ""
    wrong: list[str] = []
    for line, module in modules:
        at = f"{path}:{line}: imports {module}"
        top, target = module.split(".")[0], layer_of(module)
        if layer in PURE and top in IMPURE_MODULES:
            wrong.append(f"{at}, but {layer} is pure")
        if top in ONLY_IN and layer not in ONLY_IN[top] | {"testing"}:
            wrong.append(f"{at}, which only {', '.join(sorted(ONLY_IN[top]))} may")
        if target is None or layer == "testing":
            continue
        if target == "testing":
            if path.as_posix() != "tierfs/cli/simulate.py":
                wrong.append(f"{at}, which only tests and the simulate command may")
        elif layer not in HEIGHT or HEIGHT[target] > HEIGHT[layer]:
            wrong.append(f"{at}, which is above it")
    return wrong


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_downwards_only(path: Path) -> None:
    assert not violations(path, imports(path))


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("tierfs/blocks/ids.py", "tierfs.config.schema.X"),
        ("tierfs/policy/eviction.py", "time"),
        ("tierfs/wire/frames.py", "os.path"),
        ("tierfs/cache/mover.py", "pyfuse3"),
        ("tierfs/app/mount.py", "rich.table.Table"),
        ("tierfs/fs/tree.py", "tierfs.fuse"),
        ("tierfs/app/mount.py", "tierfs.testing.fakes"),
        ("tierfs/loose.py", "tierfs.blocks.ids"),
    ],
)
def test_a_wrong_import_is_noticed(path: str, module: str) -> None:
    assert violations(Path(path), [(1, module)])


def test_every_folder_is_a_known_layer_and_says_what_it_is() -> None:
    for folder in sorted({path.parts[1] for path in FILES if len(path.parts) > 2}):
        assert folder in HEIGHT or folder == "testing", f"tierfs/{folder} is no layer"
        assert (ROOT / "tierfs" / folder / "__init__.py").is_file(), f"tierfs/{folder} has no __init__.py"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_every_file_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse((ROOT / path).read_bytes())), f"{path} has no docstring at its head"
