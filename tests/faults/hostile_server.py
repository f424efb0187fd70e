"""A server that keeps the protocol only where that helps it to lie, in a thread of its own, for real mounts."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

from tests.integration.scripted_server import Script, scripted

_START_S = 10.0


class Hostile:
    """A running script."""

    def __init__(self, script: Script, url: str, token: trio.lowlevel.TrioToken, scope: trio.CancelScope) -> None:
        self.script, self.url = script, url
        self._token, self._scope = token, scope

    def do(self, action: Callable[[], object]) -> None:
        """Run this in the server's thread, between two of its steps; return when it is done."""
        done = threading.Event()

        def run() -> None:
            action()
            done.set()

        self._token.run_sync_soon(run)
        assert done.wait(_START_S), "the server does not go on"

    def stop(self) -> None:
        """End the server."""
        self._token.run_sync_soon(self._scope.cancel)


@contextmanager
def hostile(script: Script) -> Iterator[Hostile]:
    """Run the script's server until the end of the block."""
    up = threading.Event()
    running: list[Hostile] = []

    async def main() -> None:
        with trio.CancelScope() as scope:
            async with scripted(script) as url:
                running.append(Hostile(script, url, trio.lowlevel.current_trio_token(), scope))
                up.set()
                await trio.sleep_forever()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    try:
        assert up.wait(_START_S), "the server does not listen"
        yield running[0]
    finally:
        for server in running:
            server.stop()
        thread.join(_START_S)
        assert not thread.is_alive()
