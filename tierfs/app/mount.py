"""The mount daemon: builds every part from the configuration and runs them until it is told to stop.

    source ─ publication ─► tree ─► filesystem ─► operations ─► FUSE session
                 │                      │
                 └─ content ids ─► block cache ─► tiers (hot, warm)
    control socket: status, where, warm, stop (control/commands.py), pin, evict, verify, reload (control/operate.py)

In channel mode `tierfs-channel` owns the mount and started this process (fuse/channel.py): it mounts when asked, and
while another daemon follows this one (``epoch`` > 1) the mount, and what readers have open, stay.

Order of stopping: unmount (lazily, so that readers see an end at once), then the request loop, then the tiers, which
write their clean-stop mark. A watchdog ends the process if a stuck disk or source keeps that from finishing.
"""

import contextlib
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import trio

from tierfs.app import launch, places, scraped
from tierfs.app.limits import memory_notes, raise_descriptor_limit
from tierfs.app.parts import check_largest_read, make_source, make_tiers, offer_memory
from tierfs.app.reload import Reloader, Reread
from tierfs.blocks.errors import (
    ConfigError,
    ControlError,
    MountFailed,
    ProtocolError,
    SourceUnavailable,
    TierfsError,
    first,
)
from tierfs.blocks.ids import VersionId
from tierfs.blocks.units import format_bytes
from tierfs.cache.block_cache import BlockCache
from tierfs.cache.buffers import BufferPool
from tierfs.cache.model_loads import ModelLoads
from tierfs.cache.prefetcher import Prefetcher
from tierfs.cache.promoter import Promoter
from tierfs.catalog.load_store import LoadStore
from tierfs.catalog.pin_store import PinStore
from tierfs.catalog.remembered import Remembered
from tierfs.catalog.schema import Kind, Publication
from tierfs.catalog.superseded import SupersededStore
from tierfs.config.schema import MountConfig
from tierfs.control import commands, operate, registry
from tierfs.control import socket as control_socket
from tierfs.fs.filesystem import Filesystem
from tierfs.fs.inodes import Inodes
from tierfs.fs.pins import Pins
from tierfs.fs.tree import Tree
from tierfs.fuse.channel import Channel
from tierfs.fuse.kernel import KernelLimits, apply_limits, mount_at
from tierfs.fuse.operations import Operations, Presentation
from tierfs.fuse.session import Session
from tierfs.policy.readahead import ReadaheadConfig
from tierfs.tiers.interface import LocalTier, Source
from tierfs.tiers.local import DirectoryTier

log = logging.getLogger(__name__)

