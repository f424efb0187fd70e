"""One file per command: prints and parses, nothing else."""
