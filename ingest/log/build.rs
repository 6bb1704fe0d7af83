//! Compiles the event schema without `protoc`: protox parses it, and prost-build writes the types.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const SCHEMA: &str = "proto/springtide/v1/event.proto";
    println!("cargo:rerun-if-changed={SCHEMA}");
    let descriptors = protox::compile([SCHEMA], ["proto"])?;
    // Ordered maps, so that equal events have equal bytes and digests.
    prost_build::Config::new().btree_map(["."]).compile_fds(descriptors)?;
    Ok(())
}
