#!/bin/bash
# Process 1 of the test VM once the host's file tree is its root: devices, the job, and the end.
# The job is /share/job (the harness writes it); what it ended with goes to /share/status, and QEMU leaves at once.
. /share/boot.env
export TIERFS_TEST_VM=1 TIERFS_TEST_DAX=/mnt/pmem HOME=/root LANG=C.UTF-8 TERM=${TERM:-dumb}
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
say() { echo "vm: $(cut -d' ' -f1 /proc/uptime) s: $*"; }

say "up, Linux $(uname -r)"
bash "$TIERFS_ROOT/tests/vm/devices.sh"
say "devices ended with $?"
cd "$TIERFS_ROOT" && bash /share/job
status=$?
say "job ended with $status"
dmesg >/share/dmesg.log
sync
echo "$status" >/share/status.part && mv /share/status.part /share/status
printf '\0' | dd of=/dev/port bs=1 count=1 seek=244 conv=notrunc status=none # isa-debug-exit at 0xf4
echo o >/proc/sysrq-trigger
sleep 30
