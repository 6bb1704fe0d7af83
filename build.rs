//! The migrations are compiled into the binary: a changed one is a reason to build it again.
fn main() {
    println!("cargo::rerun-if-changed=migrations");
}
