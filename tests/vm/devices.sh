#!/bin/bash
# In the guest: the NVDIMM as a DAX file system on /mnt/pmem, the NVMe disk on /mnt/nvme, soft-RoCE as rxe0.
# File systems that an earlier boot left on the images are mounted as they are: that is what a power cut is about.
# Goes on after a failure, so that tests of the other devices run; ends with 1 then.
failed=0
complain() {
    echo "vm: $*" >&2
    failed=1
}

# DEVICE DIRECTORY OPTIONS [MKFS-ARGUMENT...]
mounted() {
    local device=$1 directory=$2 options=$3
    shift 3
    [ "$(blkid -p -s TYPE -o value "$device")" = ext4 ] || mkfs.ext4 -q -F "$@" "$device" || return 1
    mount -t ext4 -o "$options" "$device" "$directory"
}

nvdimm() {
    local namespace=/sys/bus/nd/devices/namespace0.0
    [ -e $namespace ] || return 1
    # "memory" is what sysfs calls fsdax. The info block of an earlier boot is found again; a new one would be empty.
    [ "$(cat $namespace/mode)" = memory ] ||
        ndctl create-namespace -f -e namespace0.0 -m fsdax --map=mem >/dev/null || return 1
    mounted /dev/pmem0 /mnt/pmem dax=always -b 4096 # DAX wants blocks of a page
}

rdma_device() {
    # rdma_cm fails on lo; RoCE's largest path MTU (4096) and its headers fit into 4200.
    ip link add rdma0 type dummy && ip addr add 10.77.0.1/24 dev rdma0 && ip link set rdma0 mtu 4200 up &&
        rdma link add rxe0 type rxe netdev rdma0
}

# The other guest of two (qemu.Wire): an Ethernet of its own, and soft-RoCE over it.
wire() {
    local device
    device=$(basename "$(dirname "$(grep -l 02:00:00:00:77:0 /sys/class/net/*/address)")")
    [ -n "$device" ] && ip addr add "10.78.0.$TIERFS_WIRE/24" dev "$device" && ip link set "$device" mtu 4200 up &&
        rdma link add rxe1 type rxe netdev "$device"
}

nvdimm || complain "no DAX file system on the NVDIMM"
mounted /dev/nvme0n1 /mnt/nvme noatime || complain "no file system on the NVMe disk"
rdma_device || complain "no RDMA device"
[ -z "$TIERFS_WIRE" ] || wire || complain "no wire to the other guest"
exit $failed
