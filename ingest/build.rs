//! Compiles the event schema in pure Rust: protox parses, prost-build writes the types. No `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const SCHEMA: &str = "proto/springtide/v1/event.proto";
    println!("cargo:rerun-if-changed={SCHEMA}");
    let descriptors = protox::compile([SCHEMA], ["proto"])?;
    // Ordered maps: the same event always encodes to the same bytes, so a digest of them means something.
    prost_build::Config::new().btree_map(["."]).compile_fds(descriptors)?;
    Ok(())
}
