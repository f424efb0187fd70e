"""What the server asks of the thing it exports. DirectorySource has this interface; the server's tests have another."""

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from tierfs.blocks.ids import BlockDigest, VersionId
from tierfs.catalog.schema import Publication


class OpenBlock(Protocol):
    """One block that can be sent: bytes in a file, or in memory. Valid inside the ``async with`` that made it."""

    @property
    def digest(self) -> BlockDigest:
        """What the bytes should be."""

    @property
    def length_bytes(self) -> int:
        """Length of the block."""

    @property
    def fd(self) -> int | None:
        """The file that has the block from ``offset_bytes`` on; None: see ``data``."""

    @property
    def offset_bytes(self) -> int:
        """Where in ``fd`` the block starts."""

    @property
    def data(self) -> memoryview | None:
        """The block's bytes, where there is no ``fd``."""


class Exported(Protocol):
    """An export: publications, and blocks to send. The one who made it keeps it running."""

    async def publication(self) -> Publication:
        """The newest publication; waits for the first one."""

    async def wait_changed(self, revision: int) -> Publication:
        """Wait for another revision than this one."""

    def open_block(self, version: VersionId, block: int) -> AbstractAsyncContextManager[OpenBlock]:
        """The block, opened. Raises StaleVersion, NotFound, SourceUnavailable, SourceRefused."""
