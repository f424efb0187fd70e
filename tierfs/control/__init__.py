"""The Unix-socket interface of the daemon, and its client."""
