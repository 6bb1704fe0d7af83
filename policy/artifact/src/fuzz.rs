//! Properties that every reader of this crate has for any input: it does not panic, it stays within
//! its memory limits, and what it accepts is consistent and reads the same again.
//!
//! The tests run each target briefly with random inputs; `make fuzz NAME=policy` runs them longer under
//! libFuzzer (`fuzz/main.rs`). Built for tests and with the feature `fuzz` only.

#![expect(clippy::unwrap_used, reason = "a broken property ends the run, as in a test")]

use std::path::Path;
use std::sync::LazyLock;

use bytes::Bytes;
use safetensors::Dtype;

use crate::checkpoint::Checkpoint;
use crate::delta::{self, Error, Patch, resealed};
use crate::digest::Digest;
use crate::manifest::{Manifest, ObjectRef, Parent, RunStep};
use crate::sign::{Envelope, TrustedKeys};
use crate::tensor::TensorData;
use crate::threads::Threads;

/// Limit on a delta's result, bytes.
const RESULT_BYTES_MAX: u64 = 1 << 20;

/// One reader.
pub struct Target {
    pub name: &'static str,
    /// Inputs that are accepted, or almost: mutation starts from these.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Reads one input. Panics if a property does not hold. Returns whether the input was accepted.
    pub run: fn(&[u8]) -> bool,
}

/// All targets.
pub const TARGETS: &[Target] = &[
    target("delta", deltas, apply),
    target("delta_sealed", deltas, |input| apply(&resealed(input.to_vec()))),
    target("delta_frame", frames, delta::fuzz_frame),
    target("image", checkpoints, checkpoint),
    target("manifest", manifests, manifest),
    target("envelope", envelopes, envelope),
    target("safetensors", safetensors, folder),
];

const fn target(name: &'static str, seeds: fn() -> Vec<Vec<u8>>, run: fn(&[u8]) -> bool) -> Target {
    Target { name, seeds, run }
}

struct Pair {
    base: Checkpoint,
    root: Digest,
    result: Checkpoint,
}

/// A step with small, large and dense changes in several dtypes.
static PAIR: LazyLock<Pair> = LazyLock::new(|| {
    let (mut base, mut result) = (Checkpoint::default(), Checkpoint::default());
    let mut tensor = |name: &str, dtype: Dtype, old: Vec<u8>, new: Vec<u8>| {
        let weights = old.len() * 8 / dtype.bitsize();
        let data = |bytes| TensorData::new(dtype, vec![weights], bytes).unwrap();
        base.tensors.insert(name.into(), data(old));
        result.tensors.insert(name.into(), data(new));
    };
    let mut old = vec![];
    let mut new = vec![];
    for i in 0..600u32 {
        let bits = (0x3c00 + (i * 7919 % 1021)) as u16;
        old.extend(bits.to_le_bytes());
        let step = if i % 11 == 0 { 1 + (i % 3) as u16 } else { 0 };
        new.extend(bits.wrapping_add(step).to_le_bytes());
    }
    let noise = |seed: u32| -> Vec<u8> { (0..256u32).map(|i| ((i * i * seed) >> 5) as u8).collect() };
    tensor("a", Dtype::BF16, old, new);
    tensor("b", Dtype::F32, noise(77), noise(1013));
    tensor(
        "c",
        Dtype::F8_E4M3,
        noise(3),
        noise(3).iter().map(|&b| b ^ (b >> 7)).collect(),
    );
    let root = base.root();
    Pair { base, root, result }
});

fn deltas() -> Vec<Vec<u8>> {
    let Pair { base, result, .. } = &*PAIR;
    let mut other = result.clone();
    other.files.insert("config.json".into(), Bytes::from_static(b"{}"));
    other.tensors.remove("b");
    other
        .tensors
        .insert("d".into(), TensorData::new(Dtype::I16, vec![2, 2], vec![7; 8]).unwrap());
    let encode = |result: &Checkpoint| delta::encode(base, result, &Threads::ONE).unwrap();
    vec![encode(result), encode(&other), encode(base)]
}

fn apply(input: &[u8]) -> bool {
    let Pair { base, root, .. } = &*PAIR;
    let Ok((result, _)) = delta::apply_within(base, input, RESULT_BYTES_MAX, &Threads::ONE) else {
        return false;
    };
    let header = delta::header(input).unwrap();
    assert_eq!((header.base, header.result), (*root, result.root_anew()));
    match delta::apply_reverse(&result, input, &Threads::ONE) {
        Ok(back) => assert_eq!(back, *base),
        // reverse data is not read in the forward direction
        Err(error) => assert!(
            matches!(error, Error::NotReversible(_) | Error::Malformed(_)),
            "{error}"
        ),
    }
    if let Ok(patch) = Patch::decode(base, *root, input, &Threads::ONE) {
        for (name, tensor) in &base.tensors {
            let mut bytes = tensor.bytes.to_vec();
            patch.write(name, &mut bytes).unwrap();
            assert!(bytes == **result.tensors[name].bytes);
            patch.revert(name, &mut bytes).unwrap();
            assert!(bytes == **tensor.bytes);
        }
    }
    true
}

