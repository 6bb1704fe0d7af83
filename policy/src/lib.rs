//! What it is to be policy version N: its configuration, tokenizer, network, sampling maths, checkpoint image, delta,
//! manifest and store. Knows no SQL, no HTTP server and no Kafka.

pub mod assignment;
mod atomic;
pub mod chat;
pub mod config;
pub mod delta;
#[cfg(any(test, feature = "cuda"))]
pub mod device;
pub mod digest;
pub mod fold;
pub mod folder;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod image;
pub mod kernel;
pub mod listing;
pub mod lora;
pub mod manifest;
pub mod memory;
pub mod model;
#[cfg(feature = "torch")]
pub mod network;
pub mod parts;
pub mod quant;
pub mod router;
pub mod sampling;
pub mod sign;
pub mod store;
pub mod tokenizer;
pub mod transformer;
