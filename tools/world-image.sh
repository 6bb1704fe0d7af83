#!/usr/bin/env bash
# Builds the image of microVM worlds: a kernel, an initramfs and a read-only disk with Postgres, Python
# and the agent. Needs no root and installs nothing on this machine: Debian's packages are downloaded
# and unpacked. apt checks their signatures; the image's file `contents` lists what is in it.
#
#     tools/world-image.sh FOLDER POSTGRES [PACKAGE...]
#
# FOLDER: where the image goes. POSTGRES: the folder that `springtide stack fetch` unpacked. PACKAGE:
# Debian packages that programs in the world need too.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 2 ] || { sed -n '6,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
image=$1 postgres=$2
shift 2

for program in apt-get dpkg-deb mke2fs tar; do
  command -v "$program" >/dev/null || {
    echo "world-image: $program is missing. It runs on Debian and Ubuntu: apt-get install apt dpkg e2fsprogs tar" >&2
    exit 1
  }
done
programs=$(dirname "$(find "$postgres" -name initdb -path '*/bin/*' | head -1)")
[ "$programs" != . ] || { echo "world-image: $postgres has no initdb; run 'make stack' first" >&2; exit 1; }

mkdir -p "$image"
image=$(realpath "$image") postgres=$(realpath "$postgres") programs=$(realpath "$programs")
work=$(mktemp -d "$image/.building-XXXXXX")
trap 'rm -rf "$work"' EXIT
archives=$work/apt/archives
mkdir -p "$archives/partial"
: >"$work/apt/status"

# As if nothing were installed, so that everything needed is downloaded.
fetch() {
  apt-get -y -qq -o Dir::State::status="$work/apt/status" -o Dir::Cache="$work/apt" -o APT::Sandbox::User="$(id -un)" \
    -o Debug::NoLocking=1 -o Dpkg::Use-Pty=0 --no-install-recommends --download-only install "$@" >/dev/null
}
mapfile -t packages < <(grep -v '^#' world/image/packages)
echo "Downloading Debian packages for the image: ${packages[*]} $*"
fetch "${packages[@]}" "$@"

root=$work/root
mkdir -p "$root"/usr/{bin,sbin,lib,lib64} "$root"/{dev,etc/springtide,proc,run,sys,tmp,usr/lib/springtide,var/lib,work}
for folder in bin sbin lib lib64; do ln -s "usr/$folder" "$root/$folder"; done
for archive in "$archives"/*.deb; do
  dpkg-deb --fsys-tarfile "$archive" | tar -x --keep-directory-symlink --no-same-owner -C "$root"
done
rm -rf "$root"/usr/share/{doc,info,locale,man,bash-completion} "$root"/var/cache
find "$root" -xdev -perm /6000 -type f -exec chmod ug-s {} +
ln -sf bash "$root/usr/bin/sh"
mkdir -p "$root/usr/lib/postgres"
cp -a "$postgres/." "$root/usr/lib/postgres/"
ln -s "${programs#"$postgres/"}" "$root/usr/lib/postgres/bin"
install -m 755 world/image/agent.py "$root/usr/lib/springtide/agent.py"
install -m 755 world/image/postgres/start world/image/postgres/ready "$root/etc/springtide/"
printf '%s\n' root:x:0:0::/root:/bin/bash postgres:x:70:70::/:/bin/bash world:x:1000:1000::/work:/bin/bash \
  >"$root/etc/passwd"
printf '%s\n' root:x:0: postgres:x:70: world:x:1000: >"$root/etc/group"
printf '127.0.0.1 localhost\n' >"$root/etc/hosts"
size=$(($(du -sm "$root" | cut -f1) * 5 / 4 + 16))
mke2fs -q -t ext4 -O ^has_journal -m 0 -E root_owner=0:0 -d "$root" "$work/root.ext4" "${size}M"

echo "Downloading Debian's cloud kernel"
(cd "$archives" && mkdir -p ../kernel && mv ./*.deb ../kernel/ && mv ../kernel ../programs)
mkdir -p "$archives/partial"
fetch linux-image-cloud-amd64
kernel=$(find "$archives" -name 'linux-image-[0-9]*.deb' | head -1)
dpkg-deb -x "$kernel" "$work/kernel"
cp "$work"/kernel/boot/vmlinuz-* "$work/vmlinuz"
initramfs=$work/initramfs
mkdir -p "$initramfs"/{bin,dev,layer,lower,modules,proc,root,sys}
cp "$root/bin/busybox" "$initramfs/bin/busybox"
install -m 755 world/image/init "$initramfs/init"
modules=(virtio_ring virtio virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci virtio_blk virtio_console overlay)
for module in "${modules[@]}"; do
  find "$work/kernel" -name "$module.ko" -exec cp {} "$initramfs/modules/" \;
  [ -e "$initramfs/modules/$module.ko" ] || { echo "world-image: $kernel has no module $module" >&2; exit 1; }
  echo "$module.ko" >>"$initramfs/modules/order"
done
(cd "$initramfs" && find . | "$root/bin/busybox" cpio -o -H newc 2>/dev/null | gzip -1) >"$work/initramfs.gz"

{
  echo "# What is in this image: Debian packages by name and SHA-256, and the Postgres of tools/pins/postgres."
  (cd "$work/apt/programs" && sha256sum ./*.deb)
  (cd "$archives" && sha256sum "./$(basename "$kernel")")
  sed 's/^/# /' tools/pins/postgres/requirements.txt
} >"$work/contents"
(cd "$work" && sha256sum vmlinuz initramfs.gz root.ext4 >sums)
for file in vmlinuz initramfs.gz root.ext4 contents sums; do mv -f "$work/$file" "$image/$file"; done
echo "The image is in $image: $(du -sh --apparent-size "$image/root.ext4" | cut -f1) of disk, $(grep -vc '^#' "$image/contents") packages"
