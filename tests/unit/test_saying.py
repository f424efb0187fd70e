"""What people are shown holds no character that a terminal obeys."""

import ast
from pathlib import Path

import pytest

from tierfs.blocks.text import printable
from tierfs.cli.saying import say

CLI = Path(__file__).parents[2] / "tierfs" / "cli"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("модель-权重.bin", "модель-权重.bin"),
        ("\x1b]0;title\x07", "?]0;title?"),
        ("a\nb\r\tc", "a?b??c"),
        ("\u202egpj.bin", "?gpj.bin"),  # what follows would be shown from right to left
        ("\x9b31m", "?31m"),  # the same as ESC [ in eight bits
        ("not utf-8: \udcff", "not utf-8: ?"),
    ],
)
def test_what_is_not_printable_is_a_question_mark(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printable(text) == shown
    say(text)
    assert capsys.readouterr().out == shown + "\n"


def test_commands_print_for_people_in_one_place_only() -> None:
    """Everything else that is printed is JSON, which escapes by itself."""
    others = []
    for path in sorted(CLI.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"):
                continue
            if path.name != "saying.py" and not ast.unparse(node.args[0]).startswith("json.dumps("):
                others.append(f"{path.name}:{node.lineno}")
    assert others == []
