//! The Protobuf types, generated from `proto/springtide/v1/event.proto`. Other modules use
//! [`super::Event`].

#![expect(clippy::large_enum_variant, reason = "generated")]

include!(concat!(env!("OUT_DIR"), "/springtide.v1.rs"));
