#!/usr/bin/env bash
# Serves a directory of real models, mounts it, and loads each model through the mount with its own client, cold and warm.
#
#   bash examples/quickstart.sh [--size 1GiB] [--dir DIRECTORY] [--keep]
#
#   --size SIZE   of the generated sharded model (MiB or GiB)
#   --dir DIR     where to work; twice the size and 1 GB must be free (default: $TMPDIR, or /var/tmp)
#   --keep        leave the models, the configuration and the logs there
#
# Interrupted at any point, it leaves no mount and no process.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/examples/cleanup.sh"

size=1GiB
keep=
parent=${TMPDIR:-/var/tmp}
usage() { sed -n '2,/^set -/{/^# \{0,1\}/!d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; }
while [ $# -gt 0 ]; do
    case "$1" in
    --size | --dir) [ $# -ge 2 ] || { echo "quickstart: $1 needs a value" >&2; exit 2; } ;;&
    --size) size=$2; shift 2 ;;
    --size=*) size=${1#*=}; shift ;;
    --dir) parent=$2; shift 2 ;;
    --dir=*) parent=${1#*=}; shift ;;
    --keep) keep=1; shift ;;
    -h | --help) usage; exit 0 ;;
    *) echo "quickstart: unknown option $1" >&2; usage >&2; exit 2 ;;
    esac
done
mkdir -p "$parent"
parent=$(cd "$parent" && pwd)
bytes=$(numfmt --from=auto "${size%B}" 2>/dev/null) || { echo "quickstart: --size is $size; expected such as 1GiB" >&2; exit 2; }
if [ "$(df --output=avail -B1 "$parent" | tail -n 1)" -lt $((2 * bytes + 1000000000)) ]; then
    echo "quickstart: too little space in $parent for --size $size; name another --dir or a smaller --size" >&2
    exit 1
fi

venv=$root/.venv
tierfs=$venv/bin/tierfs
work=
export TIERFS_RUN="quickstart-$$-$RANDOM$RANDOM"

finish() {
    local status=$?
    if ! end_run "$work" "$TIERFS_RUN" "$tierfs"; then
        echo "quickstart: could not unmount $(mounts_under "$work"); try: umount -l" >&2
    elif [ -n "$work" ] && [ -z "$keep" ]; then
        if [ "$status" -ne 0 ] && [ "$status" -lt 128 ]; then
            tail -n 15 "$work"/*.log >&2 2>/dev/null || true
        fi
        rm -rf --one-file-system "$work"
    elif [ -n "$work" ]; then
        echo "Kept: $work"
    fi
}
call_at_end finish

# In the background and waited for: a trap then runs at once, not when the command ends.
run() {
    "$@" &
    wait $!
}
step() { printf '== %s\n' "$*"; }

step "Installing what is missing"
run bash "$root/examples/setup.sh" demo
version=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("tierfs"))')

work=$(mktemp -d "$parent/tierfs-quickstart.XXXXXX")
mkdir "$work/models" "$work/mount" "$work/warm" "$work/serve-state" "$work/mount-state"

step "Making models in $work/models (tierfs $version)"
run "$venv/bin/python" "$root/examples/place_models.py" "$work/models"
run "$venv/bin/python" "$root/examples/make_model.py" --hub --size "$size" \
    "$work/models/hub/models--example--random-$size" >/dev/null

step "Serving them"
"$tierfs" serve "$work/models" --listen tcp://127.0.0.1:0 --state-dir "$work/serve-state" \
    --ready-file "$work/ready" </dev/null >"$work/serve.log" 2>&1 &
server=$!
for _ in $(seq 300); do
    [ ! -s "$work/ready" ] || break
    kill -0 "$server" 2>/dev/null || { echo "quickstart: tierfs serve ended" >&2; exit 1; }
    run sleep 0.1
done
[ -s "$work/ready" ] || { echo "quickstart: tierfs serve was not ready within 30 s" >&2; exit 1; }
read -r url <"$work/ready"
echo "   $url"

allow_other=true
[ "$(id -u)" -eq 0 ] || grep -qsx 'user_allow_other' /etc/fuse.conf || allow_other=false
cat >"$work/mount.toml" <<TOML
state_dir = "mount-state"

[source]
url = "$url"

[warm]
path = "warm"

[mount]
allow_other = $allow_other

[log]
file = "mount.log"
TOML

step "Mounting them at $work/mount"
run "$tierfs" mount "$work/mount.toml" "$work/mount"

step "Loading each one: local file, then the mount, cold and warm"
run "$venv/bin/python" "$root/examples/load_models.py" --local "$work/models" --mount "$work/mount" \
    --warm "$work/warm" --tierfs "$tierfs" --log "$work/clients.log"

step "Unmounting"
run "$tierfs" unmount "$work/mount"
kill -TERM "$server"
wait "$server" || true
echo "Done."
