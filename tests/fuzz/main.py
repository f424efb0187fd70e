"""Fuzzes one target under atheris, which follows the branches of tierfs: ``python -m tests.fuzz.main TARGET [OPTION…]``

Options are libFuzzer's: ``-max_total_time=60``, a directory to keep what was found interesting, a file to run once
more. Ends non-zero at the first bug and says where it has put its input.
"""

import sys

import atheris


def main() -> None:
    """See the head of this file."""
    with atheris.instrument_imports(include=["tierfs"], enable_loader_override=False):
        from tests.fuzz.targets import TARGETS
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in TARGETS:
        sys.exit(f"no such target: {name!r}; there are {', '.join(TARGETS)}")
    atheris.Setup(sys.argv, TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
