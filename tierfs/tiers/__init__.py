"""Where blocks live: local tiers (hot, warm) and sources (a directory, a remote export)."""
