#!/usr/bin/env bash
# Installs the distribution packages (Debian, Ubuntu) that building and running Springtide needs
# and this machine lacks, as root or with sudo. Everything else that `make` fetches stays in this
# folder. Does nothing if all are installed.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=() # to install
reasons=()  # why, for the user
need() {
  packages+=("$1")
  reasons+=("  $1: $2")
}
has() { command -v "$1" >/dev/null; }

# pip only downloads. It comes from the system's Python or from a virtual environment in .stack.
has_pip() {
  python3 -m pip --version >/dev/null 2>&1 || .stack/venv/bin/python3 -m pip --version >/dev/null 2>&1 ||
    { has python3 && python3 -m venv .stack/venv >/dev/null 2>&1; } || { rm -rf .stack/venv; return 1; }
}

has cc && has ld || need gcc "links every Rust program"
has c++ || need g++ "compiles the shim over libtorch, and librdkafka"
[ -e /usr/include/stdio.h ] || need libc6-dev "the C library's headers"
has make || need make "builds librdkafka"
[ -e /usr/include/openssl/ssl.h ] || need libssl-dev "TLS"
has pkg-config || need pkg-config "finds OpenSSL"
has python3 || need python3 "unpacks wheels"
has_pip || need python3-pip "downloads wheels; nothing is installed with it"
python3 -c "import ensurepip" 2>/dev/null || need python3-venv "makes the environment in which the wheel is tested"
has bwrap || need bubblewrap "makes the sandboxes in which graders and their programs run"
has mvn || need maven "downloads Apache Kafka"
has java || need default-jre-headless "runs Maven and Apache Kafka"
# Further programs that the calling command needs.
for extra in "$@"; do
  package=$extra # most have the name of their package
  case $extra in
    bwrap) package=bubblewrap ;;
    mke2fs) package=e2fsprogs ;;
    node) package=nodejs ;;
    qemu-system-x86_64) package=qemu-system-x86 ;;
  esac
  has "$extra" || need "$package" "needed by this command"
done
[ -e /etc/ssl/certs/ca-certificates.crt ] || need ca-certificates "verifies downloads"

install() {
  local as_root=()
  has apt-get || return 1
  if [ "$(id -u)" != 0 ]; then
    has sudo || return 1
    as_root=(sudo)
  fi
  ${as_root[@]+"${as_root[@]}"} apt-get update -qq
  ${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
}

if [ "${#packages[@]}" -gt 0 ]; then
  echo "Installing distribution packages:"
  printf '%s\n' "${reasons[@]}"
  if ! install; then
    echo "Installing needs root. Run this, then try again: apt-get install ${packages[*]}" >&2
    exit 1
  fi
fi

if ! has cargo; then
  echo "A Rust toolchain is needed: see https://rustup.rs, then run this again." >&2
  exit 1
fi
