"""The token is changed at the server, or is wrong."""

import time
from collections.abc import Callable

import pytest

from tests.faults.source_world import SourceWorld
from tests.integration.processes import eventually

pytestmark = pytest.mark.fuse

OLD, NEW = "o" * 40, "n" * 40


def test_a_token_that_is_refused_is_an_errno_that_says_so_and_the_right_one_heals(
    source_world: Callable[..., SourceWorld],
) -> None:
    world = source_world(token=OLD)
    world.server.kill()
    world.token_file.write_text(NEW)
    world.server.start()
    world.proxy.cut()
    outcome = world.read("b")
    assert outcome.what in ("EACCES", "EIO") and outcome.took_s < 8
    world.others_are_fine()
    eventually(lambda: "token" in world.mounted.status()["source"]["reason"], "status names the token")
    before = world.proxy.connections
    time.sleep(3)
    assert world.proxy.connections - before < 30, "a refused client does not knock in a busy loop"
    assert 1 <= world.said("source_down") <= 3
    assert OLD not in world.mounted.log() and NEW not in world.mounted.log()
    world.log_is_short()
    world.server.kill()
    world.token_file.write_text(OLD)
    world.server.start()
    world.proxy.cut()
    world.heals("b", "c")
