"""The tree of an export at one generation: schema, scanning, digests remembered."""
