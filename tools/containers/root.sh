#!/usr/bin/env bash
# Writes the root file system of a container as a tar file, from this distribution's packages, without a registry and
# without running their scripts: what distroless images hold. Further packages may be named.
# Usage: root.sh OUT.tar [PACKAGES…]
set -euo pipefail
out=$(realpath -m "$1")
shift
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root/debs" "$root/fs"/usr/{bin,sbin,lib,lib64}
chmod 755 "$root/fs"
for link in bin sbin lib lib64; do ln -s "usr/$link" "$root/fs/$link"; done
cd "$root/debs"
apt-get download -qq base-files base-passwd netbase tzdata ca-certificates libc6 libgcc-s1 libstdc++6 libssl3 zlib1g "$@" >/dev/null
for deb in *.deb; do dpkg-deb --fsys-tarfile "$deb" | tar -x --keep-directory-symlink -C ../fs; done
cd ../fs
rm -rf usr/share/{doc,man,locale,lintian,info} var/lib/apt
printf 'root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin\n' >etc/passwd
printf 'root:x:0:\nnonroot:x:65532:\n' >etc/group
mkdir -p etc/ssl/certs home/nonroot
chown 65532:65532 home/nonroot
cat usr/share/ca-certificates/mozilla/*.crt >etc/ssl/certs/ca-certificates.crt
[ ! -x usr/bin/busybox ] || for program in $(usr/bin/busybox --list); do [ -e "usr/bin/$program" ] || ln -s busybox "usr/bin/$program"; done
[ ! -x usr/bin/bash ] || ln -sf bash usr/bin/sh
chmod 1777 tmp
tar --numeric-owner -c . >"$out"
