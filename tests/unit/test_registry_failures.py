"""The reason a daemon leaves when it cannot start, beside the record of the one before it."""

import os
from pathlib import Path

import pytest

from tierfs.blocks.errors import ControlError
from tierfs.control import registry
from tierfs.control.socket import ask

PLACE = "/mnt/models"


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.ENVIRONMENT, str(tmp_path))


def record() -> registry.Record:
    pid, started = os.getpid(), registry.process_start(os.getpid())
    return registry.Record(PLACE, pid, started, str(registry.socket_path(PLACE)), "mount.toml", daemon_pid=1)


def test_the_reason_is_one_line_that_a_question_to_the_missing_daemon_tells() -> None:
    registry.write(record())
    assert registry.failure(record()) == ""
    registry.write_failure(PLACE, "the tier\nis in use" + 5000 * "!")
    assert registry.failure(record()).startswith("the tier is in use!")
    assert len(registry.failure(record())) == 2000
    with pytest.raises(ControlError, match="has no daemon just now.*could not start: the tier is in use"):
        next(ask(record(), "status"))
    assert [one.mountpoint for one in registry.records()] == [PLACE]


def test_the_reason_goes_with_the_next_daemon_and_when_it_is_forgotten(tmp_path: Path) -> None:
    for end in (registry.write, registry.forget_failure, lambda _: registry.remove(PLACE)):
        registry.write(record())
        registry.write_failure(PLACE, "broken")
        assert registry.failure(record()) == "broken"
        end(record())
        assert registry.failure(record()) == ""
    assert list(tmp_path.iterdir()) == []


def test_a_first_daemon_leaves_none(tmp_path: Path) -> None:
    registry.write_failure(PLACE, "broken")  # the command that mounts tells it
    assert list(tmp_path.iterdir()) == []
