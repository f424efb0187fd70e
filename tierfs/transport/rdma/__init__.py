"""Moves block bytes by one-sided RDMA READs; docs/RDMA.md has the message flow and the rules of ownership."""
