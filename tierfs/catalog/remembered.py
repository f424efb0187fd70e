"""The last publication of a source, kept by the mount, so that it can start and serve what is resident while the source
is down.

    catalog    the encoded catalog, replaced atomically with each generation
    contents   records of 32 bytes, a version id and its content id; begun anew with each generation, appended to as
               content ids become known. A torn last record is ignored.
    catalog.1… those before it, the newest first: a daemon that follows another one goes on with listings of them
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from tierfs.blocks.errors import ProtocolError
from tierfs.blocks.ids import ID_BYTES, ContentId, VersionId
from tierfs.catalog.schema import Catalog, Kind, Publication, decode, encode

log = logging.getLogger(__name__)

_RECORD_BYTES = 2 * ID_BYTES
_EARLIER = 4  # each is decoded at the start of a daemon that follows another one


class Remembered:
    """One publication in a directory. Blocking; called from one thread at a time.

    What cannot be written is logged and left: it is wanted only for a start without the source.
    """

    def __init__(self, directory: Path) -> None:
        self._catalog = directory / "catalog"
        self._contents = directory / "contents"
        self._known: set[VersionId] = set()

    def load(self) -> Publication | None:
        """What was kept, with revision -1; None when there is nothing, or nothing usable."""
        try:
            catalog = decode(self._catalog.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ProtocolError) as error:
            log.warning("remembered_catalog_unusable path=%s error=%s", self._catalog, error)
            return None
        try:
            records = self._contents.read_bytes()
        except OSError:
            records = b""
        contents = {
            VersionId(records[at : at + ID_BYTES]): ContentId(records[at + ID_BYTES : at + _RECORD_BYTES])
            for at in range(0, len(records) - _RECORD_BYTES + 1, _RECORD_BYTES)
        }
        return Publication(catalog, contents, -1)

    def earlier(self, now_s: float, within_s: float) -> list[Catalog]:
        """The catalogs before it that were superseded within the last seconds (of the wall clock), the newest first."""
        found: list[Catalog] = []
        follower = self._catalog
        for number in range(1, _EARLIER + 1):
            try:
                if follower.stat().st_mtime < now_s - within_s:
                    break
                follower = self._earlier(number)
                found.append(decode(follower.read_bytes()))
            except (OSError, ProtocolError):
                break
        return found

    def replace(self, publication: Publication) -> None:
        """Keep another generation instead."""
        versions = {VersionId(entry.version) for entry in publication.catalog.entries if entry.kind is Kind.FILE}
        pairs = {version: content for version, content in publication.contents.items() if version in versions}
        try:
            # Contents first: they are keyed by version, so extra ones beside an older catalog do no harm.
            self._write(self._contents, b"".join(version + content for version, content in pairs.items()))
            encoded = encode(publication.catalog)
            if self._put_aside_unless(encoded):
                self._write(self._catalog, encoded)
        except OSError as error:
            log.warning("catalog_not_remembered path=%s error=%s", self._catalog, error)
        self._known = set(pairs)

    def add(self, contents: Mapping[VersionId, ContentId]) -> None:
        """Keep those content ids that are new, too."""
        new = {version: content for version, content in contents.items() if version not in self._known}
        if new:
            try:
                with self._contents.open("ab") as file:
                    file.truncate(file.tell() // _RECORD_BYTES * _RECORD_BYTES)  # after a torn record all would be
                    file.write(b"".join(version + content for version, content in new.items()))
            except OSError as error:
                log.warning("contents_not_remembered path=%s error=%s", self._contents, error)
            self._known.update(new)

    def _earlier(self, number: int) -> Path:
        return self._catalog.with_suffix(f".{number}")

    def _put_aside_unless(self, encoded: bytes) -> bool:
        """The catalog becomes the first of the earlier ones, and stays in place; False if it is this one already."""
        try:
            if self._catalog.read_bytes() == encoded:
                return False
        except FileNotFoundError:
            return True
        for number in range(_EARLIER - 1, 0, -1):
            if self._earlier(number).exists():
                self._earlier(number).replace(self._earlier(number + 1))
        self._earlier(1).unlink(missing_ok=True)
        os.link(self._catalog, self._earlier(1))
        return True

    @staticmethod
    def _write(path: Path, data: bytes) -> None:
        temporary = path.with_suffix(".new")
        temporary.write_bytes(data)
        temporary.replace(path)
