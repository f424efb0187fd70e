"""The FUSE requests of a read-only file system, as pyfuse3 hands them over.

Thin: inode number or handle in, one call of fs/, attributes or bytes out, TierfsError to errno. A handle of a file is
its inode number, which says the version by itself. Requests that would write are answered EROFS (the kernel answers
most of them itself, since the mount is read-only).

Under a channel a READ is answered with the places where its bytes lie, and an OPEN comes after an offer of the whole
file, if a tier has it.
"""

import errno
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FUSEError

from tierfs.blocks.errors import TierfsError
from tierfs.cache import latency
from tierfs.cache.block_cache import FileFacts
from tierfs.cache.model_loads import ModelLoad, ModelLoads
from tierfs.catalog.schema import NAME_LIMIT_BYTES, Kind
from tierfs.fs.filesystem import Filesystem
from tierfs.fs.tree import Node
from tierfs.fuse.channel import Channel
from tierfs.fuse.errnos import errno_of

log = logging.getLogger(__name__)

_TYPE = {Kind.DIRECTORY: stat.S_IFDIR, Kind.FILE: stat.S_IFREG, Kind.SYMLINK: stat.S_IFLNK}
_BLOCK_BYTES = 4096  # of statfs and st_blksize: what df and cp expect; no relation to tierfs's blocks
_XATTR_CONTENT = b"user.tierfs.content"
_XATTR_RESIDENT = b"user.tierfs.resident"


@dataclass(frozen=True)
class Presentation:
    """How entries look: the owner of everything, and for how long the kernel may keep names and attributes."""

    uid: int
    gid: int
    metadata_ttl_s: float


@dataclass
class RequestStatistics:
    """What `status` tells of requests."""

    reads: int = 0
    read_bytes: int = 0
    failed: int = 0
    running: dict[int, float] = field(default_factory=dict)  # request number -> time.monotonic() of its start
    latencies: latency.Latencies = field(default_factory=latency.Latencies)

    def oldest_s(self) -> float:
        """Age of the oldest request that is not answered yet."""
        return max((time.monotonic() - start for start in self.running.values()), default=0.0)


