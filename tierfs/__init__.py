"""tierfs: a read-only file system that serves model weights from the nearest tier that has them."""

__version__ = "0.1.0"
