"""Which model a file belongs to: the unit of placement, pinning and eviction.

The directory that holds a file is its model; in a hub cache (models--ORG--NAME/{blobs,snapshots,refs}) it is the
repository's directory, so that blobs, which all revisions share, belong together.
"""


def model_path(path: bytes) -> bytes:
    """The path of the model that the file at ``path`` belongs to; a file at the root is a model of its own."""
    directory, separator, _ = path.rpartition(b"/")
    if not separator:
        return path
    parts = directory.split(b"/")
    for depth, part in enumerate(parts, start=1):
        if part.startswith((b"models--", b"datasets--", b"spaces--")):
            return b"/".join(parts[:depth])
    return directory
