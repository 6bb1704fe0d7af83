# Every crate against RustSec's database of known vulnerabilities and yanked versions. Needs the network.
need setup
cargo fetch --locked --quiet
tools/deny.sh advisories
