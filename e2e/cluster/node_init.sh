#!/bin/sh
# The first program of a node, inside its new namespaces: sets up mounts and
# network as a machine's boot would, then becomes containerd.
#
#   node_init.sh NAME STATE ADDRESS/PREFIX GATEWAY [POD_RANGE VIA]...
set -eu
name=$1 state=$2 address=$3 gateway=$4
shift 4

# Pods' mounts must spread within the node; nothing spreads to the host (unshare
# made the copies private).
mount --make-rshared /

# /sys as this network namespace sees it, and control groups below the node's own.
mount -t sysfs sysfs /sys
if [ "${CGROUP_VERSION}" = 2 ]; then
  mount -t cgroup2 cgroup2 /sys/fs/cgroup
else
  mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
  for controller in ${CGROUP_CONTROLLERS}; do
    mkdir "/sys/fs/cgroup/$controller"
    option=$controller
    if [ "$controller" = systemd ]; then option=none,name=systemd; fi
    mount -t cgroup -o "$option" cgroup "/sys/fs/cgroup/$controller"
  done
fi
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=1777 tmpfs /dev/shm

# The kubelet sets these to what it wants. They belong to the whole machine, so
# the node gets files in their place and the machine's stay as they are.
mkdir /run/sysctl
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1; do
  path=${setting%=*}
  file=/run/sysctl/$(echo "$path" | tr / _)
  echo "${setting#*=}" > "$file"
  mount --bind "$file" "/proc/sys/$path"
done

# Folders of the host that containers may see below /host; see shares.py.
mount -t tmpfs -o mode=755,size=16m tmpfs "$state/host"

hostname "$name"
ip link set lo up
tries=0
until ip link show eth0 > /dev/null 2>&1; do
  tries=$((tries + 1))
  if [ $tries -gt 500 ]; then echo "eth0 never came" >&2; exit 1; fi
  sleep 0.02
done
ip addr add "$address" dev eth0
ip link set eth0 up
ip route add default via "$gateway"
while [ $# -gt 1 ]; do
  ip route add "$1" via "$2"
  shift 2
done
echo 1 > /proc/sys/net/ipv4/ip_forward

touch "$state/ready"
exec containerd --config "$state/containerd.toml"
