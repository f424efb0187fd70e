"""The last publication of a source, kept by the mount, so that it can start and serve what is resident while the source
is down.

    catalog    the encoded catalog, replaced atomically with each generation
    contents   records of 32 bytes, a version id and its content id; begun anew with each generation, appended to as
               content ids become known. A torn last record is ignored.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from tierfs.blocks.errors import ProtocolError
from tierfs.blocks.ids import ID_BYTES, ContentId, VersionId
from tierfs.catalog.schema import Kind, Publication, decode, encode

log = logging.getLogger(__name__)

_RECORD_BYTES = 2 * ID_BYTES


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

    def replace(self, publication: Publication) -> None:
        """Keep another generation instead."""
        versions = {VersionId(entry.version) for entry in publication.catalog.entries if entry.kind is Kind.FILE}
        pairs = {version: content for version, content in publication.contents.items() if version in versions}
        try:
            # Contents first: they are keyed by version, so extra ones beside an older catalog do no harm.
            self._write(self._contents, b"".join(version + content for version, content in pairs.items()))
            self._write(self._catalog, encode(publication.catalog))
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

    @staticmethod
    def _write(path: Path, data: bytes) -> None:
        temporary = path.with_suffix(".new")
        temporary.write_bytes(data)
        temporary.replace(path)
