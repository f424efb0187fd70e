#!/usr/bin/env bash
# The soak: bash tests/soak.sh [--minutes N] [--seed S]
#
# Mixed loads on two mounts, with new versions, faults and kills at random (see tests/soak/main.py), 30 minutes by
# default. Ends non-zero, and prints the seed, on a wrong byte, an error, a hang, or anything that has grown. Root.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
. examples/cleanup.sh

work=$(mktemp -d "/tmp/tierfs-soak.$$.XXXXXX")
export TIERFS_RUN="soak-$$-${work##*.}"
finish() {
    if end_run "$work" "$TIERFS_RUN" .venv/bin/tierfs && [ -z "${kept:-}" ]; then
        rm -rf --one-file-system "$work"
    else
        echo "tests/soak.sh: logs are kept in $work" >&2
        rm -rf --one-file-system "$work"/truth "$work"/*/warm
    fi
}
call_at_end finish

bash examples/setup.sh test
kept=yes
.venv/bin/python -m tests.soak.main "$@" "$work" </dev/null &
wait $!
kept=
