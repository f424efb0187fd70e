"""What enters the hot tier by being read."""

import pytest

from tierfs.blocks.ids import ObjectKey
from tierfs.policy.admission import HotAdmission, Mode

KEY = ObjectKey(b"k" * 16)


@pytest.mark.parametrize(
    ("mode", "opens_s", "admitted"),
    [
        ("first", [], True),
        ("first", [0.0], True),
        ("second", [], False),
        ("second", [0.0], False),
        ("second", [0.0, 0.1, 0.5, 4.9], False),  # llama.cpp's four opens are one load
        ("second", [0.0, 60.0], True),
        ("second", [0.0, 0.1, 5.0], True),
        ("pinned", [0.0, 60.0, 120.0], False),
    ],
)
def test_admission_by_loads(mode: Mode, opens_s: list[float], admitted: bool) -> None:
    admission = HotAdmission(mode)
    for now_s in opens_s:
        admission.opened(KEY, now_s)
    assert admission.admits(KEY) is admitted


@pytest.mark.parametrize(("mode", "admitted"), [("first", True), ("second", False), ("pinned", True)])
def test_what_is_pinned_enters_where_pins_decide(mode: Mode, admitted: bool) -> None:
    assert HotAdmission(mode).admits(KEY, pinned=True) is admitted


def test_contents_are_counted_apart() -> None:
    admission = HotAdmission("second")
    admission.opened(KEY, 0.0)
    admission.opened(ObjectKey(b"o" * 16), 60.0)
    assert not admission.admits(KEY)
