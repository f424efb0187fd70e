"""Several addresses of one server are several RDMA ports: its clients' connections take them in turn."""

import socket
from pathlib import Path
from typing import Any

import trio

from tests.integration.rdma_serving import Memory
from tests.integration.serving import BLOCK_BYTES, eventually, exporting, file_of, pattern, run, running
from tierfs.blocks.spans import Span
from tierfs.config.addresses import Address
from tierfs.server.listener import Server
from tierfs.server.rdma import RdmaService
from tierfs.testing.verbs import Fabric, roce_port
from tierfs.tiers.remote import RemoteSource
from tierfs.tiers.remote_rdma import RdmaReader
from tierfs.transport import tcp

HOSTS = ("127.0.0.1", "127.0.0.2")
NAME = "storage.test"


class Names(trio.abc.HostnameResolver):
    """NAME has every address of HOSTS."""

    async def getaddrinfo(self, host: Any, port: Any, *rest: Any, **options: Any) -> Any:
        await trio.lowlevel.checkpoint()
        hosts = HOSTS if host in (NAME, NAME.encode()) else (host,)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, int(port))) for one in hosts]

    async def getnameinfo(self, sockaddr: Any, flags: Any) -> Any:
        raise NotImplementedError


def test_each_connection_starts_at_another_address_and_goes_on_to_the_next() -> None:
    async def main() -> None:
        trio.socket.set_custom_hostname_resolver(Names())
        first = tcp.listen(Address(HOSTS[0], 0))
        port = first.getsockname()[1]
        second = tcp.listen(Address(HOSTS[1], port))
        reached = []
        for turn in range(4):
            connection = await tcp.connect(Address(NAME, port), timeout_s=5, turn=turn)
            reached.append(connection._socket.getpeername()[0])
            connection.close()
        assert reached == [*HOSTS, *HOSTS]
        second.close()
        connection = await tcp.connect(Address(NAME, port), timeout_s=5, turn=1)
        assert connection._socket.getpeername()[0] == HOSTS[0]
        connection.close()
        first.close()

    run(main)


def test_queue_pairs_are_made_on_every_port_of_the_server(tmp_path: Path) -> None:
    data = pattern(6 * BLOCK_BYTES)
    (tmp_path / "file").write_bytes(data)

    async def main() -> None:
        trio.socket.set_custom_hostname_resolver(Names())
        fabric = Fabric()
        ports = (roce_port(b"\x7f\x00\x00\x01", device="fake0"), roce_port(b"\x7f\x00\x00\x02", device="fake1"))
        service = RdmaService(lambda: fabric.machine(*ports), memory_bytes=64 << 20)
        memory = Memory()
        async with exporting(tmp_path) as export, trio.open_nursery() as nursery:
            free = tcp.listen(Address(HOSTS[0], 0))
            port = free.getsockname()[1]
            free.close()
            listen = [Address(host, port) for host in HOSTS]
            await nursery.start(Server({"": export}, listen=listen, tokens={}, rdma=service).run)
            reader = RdmaReader(fabric.machine, source="test", timeout_s=5)
            url = f"tierfs://{NAME}:{port}/"
            async with running(RemoteSource(url, connections=4, rdma=reader)) as source:
                publication = await source.publication()
                await source.use_memory(memory.whole, block_bytes=BLOCK_BYTES, key="memory.limit")
                await eventually(lambda: fabric.open["queue_pair"] == 8)
                assert {pair.domain.device.name for pair in fabric.pairs.values()} == {"fake0", "fake1"}
                version, _ = file_of(publication, b"file")
                for block in range(6):
                    await source.read_into(version, Span(block, 0, BLOCK_BYTES), memory.slot(block))
                    assert memory.slot(block) == data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
                assert source.statistics().rdma_blocks == 6
            nursery.cancel_scope.cancel()

    run(main)
