"""docs/OPERATING.md names every log event and every error message that a user can meet."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tierfs.blocks import errors

ROOT = Path(__file__).resolve().parents[2]
_LEVELS = ("debug", "info", "warning", "error", "exception", "critical")
_ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type)}
_HOLE = "…"


def _text(node: ast.expr) -> str | None:
    """A literal or f-string, with … for what differs; None for what is computed elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else _HOLE for part in node.values)
    return None


def _calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted((ROOT / "tierfs").rglob("*.py")):
        if "testing" not in path.parts:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def _events() -> Iterator[tuple[str, str]]:
    for where, call in _calls():
        function = call.func
        if (
            isinstance(function, ast.Attribute)
            and function.attr in _LEVELS
            and isinstance(function.value, ast.Name)
            and function.value.id in ("log", "_log", "logger")
            and (text := _text(call.args[0])) is not None
            and re.fullmatch(r"[a-z_]+", event := text.split(" ")[0])
        ):
            yield where, event


def _messages() -> Iterator[tuple[str, str]]:
    for where, call in _calls():
        if (
            isinstance(call.func, ast.Name)
            and call.func.id in _ERRORS
            and call.args
            and (text := _text(call.args[0])) is not None
            and re.search(r"[a-z]{2}", text.replace(_HOLE, ""))
        ):
            yield where, text.strip()


def test_every_log_event_is_explained() -> None:
    named = set(re.findall(r"`([a-z_]+)`", (ROOT / "docs/OPERATING.md").read_text()))
    events = list(_events())
    assert len(events) > 100
    assert [f"{where} {event}" for where, event in events if event not in named] == []


def test_every_error_message_is_listed() -> None:
    page = (ROOT / "docs/OPERATING.md").read_text().replace("\\|", "|")
    messages = list(_messages())
    assert len(messages) > 200
    assert [f"{where} {message}" for where, message in messages if message not in page] == []
