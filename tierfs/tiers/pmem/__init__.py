"""Persistent memory: a thin binding of libpmemobj and libpmem by ctypes, with no build step.

What is in which file:

    library.py      finds the libraries, declares their functions, turns their errors into OSError
    checking.py     whether a pool file can be opened without harm
    pool.py         a libpmemobj pool: create, open, check, close, read and write inside its root object
    transaction.py  a transaction as a context manager that rolls back on any exception
    memory.py       mapped files: MAP_SYNC, is_pmem, non-temporal copies, drain
"""
