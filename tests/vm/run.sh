#!/usr/bin/env bash
# The tests that need persistent memory, an NVMe disk and an RDMA device, in a throw-away virtual machine that has them:
#
#   bash tests/vm/run.sh [PYTEST ARGUMENT...]      see README.md here for the other options
#
# Installs what is missing: tierfs into .venv (examples/setup.sh), and Debian's or Ubuntu's packages with apt-get. Ends
# with 77, and the reason as the last line, where there can be no VM.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"

packages=(
    qemu-system-x86 busybox-static kmod zstd dpkg util-linux gcc libc6-dev # the harness itself
    iproute2 ndctl e2fsprogs fuse3                                       # what the guest's devices need
    rdma-core ibverbs-providers ibverbs-utils python3-pyverbs perftest libpmem1 libpmemobj1
)

unavailable() {
    echo "vm: no test VM here: $*" >&2
    exit 77
}

missing=()
command -v dpkg-query >/dev/null || unavailable "it takes a kernel package of Debian or Ubuntu, and there is no dpkg"
for package in "${packages[@]}"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    apt=(env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=120)
    if [ "$(id -u)" -ne 0 ]; then
        sudo -n true 2>/dev/null || unavailable "not root; run as root: apt-get install ${missing[*]}"
        apt=(sudo "${apt[@]}")
    fi
    echo "vm: installing with apt-get: ${missing[*]}" >&2
    "${apt[@]}" install --no-install-recommends "${missing[@]}" >/dev/null 2>&1 ||
        { "${apt[@]}" update && "${apt[@]}" install --no-install-recommends "${missing[@]}"; } >/dev/null ||
        unavailable "apt-get could not install: ${missing[*]}"
fi
.venv/bin/python -c 'import pytest, pyfuse3, trio, msgspec, xxhash' 2>/dev/null || bash examples/setup.sh test

exec .venv/bin/python -m tests.vm.main "$@"
