#!/usr/bin/env bash
# Ends what up.sh started in DIR, and removes it.
set -uo pipefail
dir=$(realpath -m "$1") run=/run/springtide-kube
for pid in "$run"/*.pid; do [ ! -f "$pid" ] || kill "$(cat "$pid")" 2>/dev/null; done
sleep 1
pgrep -f "containerd-shim-runc-v2.*$run/sock" | xargs -r kill -9
for process in $(ip netns pids springtide 2>/dev/null); do kill -9 "$process"; done
for process in /proc/[0-9]*; do grep -qs kubepods "$process/cgroup" && kill -9 "${process#/proc/}"; done
sleep 1
grep -E "$dir/|$run/|/run/netns/cni-" /proc/mounts | awk '{ print $2 }' | sort -r | while read -r mount; do umount -l "$mount"; done
ip netns del springtide 2>/dev/null
ip netns list 2>/dev/null | awk '/^cni-/ { print $1 }' | while read -r name; do ip netns del "$name"; done
if [ -f "$dir/sysctl" ]; then
  { read -r overcommit; read -r panic; read -r oops; } <"$dir/sysctl"
  sysctl -qw vm.overcommit_memory="$overcommit" kernel.panic="$panic" kernel.panic_on_oops="$oops"
fi
find /sys/fs/cgroup -depth -type d -path '*kubepods*' -exec rmdir {} + 2>/dev/null
rm -rf "$dir" "$run"
