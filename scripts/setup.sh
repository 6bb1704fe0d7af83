#!/usr/bin/env bash
# What this machine needs from its distribution (Debian, Ubuntu) to build and run Springtide. Says what is missing and
# installs just that, with root or sudo; everything else that `make` fetches lies inside this folder. Run again, it does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=() # to install
reasons=()  # why, for people
need() {
  packages+=("$1")
  reasons+=("  $1: $2")
}
has() { command -v "$1" >/dev/null; }

# pip is only used to download, from the system's Python or from a virtual environment of our own.
has_pip() {
  python3 -m pip --version >/dev/null 2>&1 || .stack/venv/bin/python3 -m pip --version >/dev/null 2>&1 ||
    { has python3 && python3 -m venv .stack/venv >/dev/null 2>&1; } || { rm -rf .stack/venv; return 1; }
}

has cc && has ld || need gcc "links every Rust program"
has c++ || need g++ "compiles the shim over libtorch, and librdkafka"
[ -e /usr/include/stdio.h ] || need libc6-dev "what every C compiler's output starts from"
has make || need make "builds librdkafka"
[ -e /usr/include/openssl/ssl.h ] || need libssl-dev "TLS"
has pkg-config || need pkg-config "finds OpenSSL"
has python3 || need python3 "unpacks wheels"
has_pip || need python3-pip "downloads wheels; nothing is installed with it"
has mvn || need maven "downloads Apache Kafka"
has java || need default-jre-headless "runs Maven and Apache Kafka"
# what one command wants beside
for extra in "$@"; do
  has "$extra" || need "$extra" "asked for by this command"
done
[ -e /etc/ssl/certs/ca-certificates.crt ] || need ca-certificates "checks where downloads come from"

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
    echo "That needs root. Install them, then run this again: apt-get install ${packages[*]}" >&2
    exit 1
  fi
fi

if ! has cargo; then
  echo "A Rust toolchain is needed: see https://rustup.rs, then run this again." >&2
  exit 1
fi
