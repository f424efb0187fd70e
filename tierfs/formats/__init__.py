"""Pure knowledge of file formats and layouts: which shard follows which."""
