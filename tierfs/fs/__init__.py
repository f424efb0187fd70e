"""The tree and the open files, with no FUSE in them."""