_BLOCKS_MIN = 16
_LISTINGS_S = 60.0  # how long a listing may pause while the daemon is replaced and the tree changes
_REMEMBERED_AFTER_S = 5.0  # how long a start waits for the source when it has a remembered publication
_TOLD_S = 1.0  # a channel that is stopped does not answer
_UNMOUNTED_S = 2.0  # the channel unmounts when it is told that the mount shall end
_CONTENT_BATCH_S = 1.0  # content ids arrive one by one while the server digests


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a daemon is started with.

    ``channel`` is what started this process, if a channel did: the mount is then the channel's, and being told to stop
    by a signal or by the channel leaves it there for the next daemon.

    With ``given_fd`` somebody else has mounted (fuse/given.py): ``mountpoint`` only names the mount, and the descriptor
    of that number is its /dev/fuse; under a channel, which has it, only its being given counts.

    ``reread`` gives the configuration anew for a reload; ``given_keys`` are those that this one was given. ``options``
    and ``config_path`` are for the record of the mount, by which it is started again. ``ready`` is called once
    readers may come, with what a person should know all the same, or nothing.
    """

    config: MountConfig
    mountpoint: str
    channel: Channel | None
    config_path: str
    reread: Reread
    given_keys: frozenset[str]
    options: list[str]
    log_file: str
    ready: Callable[[str], None]
    given_fd: int | None = None


def mount(start: Start) -> None:
    """Mount and serve until unmounted or told to stop (SIGTERM, SIGINT, the control socket).

    Raises a TierfsError when the mount cannot be made.
    """
    raise_descriptor_limit()
    channel, given = start.channel, start.given_fd is not None
    if channel is None or channel.epoch == 1:
        places.clear_the_way(start.config, start.mountpoint, given=given)
    daemon = _Mount(start)
    try:
        trio.run(daemon.run)
    except* TierfsError as group:
        raise first(group) from group
    finally:
        if channel is None or not (daemon.replaced if given else mount_at(start.mountpoint)):
            registry.remove(start.mountpoint)


class _Mount:
    def __init__(self, start: Start) -> None:
        self.replaced = False  # another daemon of this mount was announced
        self._start = start
        self._config, self._mountpoint, self._channel = start.config, start.mountpoint, start.channel
        self._reloader: Reloader | None = None
        self._stopping = trio.Event()
        self._note = ""
        self._state = launch.state_directory(start.config, start.mountpoint)
        try:
            self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._state.stat().st_mode & 0o077:  # made by an older version; the catalog in it names everything
                self._state.chmod(0o700)
        except OSError as error:
            raise ConfigError(f"state_dir: cannot make {self._state}: {error.strerror}") from error
        self._remembered = Remembered(self._state)
        self._superseded = SupersededStore(self._state / "superseded.json")
        self._pin_store = PinStore(self._state / "pins.json")
        self._loads = ModelLoads(LoadStore(self._state / "loads"), mountpoint=self._mountpoint)
        self._taking_over = start.channel is not None and start.channel.epoch > 1
        self._before: Publication | None = None  # what the daemon before this one showed

    async def run(self) -> None:
        config = self._config
        async with trio.open_nursery() as outer:
            outer.start_soon(self._signals, outer.cancel_scope)
            if self._channel is not None:
                self._channel.on_gone = lambda: self._end(outer.cancel_scope)
                self._channel.on_stop = lambda: self._make_room(outer.cancel_scope)
                await outer.start(_running, self._channel)
                await self._channel.hello()
            source = make_source(config)
            await outer.start(_running, source)
            inodes = Inodes(self._state / "inodes.json")
            publication, tree = await self._first_publication(source, inodes)
            block_bytes = publication.catalog.block_bytes
            source.count_in(block_bytes)
            if config.memory.limit < _BLOCKS_MIN * block_bytes:
                raise ConfigError(
                    f"memory.limit is {format_bytes(config.memory.limit)}, but the export's blocks are"
                    f" {format_bytes(block_bytes)} and {_BLOCKS_MIN} of them are needed: raise memory.limit"
                )
            gc.freeze()  # the tree is large, lives on, and has no cycles: collections need not walk it
            # A disk that cannot be used is a mistake to tell whoever mounts; but readers of a mount that is there need
            # bytes, from wherever, more than that disk.
            tiers = make_tiers(config, block_bytes, starts_without=self._taking_over)
            if self._channel is not None:
                check_largest_read(block_bytes, memory_limit_bytes=config.memory.limit)
                for tier in tiers:
                    tier.lender = self._channel
            # Before the tiers run: what is pinned must not be evicted in between.
            pins = Pins(tiers, self._pin_store, await trio.to_thread.run_sync(self._pin_store.load))
            pins.follow(tree)
            for tier in tiers:
                await outer.start(_running, tier)
                if tier.mapped and tier.statistics().medium == "directory":
                    log.warning("hot_tier_on_disk path=%s: neither a tmpfs nor DAX is mounted there", config.hot)
            pool = BufferPool(limit_bytes=config.memory.limit, block_bytes=block_bytes)
            cache = BlockCache(
                source=source,
                tiers=tiers,
                pool=pool,
                block_bytes=block_bytes,
                source_timeout_s=config.source.timeout,
                hot_admission=config.hot.admit if config.hot else "first",
            )
            if self._channel is not None:
                await self._channel.set_pool(pool)
                pool.sweep = self._channel.sweep
                self._channel.on_read_failed = cache.failed
            await offer_memory(source, pool)
            cache.learn(publication.contents)
            cache.is_pinned = pins.is_pinned
            cache.on_brought = self._loads.brought
            await outer.start(_running, self._loads)
            await outer.start(_running, cache)
            prefetcher = Prefetcher(cache, bytes_per_s=config.readahead.rate_max)
            await outer.start(_running, prefetcher)
            promoter = Promoter(cache, files_of=lambda model: filesystem.files_of_model(model))
            superseded = await trio.to_thread.run_sync(self._superseded.load)
            if not self._taking_over:  # nothing is open yet
                superseded = []
                await trio.to_thread.run_sync(self._superseded.replace, superseded)
            filesystem = Filesystem(
                tree,
                inodes=inodes,
                cache=cache,
                prefetcher=prefetcher,
                readahead=ReadaheadConfig(
                    window_min_bytes=config.readahead.window_min,
                    window_max_bytes=min(config.readahead.window_max, config.memory.limit // 2),
                    streams_max=config.readahead.streams_max,
                ),
                request_timeout_s=config.mount.request_timeout,
                superseded=superseded,
                on_open=promoter.opened,
            )
            if config.hot is not None:  # else no walk over all files before the mount
                promoter.resume(filesystem.files_below(b""))
            await outer.start(_running, promoter)
            if self._channel is not None and self._taking_over:
                await self._take_over(self._channel, filesystem, publication)
                outer.start_soon(_forget_listings, filesystem)
            await outer.start(lambda task_status: pins.run(cache, task_status=task_status))
            outer.start_soon(self._follow, source, filesystem, publication, pins)
            await self._serve(filesystem, prefetcher, promoter, pins, tiers)
            outer.cancel_scope.cancel()

    async def _take_over(self, channel: Channel, filesystem: Filesystem, publication: Publication) -> None:
        """Learn what is open from the daemon before this one: of the newest generation, or of one that is gone."""
        handles = await channel.handles()
        catalogs = await trio.to_thread.run_sync(self._remembered.earlier, time.time(), _LISTINGS_S)
        trees = [await trio.to_thread.run_sync(Tree, catalog, filesystem.inodes) for catalog in catalogs]
        trees.append(filesystem.tree)
        if self._before is not None and self._before.catalog != publication.catalog:
            before = await trio.to_thread.run_sync(Tree, self._before.catalog, filesystem.inodes)
            filesystem.cache.learn(self._before.contents)  # what its blocks are found by
            trees.append(before)
            records = filesystem.superseded_since(before, handles)
            await trio.to_thread.run_sync(self._superseded.replace, records)
            await trio.to_thread.run_sync(self._remembered.replace, publication)
        self._before = None
        filesystem.expect_listings(trees)
        filesystem.adopt_all(handles)

    async def _serve(
        self,
        filesystem: Filesystem,
        prefetcher: Prefetcher,
        promoter: Promoter,
        pins: Pins,
        tiers: list[DirectoryTier],
    ) -> None:
        options = self._config.mount
        presentation = Presentation(
            uid=os.geteuid() if options.uid is None else options.uid,
            gid=os.getegid() if options.gid is None else options.gid,
            metadata_ttl_s=options.metadata_ttl,
        )
        channel = self._channel
        operations = Operations(filesystem, presentation, channel, self._loads)
        self._reloader = Reloader(
            self._config,
            self._start.reread,
            self._start.given_keys,
            channel=channel is not None,
            filesystem=filesystem,
            prefetcher=prefetcher,
            operations=operations,
            tiers=tiers,
            pins=pins,
        )
        async with AsyncExitStack() as stack:
            self._register()
            session = stack.enter_context(
                Session(
                    operations,
                    self._mountpoint,
                    allow_other=options.allow_other,
                    channel=channel,
                    given_fd=self._start.given_fd,
                )
            )
            nursery = await stack.enter_async_context(trio.open_nursery())
            daemon = commands.Daemon(
                mountpoint=self._mountpoint,
                started=time.time(),
                mode_reason=self._mode_reason(),
                channel=channel,
                memory_limit_bytes=self._config.memory.limit,
                memory_notes=await trio.to_thread.run_sync(memory_notes, self._config),
                filesystem=filesystem,
                prefetcher=prefetcher,
                promoter=promoter,
                requests=operations.statistics,
                kernel=KernelLimits(),
                stop=self._stopping.set,
                pins=pins,
                loads=self._loads,
            )
            handlers = {**commands.handlers(daemon), **operate.handlers(daemon, self._reloader.reload)}
            registry.socket_path(self._mountpoint).unlink(missing_ok=True)  # of a daemon before this one
            await nursery.start(control_socket.serve, registry.socket_path(self._mountpoint), handlers)
            nursery.start_soon(self._stop_when_told, session, nursery.cancel_scope)
            nursery.start_soon(self._announce, daemon)
            nursery.start_soon(scraped.run, self._config.metrics, daemon)
            await session.serve()
            log.info("session_ended mountpoint=%s" if channel else "unmounted mountpoint=%s", self._mountpoint)
            _watchdog()
            nursery.cancel_scope.cancel()

    async def _announce(self, daemon: commands.Daemon) -> None:
        options = self._config.mount
        if self._channel is not None:
            await self._mount_by_channel(self._channel)
            return
        if self._start.given_fd is not None:
            # Its place may not be visible here; what is asked there meanwhile, the INIT first, waits in the kernel.
            daemon.kernel.notes.append("the kernel's limits are left to whoever has mounted (direct mode)")
            log.info("serving name=%s source=%s", self._mountpoint, self._config.source.url)
            self._start.ready(self._note)
            return
        # The kernel resets its limits when it takes the INIT reply: look through the mount once, so that this is over.
        await trio.to_thread.run_sync(os.statvfs, self._mountpoint, abandon_on_cancel=True)
        daemon.kernel = apply_limits(
            self._mountpoint, read_ahead_bytes=options.read_ahead, max_background=options.max_background
        )
        for note in daemon.kernel.notes:
            log.warning("kernel_limit %s", note)
        log.info("mounted mountpoint=%s source=%s", self._mountpoint, self._config.source.url)
        self._start.ready(self._note)

    async def _mount_by_channel(self, channel: Channel) -> None:
        await channel.mount()
        if channel.epoch > 1:
            log.info("taken_over mountpoint=%s epoch=%d", self._mountpoint, channel.epoch)
            return
        if self._start.given_fd is not None:
            log.info("serving name=%s source=%s by=channel", self._mountpoint, self._config.source.url)
            self._start.ready(self._note)
            return
        # An answer through the mount says that the INIT is over. Another user than the mount's may get none.
        with contextlib.suppress(OSError):
            await trio.to_thread.run_sync(os.statvfs, self._mountpoint, abandon_on_cancel=True)
        log.info("mounted mountpoint=%s source=%s by=channel", self._mountpoint, self._config.source.url)
        self._start.ready(self._note)

    def _register(self) -> None:
        """Before the mount is there: another command must not take it for one whose daemon is dead."""
        daemon = os.getpid()
        pid = daemon if self._channel is None else self._channel.pid
        registry.write(
            registry.Record(
                mountpoint=self._mountpoint,
                pid=pid,
                started=registry.process_start(pid),
                socket=str(registry.socket_path(self._mountpoint)),
                config=self._start.config_path,
                log_file=self._start.log_file,
                daemon_pid=0 if self._channel is None else daemon,
                daemon_started=0 if self._channel is None else registry.process_start(daemon),
                options=self._start.options,
                given=self._start.given_fd is not None,
            )
        )

    async def _signals(self, scope: trio.CancelScope) -> None:
        # Under a channel SIGHUP is for the channel, which replaces this process.
        reloading = () if self._channel is not None else (signal.SIGHUP,)
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, *reloading) as received:
            async for number in received:
                log.info("signal number=%d", number)
                if number == signal.SIGHUP:
                    await self._reload()
                    continue
                if self._channel is not None:
                    with trio.move_on_after(_TOLD_S), contextlib.suppress(ControlError):
                        await self._channel.stopping(unmount=False)  # else its requests would be suspected of this end
                    self._end(scope)
                    continue
                self._stopping.set()
                _watchdog()
                if mount_at(self._mountpoint) is None:
                    scope.cancel()  # still starting

    async def _reload(self) -> None:
        if self._reloader is None:
            return  # still starting, from the same file
        try:
            await self._reloader.reload()
        except TierfsError as error:
            log.error("reload_refused reason=%r", str(error))

    def _mode_reason(self) -> str:
        by = "" if self._start.given_fd is None else "; somebody else has mounted"
        if self._channel is None:
            return launch.plan(self._config).reason + by
        return f'mount.mode is "{self._config.mount.mode}" and {launch.PROGRAM} is installed{by}'

    def _make_room(self, scope: trio.CancelScope) -> None:
        self.replaced = True
        self._end(scope)

    def _end(self, scope: trio.CancelScope) -> None:
        """End this daemon and leave the mount to its channel."""
        log.info("daemon_ends mountpoint=%s", self._mountpoint)
        _watchdog()
        scope.cancel()

    async def _stop_when_told(self, session: Session, scope: trio.CancelScope) -> None:
        await self._stopping.wait()
        _watchdog()
        try:
            if self._channel is not None:
                await self._channel.stopping(unmount=True)
            if self._start.given_fd is not None:
                pass  # not ours to unmount: it ends with the descriptor
            elif self._channel is None:
                await trio.to_thread.run_sync(places.detach, self._mountpoint)
            else:
                with trio.move_on_after(_UNMOUNTED_S):
                    while mount_at(self._mountpoint) is not None:  # noqa: ASYNC110 - the kernel's table is only looked at
                        await trio.sleep(0.01)
        except (MountFailed, ControlError) as error:
            log.warning("unmount_failed error=%s", error)
        session.stop()
        scope.cancel()  # readers that wait for the source get an error from the kernel when the session closes

    async def _first_publication(self, source: Source, inodes: Inodes) -> tuple[Publication, Tree]:
        """What the mount starts with: the source's, or else the remembered one. Raises TierfsError."""
        remembered = await trio.to_thread.run_sync(self._remembered.load)
        timeout_s = float(self._config.source.timeout)
        directory = places.source_directory(self._config)
        if remembered is None and directory is not None and not directory.is_dir():
            raise SourceUnavailable(f"source.url: the directory {directory} is not there")
        newest: Publication | None = None
        with trio.move_on_after(timeout_s if remembered is None else min(timeout_s, _REMEMBERED_AFTER_S)):
            newest = await source.publication()
        if newest is not None:
            try:
                tree = await trio.to_thread.run_sync(Tree, newest.catalog, inodes)
            except ProtocolError as error:
                if remembered is None:
                    raise
                log.error("generation_ignored number=%d: %s", newest.catalog.generation, error)
                self._note = f"{error}; names are those of the last time"
            else:
                if self._taking_over and remembered is not None:
                    self._before = remembered  # kept until what it alone knows is kept elsewhere
                else:
                    await trio.to_thread.run_sync(self._remembered.replace, newest)
                return newest, tree
        else:
            statistics = source.statistics()
            reason = f"the source {statistics.url} cannot be reached: {statistics.reason or 'no answer'}"
            if remembered is None:
                advice = (
                    "check that `tierfs serve` runs there, the address, and that source.tls is as the server has it"
                )
                if directory is not None:
                    advice = "check that the directory is there and can be read"
                raise SourceUnavailable(f"{reason}; {advice}")
            self._note = (
                f"{reason}; names are those of the last time, and only what is resident can be read until it is back"
            )
            generation = remembered.catalog.generation
            log.warning("source_down_at_start using=remembered-catalog generation=%d reason=%s", generation, reason)
        return remembered, await trio.to_thread.run_sync(Tree, remembered.catalog, inodes)

    async def _follow(self, source: Source, filesystem: Filesystem, publication: Publication, pins: Pins) -> None:
        """Take over each new publication; a new generation's tree is built in a thread, then put in place at once."""
        cache = filesystem.cache
        while True:
            newest = await source.wait_changed(publication.revision)
            if newest.catalog.block_bytes != cache.block_bytes:
                log.error(
                    "generation_ignored number=%d: its block size is %d, this mount runs with %d; mount again",
                    newest.catalog.generation,
                    newest.catalog.block_bytes,
                    cache.block_bytes,
                )
            elif newest.catalog != publication.catalog:
                try:
                    tree = await trio.to_thread.run_sync(Tree, newest.catalog, filesystem.inodes)
                except ProtocolError as error:
                    log.error("generation_ignored number=%d: %s", newest.catalog.generation, error)
                    publication = newest
                    await trio.sleep(_CONTENT_BATCH_S)
                    continue
                cache.learn(newest.contents)
                # Kept before the tree is in place: a daemon that takes over meets handles on these versions.
                while self._channel is not None and not self._superseded.covers(filesystem.superseded_by(tree)):
                    await trio.to_thread.run_sync(self._superseded.replace, filesystem.superseded_by(tree))
                filesystem.replace(tree)
                pins.follow(tree)
                await trio.to_thread.run_sync(self._superseded.replace, filesystem.superseded_by(tree))  # prunes
                known = {VersionId(e.version) for e in newest.catalog.entries if e.kind is Kind.FILE}
                cache.retain(known | filesystem.open_versions())
                await trio.to_thread.run_sync(self._remembered.replace, newest)
            else:
                cache.learn(newest.contents)
                await trio.to_thread.run_sync(self._remembered.add, newest.contents)
            publication = newest
            await trio.sleep(_CONTENT_BATCH_S)


async def _forget_listings(filesystem: Filesystem) -> None:
    """Listings of earlier daemons that were not gone on with by now do not hold their trees any longer."""
    await trio.sleep(_LISTINGS_S)
    filesystem.expect_listings(())


async def _running(
    part: Source | LocalTier | BlockCache | Prefetcher | Channel | ModelLoads, *, task_status: "trio.TaskStatus[None]"
) -> None:
    await part.run(task_status=task_status)


def _watchdog() -> None:
    """End the process after a while whatever still hangs: a disk that never answers must not keep an unmount."""
    timer = threading.Timer(places.ENDING_S, lambda: os._exit(1))
    timer.daemon = True
    timer.start()
