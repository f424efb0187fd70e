# Sourced by quickstart.sh, tests/run.sh and tests/soak.sh: undoing whatever a run started, even when it was interrupted
# half-way.
# A run exports TIERFS_RUN=<its own word>; every process it starts, daemons included, carries that in its environment.

# The pids of the processes that carry this word.
marked_pids() {
    local environment
    for environment in /proc/[0-9]*/environ; do
        if grep -qzx "TIERFS_RUN=$1" "$environment" 2>/dev/null; then
            environment=${environment#/proc/}
            echo "${environment%/environ}"
        fi
    done
}

# End them: TERM, up to $2 seconds, then KILL.
end_marked() {
    local pids deadline=$((SECONDS + $2))
    pids=$(marked_pids "$1")
    [ -n "$pids" ] || return 0
    kill -TERM $pids 2>/dev/null || true
    while [ -n "$(marked_pids "$1")" ]; do
        if [ "$SECONDS" -ge "$deadline" ]; then
            pids=$(marked_pids "$1")
            [ -z "$pids" ] || kill -KILL $pids 2>/dev/null || true
            sleep 0.2
            return 0
        fi
        sleep 0.1
    done
}

# The mountpoints below this directory, innermost first.
mounts_under() {
    local mountpoint
    while read -r _ _ _ _ mountpoint _; do
        mountpoint=$(printf '%b' "$mountpoint") # the kernel writes a space as \040
        case "$mountpoint" in "$1"/*) echo "$mountpoint" ;; esac
    done </proc/self/mountinfo | tac
}

# Unmount them, in the orderly way first (with the command $2, if it is there), then lazily.
unmount_under() {
    local mountpoint
    mounts_under "$1" | while read -r mountpoint; do
        if [ -x "${2:-}" ] && timeout 15 "$2" unmount "$mountpoint" >/dev/null 2>&1; then
            mounts_under "$1" | grep -qxF -- "$mountpoint" || continue
        fi
        timeout 10 fusermount3 -uz "$mountpoint" 2>/dev/null || timeout 10 umount -l "$mountpoint" 2>/dev/null || true
    done
}

# The end of a run: its mounts go, in the orderly way first with the command $3, and its processes, which carry the word
# $2. False if a mount below its directory $1 (which may be empty: there is none yet) stays, so that it must be kept.
# No second signal ends that.
end_run() {
    trap '' INT TERM HUP
    [ -z "$1" ] || unmount_under "$1" "$3"
    end_marked "$2" 10
    [ -n "$1" ] || return 0
    unmount_under "$1" # a daemon caught while it started may have mounted after the first look
    [ -z "$(mounts_under "$1")" ]
}

# Call the function $1 when this shell ends, however it does.
call_at_end() {
    trap "$1" EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap 'exit 129' HUP
}
