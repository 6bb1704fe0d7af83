//! Springtide's deltas: the codec alone in place, and complete deltas with all digests.

use crate::pairs::Pair;
use crate::{ROUNDS, Row, alone, best};
use artifact::checkpoint::Checkpoint;
use artifact::delta::{self, FRAME_WEIGHTS, Patch};
use artifact::threads::Threads;
use bytes::Bytes;
use rayon::prelude::*;

pub fn rows(pair: &Pair, cores: usize) -> Result<Vec<Row>, Box<dyn std::error::Error>> {
    let all = Threads::new(cores)?;
    let delta = delta::encode(&pair.base, &pair.result, &Threads::ONE)?;
    let back_bytes = u64::from_le_bytes(delta[96..104].try_into()?) as usize;
    let model_bytes = pair.base.tensor_bytes() as usize;
    let row = |way: &str, delta_bytes: usize| Row {
        pair: pair.name.clone(),
        way: way.into(),
        delta_bytes,
        model_bytes,
        encode: None,
        apply: None,
        encode_all: None,
        apply_all: None,
    };
    let frames: Vec<(&String, usize, &[u8], &[u8])> = pair
        .base
        .tensors
        .iter()
        .filter_map(|(name, old)| Some((name, &old.bytes, &pair.result.tensors.get(name)?.bytes)))
        .flat_map(|(name, old, new)| {
            let two = old.chunks(2 * FRAME_WEIGHTS).zip(new.chunks(2 * FRAME_WEIGHTS));
            two.enumerate().map(move |(at, (old, new))| (name, at, old, new))
        })
        .collect();
    let code = |&(_, _, old, new): &(_, _, &[u8], &[u8])| drop(delta::encode_payload(2, old, new));
    // As from step to step: the base has been hashed as the result of the step before, the result
    // has not.
    let result = || {
        let mut result = pair.result.clone();
        for tensor in result.tensors.values_mut() {
            tensor.bytes = Bytes::clone(&tensor.bytes).into();
        }
        result
    };
    let encode = |result: &Checkpoint, threads: &Threads| drop(delta::encode(&pair.base, result, threads));
    let apply = |_: &Checkpoint, threads: &Threads| drop(delta::apply(&pair.base, &delta, threads));
    type Run<'a> = &'a dyn Fn(&Checkpoint, &Threads);
    let one = |run: Run<'_>| Some(alone(model_bytes, ROUNDS, result, |result| run(result, &Threads::ONE)));
    let many = |run: Run<'_>| Some(best(model_bytes, ROUNDS, result, |result| run(result, &all)));
    let two_way = Row {
        encode: one(&encode),
        encode_all: many(&encode),
        apply: one(&apply),
        apply_all: many(&apply),
        ..row(
            "ours, both ways: new image, XXH3 of both, BLAKE3 of the result",
            delta.len(),
        )
    };
    let root = pair.base.root();
    let patch = |_: &Checkpoint, threads: &Threads| drop(Patch::decode(&pair.base, root, &delta, threads));
    let patched = Row {
        apply: one(&patch),
        apply_all: many(&patch),
        ..row("ours, both ways: a patch, XXH3 of base and result", delta.len())
    };
    let forward = Row {
        encode: Some(alone(model_bytes, ROUNDS, || (), |()| frames.iter().for_each(code))),
        encode_all: Some(best(model_bytes, ROUNDS, || (), |()| frames.par_iter().for_each(code))),
        ..row(
            "**ours, forward**: frames, XXH3 of base and result",
            delta.len() - back_bytes,
        )
    };
    Ok(vec![forward, two_way, patched])
}
