#!/usr/bin/env bash
# Every test: bash tests/run.sh [--fast | --long] [PYTEST ARGUMENT...]
#
# Installs what is missing (see examples/setup.sh), then ruff, mypy and pytest; ends non-zero if any of them complains,
# or if the tests left a mount or a process behind. The tests that need persistent memory run in a virtual machine
# (tests/vm/README.md), and are skipped where there can be none; they and those of the faults run beside the others.
# --fast stays under a minute: no slow tests and no virtual machine, of the real mounts only those marked smoke, and no
# demo models. --long also runs what takes minutes each: 200 kills, 20 power cuts.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
. examples/cleanup.sh

extras=(test demo)
select="not bench and not long"
arguments=()
for argument in "$@"; do
    if [ "$argument" = --fast ]; then
        extras=(test)
        select="not bench and not long and not slow and not vm and (not fuse or smoke)"
    elif [ "$argument" = --long ]; then
        select="not bench"
        export TIERFS_KILLS=${TIERFS_KILLS:-200} TIERFS_VM_POWER_CUTS=${TIERFS_VM_POWER_CUTS:-20}
    else
        arguments+=("$argument")
    fi
done

# A run that was killed outright could not clean up: its directory carries its pid.
for old in /tmp/tierfs-tests.*; do
    pid=${old#/tmp/tierfs-tests.}
    pid=${pid%%.*}
    if [ -d "$old" ] && [ -O "$old" ] && ! kill -0 "$pid" 2>/dev/null; then
        unmount_under "$old"
        [ -n "$(mounts_under "$old")" ] || rm -rf --one-file-system "$old"
    fi
done

work=$(mktemp -d "/tmp/tierfs-tests.$$.XXXXXX")
export TIERFS_RUN="tests-$$-${work##*.}"
beside=
finish() {
    [ -z "$beside" ] || kill "$beside" 2>/dev/null || true # or it would begin its next part
    if end_run "$work" "$TIERFS_RUN" .venv/bin/tierfs; then rm -rf --one-file-system "$work"; fi
}
call_at_end finish

# In the background and waited for: a trap then runs at once, not when the command ends.
run() {
    "$@" </dev/null &
    wait $!
}

run bash examples/setup.sh "${extras[@]}"

failed=()
run .venv/bin/ruff check . || failed+=(ruff)
run .venv/bin/mypy || failed+=(mypy)
pytest=(.venv/bin/python -m pytest -m "$select" --durations=15)
if [ ${#arguments[@]} -gt 0 ] || [[ $select = *"not vm"* ]]; then
    run "${pytest[@]}" --basetemp="$work/t" ${arguments[@]+"${arguments[@]}"} || failed+=(pytest)
else
    # The virtual machine waits for one emulated core, the faults and most other tests for clocks: beside each other they
    # take half the time.
    {
        failed_beside=0
        for part in vm faults; do
            "${pytest[@]}" --basetemp="$work/$part" -p no:cacheprovider "tests/$part" </dev/null || failed_beside=1
        done
        exit "$failed_beside"
    } >"$work/beside.log" 2>&1 &
    beside=$!
    run "${pytest[@]}" --basetemp="$work/t" --ignore=tests/vm --ignore=tests/faults || failed+=(pytest)
    wait "$beside" || failed+=("pytest tests/vm tests/faults")
    cat "$work/beside.log"
fi

while read -r mountpoint; do
    echo "tests/run.sh: the tests left a mount: $mountpoint" >&2
    failed+=(mounts)
done < <(mounts_under "$work")
for pid in $(marked_pids "$TIERFS_RUN"); do
    printf 'tests/run.sh: the tests left a process: %s %s\n' "$pid" "$(tr '\0' ' ' <"/proc/$pid/cmdline" || true)" >&2
    failed+=(processes)
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "tests/run.sh: failed: ${failed[*]}" >&2
    exit 1
fi
