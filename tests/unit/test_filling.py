"""The writers of a local tier: what they count, and what a mistake in one batch does to the others."""

import logging
from pathlib import Path

import pytest
import trio

from tests.local_tiers import BLOCK, Content, run, running, until, warm
from tierfs.blocks.ids import BlockDigest, ObjectKey
from tierfs.tiers import filling
from tierfs.tiers.device import Device
from tierfs.tiers.index import Entry, Index
from tierfs.tiers.interface import Offer
from tierfs.tiers.local import DirectoryTier

_METADATA_BYTES = 64 << 10


def test_what_two_batches_write_to_one_object_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "_BATCH_BYTES", 8 * BLOCK)

    async def most_used(tier: DirectoryTier, content: Content) -> int:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, tier.statistics().used_bytes)
                await trio.sleep(0.0005)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await content.fill(tier)
            nursery.cancel_scope.cancel()
        return most

    async def test() -> None:
        async with running(warm(tmp_path, capacity_bytes=256 << 20)) as tier:
            for seed in range(4):
                content = Content(seed, 128 * BLOCK)
                before = tier.statistics().used_bytes
                assert await most_used(tier, content) - before <= 128 * BLOCK + _METADATA_BYTES
                assert await content.hits(tier) == 128
            files = (file.stat().st_blocks * 512 for file in (tmp_path / "objects").glob("*/*"))
            assert tier.statistics().used_bytes == sum(files)

    run(test)


@pytest.mark.parametrize("name", ["commit", "remove"])
def test_a_mistake_in_one_batch_or_removal_does_not_end_the_tier(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = getattr(Device, name)
    mistakes = [1, 2]

    def mistaken(self: Device, *arguments: object) -> object:
        if mistakes:
            mistakes.pop()
            raise ValueError("a mistake")
        return real(self, *arguments)

    monkeypatch.setattr(Device, name, mistaken)

    async def test() -> None:
        content = Content(1, 4 * BLOCK)
        async with running(warm(tmp_path)) as tier:
            while mistakes:
                await until(lambda: tier.statistics().state == "ok")
                await content.fill(tier)
                await tier.evict(content.key)
            await until(lambda: tier.statistics().state == "ok")
            await until(lambda: content.offer(tier, 0) is Offer.ACCEPTED)
            await content.fill(tier)
            assert await content.hits(tier) == 4

    with caplog.at_level(logging.ERROR):
        run(test)
    assert "_ended_by_bug" in caplog.text


def test_versions_that_nobody_asks_for_any_more_are_forgotten(tmp_path: Path) -> None:
    device = Device(tmp_path, mapped=False, probe_s=1.0, block_bytes=BLOCK, capacity_bytes=None)
    index = Index()

    def key(number: int) -> ObjectKey:
        return ObjectKey(BlockDigest(number.to_bytes(16, "big")))

    content = key(0)
    index.add(
        Entry(name=content, key=content, size_bytes=BLOCK, block_bytes=BLOCK, path=b"p", model=b"m", model_bytes=BLOCK,
              device=device, last_use_s=0.0)
    )  # fmt: skip
    for number in range(1, 1000):  # one content, published again and again
        index.alias(key(number), content)
    index.alias(key(2000), key(3000))  # somebody has it pinned, by its version
    index.retain({key(999)}, pinned=lambda key_: key_ == key(3000))
    entry = index.get(key(999))
    assert entry is not None and entry.aliases == {key(999)}
    assert index.canonical(key(998)) == key(998)
    assert index.canonical(key(2000)) == key(3000)