/// Payloads, each after a byte with the weights' width.
fn frames() -> Vec<Vec<u8>> {
    let old: Vec<u8> = (0..64u8).collect();
    let mut new = old.clone();
    (new[4], new[17], new[40]) = (5, 3, 41);
    let payloads = [1, 2, 4, 8].map(|width| (width, delta::encode_payload(width, &old, &new).unwrap()));
    let seeds = payloads.map(|(width, payload)| [&[width as u8], &payload[..]].concat());
    seeds.into()
}

fn checkpoints() -> Vec<Vec<u8>> {
    vec![
        PAIR.base.to_bytes().unwrap().to_vec(),
        Checkpoint::default().to_bytes().unwrap().to_vec(),
    ]
}

fn checkpoint(input: &[u8]) -> bool {
    let Ok(checkpoint) = Checkpoint::from_bytes(&Bytes::copy_from_slice(input)) else {
        return false;
    };
    assert_eq!(checkpoint.to_bytes().unwrap(), input, "a checkpoint has one encoding");
    true
}

fn manifests() -> Vec<Vec<u8>> {
    let mut manifest = Manifest {
        policy: "demo".into(),
        version: 8,
        root: Digest::of(b"root"),
        parent: None,
        line: "realtime".into(),
        branch: 0,
        checkpoint: Some(ObjectRef::of(b"image")),
        delta: None,
        tensor_bytes: 10_485_760,
        run: None,
        fence: 2,
        created_at: time::macros::datetime!(2026-11-21 06:00:00.25 UTC),
        quantized: vec![],
        delta_shards: vec![],
        reference: None,
        adapts: None,
    };
    let plain = serde_json::to_vec(&manifest).unwrap();
    manifest.parent = Some(Parent {
        version: 7,
        root: Digest::of(b"parent"),
    });
    manifest.delta = Some(ObjectRef::of(b"delta"));
    manifest.run = Some(RunStep {
        run: uuid::Uuid::from_u128(7),
        step: 3,
        cohort_digest: Digest::of(b"cohort"),
    });
    vec![plain, serde_json::to_vec(&manifest).unwrap()]
}

fn manifest(input: &[u8]) -> bool {
    let Ok(manifest) = serde_json::from_slice::<Manifest>(input) else {
        return false;
    };
    // years that RFC 3339 cannot express are neither read nor written
    let again: Manifest = serde_json::from_slice(&serde_json::to_vec(&manifest).unwrap()).unwrap();
    assert_eq!(again, manifest);
    manifest.check().is_ok()
}

fn envelopes() -> Vec<Vec<u8>> {
    let document = |kind: &str, payload: &str| {
        format!(
            r#"{{"payloadType":"application/vnd.springtide.{kind}.v1+json","payload":"{payload}","signatures":[{{"keyid":"{}","sig":"AAAA"}}]}}"#,
            Digest::of(b"key")
        )
    };
    vec![document("manifest", "e30=").into(), document("assignment", "").into()]
}

fn envelope(input: &[u8]) -> bool {
    let Ok(envelope) = Envelope::from_bytes(input) else {
        return false;
    };
    assert!(
        envelope.verify("manifest", &TrustedKeys::default()).is_err(),
        "no key is trusted"
    );
    let again = Envelope::from_bytes(&envelope.to_bytes().unwrap()).unwrap();
    assert_eq!(again, envelope);
    true
}

fn safetensors() -> Vec<Vec<u8>> {
    let folder = tempfile::tempdir().unwrap();
    PAIR.base.write_dir(folder.path()).unwrap();
    vec![std::fs::read(folder.path().join("model.safetensors")).unwrap()]
}

fn folder(input: &[u8]) -> bool {
    let mut checkpoint = Checkpoint::default();
    let read = crate::folder::read_tensors(
        Path::new("model.safetensors"),
        &Bytes::copy_from_slice(input),
        &mut checkpoint,
    );
    if read.is_err() {
        return false;
    }
    if let Ok(object) = checkpoint.to_bytes() {
        assert_eq!(Checkpoint::from_bytes(&object).unwrap(), checkpoint);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    /// The same inputs every time; `SPRINGTIDE_FUZZ_RUNS=100000` draws more.
    #[test]
    fn every_fuzz_target_passes_on_its_seeds_and_on_mutations_of_them() {
        let runs = std::env::var("SPRINGTIDE_FUZZ_RUNS")
            .ok()
            .and_then(|runs| runs.parse().ok());
        for target in TARGETS {
            let mut random = StdRng::seed_from_u64(1);
            let mut pool = (target.seeds)();
            for seed in &pool {
                assert!((target.run)(seed), "{}: a seed is refused", target.name);
            }
            for _ in 0..runs.unwrap_or(400) {
                let mut input = pool[random.random_range(0..pool.len())].clone();
                for _ in 0..random.random_range(1..4) {
                    mutate(&mut input, &mut random);
                }
                if (target.run)(&input) && pool.len() < 64 {
                    pool.push(input);
                }
            }
        }
    }

    fn mutate(input: &mut Vec<u8>, random: &mut StdRng) {
        let at = random.random_range(0..=input.len());
        match random.random_range(0..4) {
            0 => input.truncate(at),
            1 => input.insert(at, random.random()),
            2 if at < input.len() => drop(input.remove(at)),
            _ if at < input.len() => input[at] ^= 1 << random.random_range(0..8),
            _ => input.push(0),
        }
    }
}