class Operations(pyfuse3.Operations):
    """See the head of this file."""

    supports_dot_lookup = True
    enable_writeback_cache = False
    enable_acl = False

    def __init__(
        self,
        filesystem: Filesystem,
        presentation: Presentation,
        channel: Channel | None = None,
        loads: ModelLoads | None = None,
    ) -> None:
        super().__init__()
        self._loads = loads or ModelLoads()
        self._fs = filesystem
        self._channel = channel
        self.presentation = presentation
        self._next_request = 0
        self.statistics = RequestStatistics()

    # -- names ------------------------------------------------------------------------------------------------------

    async def lookup(self, parent_inode: int, name: bytes, ctx: object) -> EntryAttributes:
        with self._answering():
            node = self._fs.lookup(parent_inode, name)
            return self._attributes(node, self._fs.tree.links(node))

    async def getattr(self, inode: int, ctx: object) -> EntryAttributes:
        with self._answering():
            return self._attributes(*self._fs.attributes(inode))

    async def readlink(self, inode: int, ctx: object) -> bytes:
        with self._answering():
            return self._fs.node(inode).entry.target

    async def opendir(self, inode: int, ctx: object) -> int:
        with self._answering():
            return self._fs.open_directory(inode)

    async def readdir(self, fh: int, start_id: int, token: "pyfuse3.ReaddirToken") -> None:
        with self._answering():
            position = start_id
            for name, node, links in self._fs.entries(fh, start_id):
                position += 1
                if not pyfuse3.readdir_reply(token, name, self._attributes(node, links), position):
                    return

    async def releasedir(self, fh: int) -> None:
        with self._answering():
            self._fs.close_directory(fh)

    async def forget(self, inode_list: object) -> None:
        """Nothing to do: no lookup counts are kept."""

    # -- files ------------------------------------------------------------------------------------------------------

    async def open(self, inode: int, flags: int, ctx: object) -> pyfuse3.FileInfo:
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & (os.O_TRUNC | os.O_CREAT):
            raise FUSEError(errno.EROFS)
        with self._answering():
            view = self._fs.open(inode)
        if self._channel is not None:
            await self._offer(self._channel, inode, view.facts)
        # An inode number stands for one version, so pages the kernel kept from an earlier open are still right.
        return pyfuse3.FileInfo(fh=inode, keep_cache=True)

    async def read(self, fh: int, off: int, size: int) -> memoryview | bytes | bytearray:  # type: ignore[override]
        number = self._next_request = self._next_request + 1
        statistics = self.statistics
        request = latency.begin()
        began_s = statistics.running[number] = time.monotonic()
        channel = self._channel
        load: ModelLoad | None = None
        try:
            view = self._fs.view(fh)
            load = self._loads.read_begins(view.facts, began_s)
            if channel is None:
                data = await view.read(off, size)
                length = len(data)
            else:
                parts = await view.locate(off, size)
                length = sum(part.length_bytes for part in parts)
                data = await channel.reply(parts, file_bytes=view.facts.size_bytes)
            ended_s = time.monotonic()
            self._loads.read_ends(load, view.facts, off, length, request.place, began_s, ended_s)
            load = None
        except trio.TooSlowError as error:
            statistics.failed += 1
            log.error("request_timeout path=%r offset=%d size=%d", view.facts.path, off, size)
            raise FUSEError(errno.EIO) from error
        except TierfsError as error:
            statistics.failed += 1
            raise FUSEError(errno_of(error)) from error
        except Exception as error:
            raise self._bug(error) from error
        finally:
            del statistics.running[number]
            if load is not None:
                self._loads.read_failed(load, view.facts, off, began_s, time.monotonic())
        statistics.reads += 1
        statistics.read_bytes += length
        statistics.latencies.add(request.place, ended_s - began_s)
        # From here to the reply there is no checkpoint: the view may point into a buffer or a mapping, and a lease that
        # is not sent would stay out.
        return data

    async def flush(self, fh: int) -> None:
        # Answered once; the kernel never asks again. A killed reader's exit must not wait for a FLUSH.
        raise FUSEError(errno.ENOSYS)

    async def fsync(self, fh: int, datasync: bool) -> None:
        """Nothing is ever dirty."""

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        """Nothing is ever dirty."""

    async def release(self, fh: int) -> None:
        with self._answering():
            self._fs.close(fh)

    # -- attributes of the mount and of files ------------------------------------------------------------------------

    async def access(self, inode: int, mode: int, ctx: object) -> bool:
        # With default_permissions the kernel decides from mode and owner, and the mount is read-only.
        return not mode & os.W_OK

    async def statfs(self, ctx: object) -> pyfuse3.StatvfsData:
        with self._answering():
            tree = self._fs.tree
            data = pyfuse3.StatvfsData()
            data.f_bsize = data.f_frsize = _BLOCK_BYTES
            data.f_blocks = max(1, -(-tree.total_bytes // _BLOCK_BYTES))
            data.f_bfree = data.f_bavail = 0
            data.f_files = len(tree.catalog.entries)
            data.f_ffree = data.f_favail = 0
            data.f_namemax = NAME_LIMIT_BYTES
            return data

    async def getxattr(self, inode: int, name: bytes, ctx: object) -> bytes:
        if not name.startswith(b"user."):
            # `ls -l` asks for labels and access control lists of each file, unless it is told that there are none here.
            raise FUSEError(errno.ENOTSUP)
        with self._answering():
            node, _ = self._fs.attributes(inode)
            if node.entry.kind is Kind.FILE and node.position >= 0:
                facts = self._fs.tree.facts(node)
                key = self._fs.cache.key(facts.version)
                if name == _XATTR_CONTENT and bytes(key) != facts.version:
                    return key.hex().encode()
                if name == _XATTR_RESIDENT:
                    parts = [f"{tier.name}={tier.resident_bytes(key)}" for tier in self._fs.cache.tiers]
                    return " ".join([*parts, f"size={facts.size_bytes}"]).encode()
        raise FUSEError(errno.ENODATA)

    async def listxattr(self, inode: int, ctx: object) -> list[bytes]:
        with self._answering():
            node, _ = self._fs.attributes(inode)
            if node.entry.kind is not Kind.FILE or node.position < 0:
                return []
            version = self._fs.tree.facts(node).version
            known = bytes(self._fs.cache.key(version)) != version
            return [_XATTR_CONTENT, _XATTR_RESIDENT] if known else [_XATTR_RESIDENT]

    # -- everything that would write -----------------------------------------------------------------------------

    async def _read_only(self, *arguments: object, **named: object) -> None:
        raise FUSEError(errno.EROFS)

    setattr = mknod = mkdir = unlink = rmdir = symlink = rename = link = _read_only  # type: ignore[assignment]
    write = create = setxattr = removexattr = _read_only  # type: ignore[assignment]

    # -- inside -----------------------------------------------------------------------------------------------------

    async def _offer(self, channel: Channel, inode: int, facts: FileFacts) -> None:
        """Let the kernel read the file by itself if a tier has all of it. The open succeeds whatever happens here."""
        try:
            lent = await self._fs.cache.whole(facts)
            if lent is not None and await channel.offer(inode, lent):
                self._loads.handed_out(facts, time.monotonic())
        except TierfsError as error:
            log.warning("offer_failed path=%r error=%s", facts.path, error)
        except Exception as error:
            log.error("offer_failed_by_bug path=%r error=%r", facts.path, error, exc_info=error)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except TierfsError as error:
            raise FUSEError(errno_of(error)) from error
        except FUSEError:
            raise
        except Exception as error:
            raise self._bug(error) from error

    @staticmethod
    def _bug(error: Exception) -> FUSEError:
        # An exception that escapes a handler ends pyfuse3's loop, and with it the mount: one request fails instead.
        log.error("request_failed_by_bug error=%r", error, exc_info=error)
        return FUSEError(errno.EIO)

    def _attributes(self, node: Node, links: int) -> EntryAttributes:
        entry = node.entry
        presentation = self.presentation
        attributes = EntryAttributes()
        attributes.st_ino = node.inode
        attributes.st_mode = _TYPE[entry.kind] | entry.mode
        attributes.st_nlink = links
        attributes.st_uid = presentation.uid
        attributes.st_gid = presentation.gid
        size = len(entry.target) if entry.kind is Kind.SYMLINK else entry.size_bytes
        attributes.st_size = size
        attributes.st_blocks = -(-size // 512)
        attributes.st_blksize = _BLOCK_BYTES
        attributes.st_atime_ns = attributes.st_mtime_ns = attributes.st_ctime_ns = entry.mtime_ns
        attributes.entry_timeout = attributes.attr_timeout = presentation.metadata_ttl_s
        return attributes
