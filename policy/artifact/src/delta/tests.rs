//! Whole deltas: lossless, bound to their base and result, refused when a byte is wrong.

use super::*;
use crate::checkpoint::tests::sample;
use safetensors::Dtype;

use crate::tensor::TensorData;

/// `sample` after a step that touches every kind of change.
fn changed() -> Checkpoint {
    let mut checkpoint = sample();
    let weight = checkpoint.tensors.get_mut("a.weight").unwrap();
    let mut bytes = weight.bytes.to_vec();
    bytes[4] ^= 0x80; // another NaN payload
    bytes[3] ^= 0x80; // −0.0 becomes 0.0
    weight.bytes = bytes.into();
    checkpoint.tensors.remove("b.scalar");
    let shape = checkpoint.tensors.get_mut("c.empty").unwrap();
    shape.shape = vec![7, 0];
    let noise: Vec<u8> = (0..600u32).map(|i| ((i * i * 7) >> 3) as u8).collect();
    let added = TensorData::new(Dtype::U8, vec![600], noise).unwrap();
    checkpoint.tensors.insert("e.added".into(), added);
    let zeros = TensorData::new(Dtype::F32, vec![10, 10], vec![0; 400]).unwrap();
    checkpoint.tensors.insert("f.zeros".into(), zeros);
    checkpoint.files.insert("config.json".into(), "{\"a\": 1}".into());
    checkpoint.files.remove("empty.txt");
    checkpoint.files.insert("new.txt".into(), vec![b'a'; 500].into());
    checkpoint
}

/// Weights like a model's, before and after a step that moves about `share` of them by one ulp.
fn step(weights: usize, share: f64) -> (Checkpoint, Checkpoint) {
    use rand::{Rng, SeedableRng};
    let mut random = rand::rngs::StdRng::seed_from_u64(1);
    let mut base = vec![];
    let mut result = vec![];
    for _ in 0..weights {
        let value = (random.random::<f32>() + random.random::<f32>() - 1.0) * 0.04;
        let bits = half::bf16::from_f32(value).to_bits();
        base.extend(bits.to_le_bytes());
        let moved = random.random_bool(share);
        let up = random.random_bool(0.5);
        let step = match (moved, up) {
            (false, _) => 0,
            (true, true) => 1,
            (true, false) => 0xffff,
        };
        result.extend(bits.wrapping_add(step).to_le_bytes());
    }
    let checkpoint = |bytes: Vec<u8>| Checkpoint {
        tensors: [(
            "w".to_string(),
            TensorData::new(Dtype::BF16, vec![weights], bytes).unwrap(),
        )]
        .into(),
        ..Checkpoint::default()
    };
    (checkpoint(base), checkpoint(result))
}

mod any;
mod changes;
mod shards;

const ONE: Threads = Threads::ONE;

fn encode(base: &Checkpoint, result: &Checkpoint) -> Result<Vec<u8>, Error> {
    super::encode(base, result, &ONE)
}

fn apply(base: &Checkpoint, delta: &[u8]) -> Result<Checkpoint, Error> {
    super::apply(base, delta, &ONE)
}

fn apply_within(base: &Checkpoint, delta: &[u8], most: u64) -> Result<Checkpoint, Error> {
    Ok(super::apply_within(base, delta, most, &ONE)?.0)
}

#[test]
fn every_kind_of_change_arrives_bit_for_bit_in_both_directions() {
    for (from, to) in [
        (sample(), changed()),
        (changed(), sample()),
        (Checkpoint::default(), sample()),
        (sample(), Checkpoint::default()),
        (sample(), sample()),
    ] {
        let delta = encode(&from, &to).unwrap();
        let arrived = apply(&from, &delta).unwrap();
        assert_eq!(arrived, to);
        assert_eq!(arrived.root(), to.root_anew());
        assert_eq!(arrived.root_anew(), to.root());
        let expected = Header {
            base: from.root(),
            result: to.root(),
        };
        assert_eq!(header(&delta).unwrap(), expected);
    }
}

/// A step like an optimizer's: the smaller a weight, the likelier it moves.
fn lean(weights: usize) -> (Checkpoint, Checkpoint) {
    use rand::{Rng, SeedableRng};
    let mut random = rand::rngs::StdRng::seed_from_u64(2);
    let (mut base, mut result) = (vec![], vec![]);
    for _ in 0..weights {
        let value = (random.random::<f32>() - 0.5) * (random.random::<f32>() * 0.1 - 0.01);
        let moved = value + (random.random::<f32>() - 0.5) * 1e-5;
        base.extend(half::bf16::from_f32(value).to_le_bytes());
        result.extend(half::bf16::from_f32(moved).to_le_bytes());
    }
    (single(Dtype::BF16, base), single(Dtype::BF16, result))
}

/// One tensor `w`.
fn single(dtype: Dtype, bytes: Vec<u8>) -> Checkpoint {
    let weights = bytes.len() * 8 / dtype.bitsize();
    Checkpoint {
        tensors: [("w".to_string(), TensorData::new(dtype, vec![weights], bytes).unwrap())].into(),
        ..Checkpoint::default()
    }
}

fn noise(seed: u8, bytes: usize) -> Vec<u8> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&[seed]);
    let mut noise = vec![0; bytes];
    hasher.finalize_xof().fill(&mut noise);
    noise
}

#[test]
fn changing_one_percent_of_the_weights_gives_a_delta_of_a_150th_of_the_checkpoint() {
    let (base, result) = step(400_000, 0.01);
    let delta = encode(&base, &result).unwrap();
    assert_eq!(apply(&base, &delta).unwrap(), result);
    let ratio = 800_000.0 / delta.len() as f64;
    assert!(ratio > 150.0, "{ratio}");
    let stats = stats(&base, &result);
    assert_eq!(stats.total_weights, 400_000);
    assert!((3_500..4_500).contains(&stats.changed_weights), "{stats:?}");
}

#[test]
fn a_dense_change_is_never_larger_than_the_checkpoint_by_more_than_the_index() {
    for share in [0.1, 0.5, 1.0] {
        let (base, result) = step(50_000, share);
        let delta = encode(&base, &result).unwrap();
        assert_eq!(apply(&base, &delta).unwrap(), result);
        assert!(delta.len() < 100_000 * 2 / 5, "{share}: {}", delta.len());
    }
    let (base, result) = (single(Dtype::F32, noise(1, 4000)), single(Dtype::F32, noise(2, 4000)));
    let delta = encode(&base, &result).unwrap();
    assert_eq!(apply(&base, &delta).unwrap(), result);
    assert!(delta.len() < 4000 + 300, "{}", delta.len());
}

#[test]
fn only_deltas_that_change_weights_alone_are_reversible() {
    for share in [0.0, 0.001, 0.05, 0.9] {
        let (base, result) = step(70_001, share);
        let delta = encode(&base, &result).unwrap();
        let reverse = super::apply_reverse(&result, &delta, &ONE).unwrap();
        assert_eq!(reverse, base);
        assert_eq!(reverse.root(), base.root_anew());
        let error = super::apply_reverse(&base, &delta, &ONE);
        assert!(share == 0.0 || matches!(error, Err(Error::WrongBase { .. })));
    }
    // steps of any size over all buckets, zero and the ends of the scale
    for dtype in [Dtype::BF16, Dtype::F16, Dtype::I8, Dtype::F32, Dtype::F64, Dtype::F4] {
        let (base, other) = (noise(3, 80_000), noise(4, 80_000));
        let mut result = base.clone();
        for at in (0..80_000).step_by(640) {
            result[at..at + 8].copy_from_slice(&other[at..at + 8]);
        }
        let (base, result) = (single(dtype, base), single(dtype, result));
        let delta = encode(&base, &result).unwrap();
        assert_eq!(apply(&base, &delta).unwrap(), result);
        assert_eq!(super::apply_reverse(&result, &delta, &ONE).unwrap(), base);
    }
    let delta = encode(&sample(), &changed()).unwrap();
    let error = super::apply_reverse(&changed(), &delta, &ONE).unwrap_err();
    assert!(matches!(error, Error::NotReversible(_)), "{error}");
}

#[test]
fn only_the_reverse_section_may_be_missing() {
    let (base, result) = lean(50_000);
    let delta = encode(&base, &result).unwrap();
    let reverse_bytes = u64::from_le_bytes(delta[96..104].try_into().unwrap()) as usize;
    assert!(reverse_bytes > 0);
    let forward = delta.len() - reverse_bytes;
    assert_eq!(apply(&base, &delta[..forward]).unwrap(), result);
    let error = super::apply_reverse(&result, &delta[..forward], &ONE).unwrap_err();
    assert!(matches!(error, Error::NotReversible(_)), "{error}");
    for length in [forward - 1, forward + 1, delta.len() - 1] {
        assert!(apply(&base, &delta[..length]).is_err(), "{length}");
    }
}

#[test]
fn more_threads_and_other_instructions_make_the_same_bytes() {
    let (base, result) = lean(frame::WEIGHTS + 12_345);
    let delta = encode(&base, &result).unwrap();
    let threads = Threads::new(3).unwrap();
    assert_eq!(super::encode(&base, &result, &threads).unwrap(), delta);
    assert_eq!(super::apply(&base, &delta, &threads).unwrap(), result);
    assert_eq!(super::apply_reverse(&result, &delta, &threads).unwrap(), base);
}

/// A frame of three batches of blocks and some more weights. A few change a little, one a lot.
fn some_change<const W: usize>() -> (Vec<u8>, Vec<u8>) {
    let mut old = vec![];
    let mut new = vec![];
    for i in 0..3 * 2048 + 77u64 {
        let weight = i.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17) >> (64 - 8 * W);
        let step = match i {
            5000 => u64::MAX / 3,
            _ if i % 37 == 0 => (i % 3).wrapping_sub(1),
            _ => 0,
        };
        old.extend_from_slice(&weight.to_le_bytes()[..W]);
        new.extend_from_slice(&weight.wrapping_add(step).to_le_bytes()[..W]);
    }
    (old, new)
}

#[test]
fn every_instruction_set_encodes_and_decodes_the_same_frame() {
    fn all<const W: usize>() {
        let (old, new) = some_change::<W>();
        let mut first = None;
        for isa in simd::available() {
            let coded = frame::encode(isa, W, Some(&old), &new, None).unwrap();
            assert_eq!(coded.frame.codec, frame::Codec::Steps);
            assert!(frame::decodes_to(isa, W, &coded, Some(&old), &new).unwrap(), "{isa:?}");
            let mut bytes = old.clone();
            let forward =
                |bytes: &mut [u8], frame| frame::apply(isa, W, frame, &coded.payload, bytes, frame::Direction::Forward);
            forward(&mut bytes, &coded.frame).unwrap();
            assert!(bytes == new, "{isa:?}");
            assert!(forward(&mut bytes, &coded.frame).is_err(), "made from other bytes");
            let reverse = frame::Direction::Reverse(&coded.reverse);
            frame::apply(isa, W, &coded.frame, &coded.payload, &mut bytes, reverse).unwrap();
            assert!(bytes == old, "{isa:?}");
            let other = frame::Frame {
                result: 1,
                ..coded.frame
            };
            assert!(forward(&mut bytes, &other).is_err(), "makes other bytes");
            assert!(bytes == old, "{isa:?}: a refused change was undone");
            let coded = (coded.frame, coded.payload, coded.reverse);
            assert_eq!(*first.get_or_insert_with(|| coded.clone()), coded, "{isa:?}");
        }
    }
    all::<1>();
    all::<2>();
    all::<4>();
    all::<8>();
}

#[test]
fn a_patch_is_repeated_and_reverted_after_an_interrupted_write() {
    let (base, result) = step(3000, 0.05);
    let delta = encode(&base, &result).unwrap();
    let (old, new) = (&base.tensors["w"].bytes, &result.tensors["w"].bytes);
    let patch = Patch::decode(&base, base.root(), &delta, &ONE).unwrap();
    assert_eq!(patch.weights(), stats(&base, &result).changed_weights);
    assert_eq!(patch.tensors().collect::<Vec<_>>(), ["w"]);
    for stopped in (0..=old.len()).step_by(50) {
        let torn = [&new[..stopped], &old[stopped..]].concat();
        let (mut forward, mut reverse) = (torn.clone(), torn);
        patch.write("w", &mut forward).unwrap();
        assert_eq!(forward[..], new[..]);
        patch.write("w", &mut forward).unwrap();
        assert_eq!(forward[..], new[..]);
        assert_eq!(patch.state("w", &forward).unwrap(), PatchState::Result);
        patch.revert("w", &mut reverse).unwrap();
        assert_eq!(reverse[..], old[..]);
        assert_eq!(patch.state("w", &reverse).unwrap(), PatchState::Base);
    }
    let torn = [&new[..3000], &old[3000..]].concat();
    assert_eq!(patch.state("w", &torn).unwrap(), PatchState::Neither);
    assert!(patch.write("w", &mut [0; 8]).is_err());
    // a base with that content hash but other bytes
    let wrong = Patch::decode(&result, base.root(), &delta, &ONE).unwrap_err();
    assert!(matches!(wrong, Error::WrongBase { .. }), "{wrong}");
    // a delta that promises another result than it makes
    let mut lying = delta;
    lying[48] ^= 1;
    let wrong = Patch::decode(&base, base.root(), &super::resealed(lying), &ONE).unwrap_err();
    assert!(matches!(wrong, Error::WrongResult { .. }), "{wrong}");
}

#[test]
fn every_wrong_base_of_a_chain_is_refused() {
    let mut chain = vec![single(Dtype::BF16, noise(1, 2000))];
    for seed in 2..14 {
        let mut bytes = chain.last().unwrap().tensors["w"].bytes.to_vec();
        bytes[seed as usize * 3] ^= seed;
        chain.push(single(Dtype::BF16, bytes));
    }
    for to in 1..chain.len() {
        let delta = encode(&chain[to - 1], &chain[to]).unwrap();
        for (from, checkpoint) in chain.iter().enumerate() {
            let refused = matches!(apply(checkpoint, &delta), Err(Error::WrongBase { .. }));
            assert_eq!(refused, from != to - 1);
            let refused = matches!(
                super::apply_reverse(checkpoint, &delta, &ONE),
                Err(Error::WrongBase { .. })
            );
            assert_eq!(refused, from != to);
            let refused = Patch::decode(checkpoint, checkpoint.root(), &delta, &ONE).is_err();
            assert_eq!(refused, from != to - 1);
        }
    }
}

#[test]
fn the_wrong_base_is_refused_by_name() {
    let delta = encode(&sample(), &changed()).unwrap();
    let error = apply(&changed(), &delta).unwrap_err();
    assert!(matches!(error, Error::WrongBase { expected, .. } if expected == sample().root()));
}

/// Two deltas that together have every part: steps with reverse data, planes, files.
fn small() -> [(Checkpoint, Checkpoint); 2] {
    [lean(900), (sample(), changed())]
}

#[test]
fn every_truncation_and_extension_is_refused() {
    for (base, result) in small() {
        let delta = encode(&base, &result).unwrap();
        let reverse_bytes = u64::from_le_bytes(delta[96..104].try_into().unwrap()) as usize;
        for length in 0..delta.len() {
            let complete = reverse_bytes > 0 && length == delta.len() - reverse_bytes;
            assert_eq!(apply(&base, &delta[..length]).is_ok(), complete, "{length}");
        }
        assert!(apply(&base, &[&delta[..], &[0]].concat()).is_err());
    }
}

#[test]
fn a_flipped_byte_is_refused_or_changes_nothing_both_ways() {
    for (base, result) in small() {
        let delta = encode(&base, &result).unwrap();
        let index_bytes = u64::from_le_bytes(delta[80..88].try_into().unwrap()) as usize;
        let reverse_bytes = u64::from_le_bytes(delta[96..104].try_into().unwrap()) as usize;
        for position in 0..delta.len() {
            for bit in 0..8 {
                let mut broken = delta.clone();
                broken[position] ^= 1 << bit;
                let forward = apply(&base, &broken);
                if position < 136 + index_bytes {
                    assert!(forward.is_err(), "{position}");
                }
                // a frame can be coded in several ways, and reverse data is not read here
                if let Ok(arrived) = forward {
                    assert_eq!(arrived, result, "{position}");
                }
                if position >= delta.len() - reverse_bytes
                    && let Ok(arrived) = super::apply_reverse(&result, &broken, &ONE)
                {
                    assert_eq!(arrived, base, "{position}");
                }
            }
        }
    }
}

#[test]
fn a_flipped_bit_behind_a_valid_checksum_never_makes_another_version() {
    for (base, result) in small() {
        let delta = encode(&base, &result).unwrap();
        for position in 0..delta.len() {
            for bit in 0..8 {
                let mut broken = delta.clone();
                broken[position] ^= 1 << bit;
                if let Ok(arrived) = apply_within(&base, &resealed(broken), 1 << 20) {
                    assert_eq!(arrived, result, "{position}");
                }
            }
        }
    }
}

#[test]
fn a_result_over_the_limit_is_refused_before_it_is_made() {
    let delta = encode(&sample(), &changed()).unwrap();
    let files = changed().files.values().map(|f| f.len() as u64).sum::<u64>();
    let size = changed().tensor_bytes() + files;
    assert!(apply_within(&sample(), &delta, size).is_ok());
    let error = apply_within(&sample(), &delta, size - 1).unwrap_err();
    assert!(
        matches!(error, Error::TooLarge { needed, .. } if needed == size),
        "{error}"
    );
}

#[test]
fn a_checkpoint_whose_bytes_do_not_fill_its_shapes_is_not_coded() {
    let mut short = sample();
    short.tensors.get_mut("a.weight").unwrap().bytes = vec![0; 7].into();
    for (from, to) in [(&short, &sample()), (&sample(), &short)] {
        assert!(matches!(encode(from, to), Err(Error::Checkpoint(_))));
    }
}

#[test]
fn another_format_version_is_refused_by_its_number() {
    let mut delta = encode(&sample(), &changed()).unwrap();
    delta[8] = 1;
    assert!(matches!(apply(&sample(), &delta).unwrap_err(), Error::FormatVersion(1)));
    assert!(matches!(apply(&sample(), b"hello").unwrap_err(), Error::Magic));
    assert!(matches!(apply(&sample(), b"SPTDELTA").unwrap_err(), Error::Checksum));
}

#[test]
fn new_and_reshaped_tensors_count_as_changed() {
    let stats = stats(&sample(), &changed());
    // a.weight: 2 of 6; c.empty: none; d.codes: 3 bytes; e.added 600; f.zeros 100
    assert_eq!(
        stats,
        Stats {
            changed_weights: 702,
            total_weights: 709
        }
    );
}

#[test]
fn the_reader_in_python_makes_the_same_bytes_both_ways() {
    use std::process::Command;
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("skipped: there is no python3");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // no files, and nothing that Python's standard library cannot unpack
    let (mut base, mut result) = lean(9000);
    for (name, dtype) in [("f32", Dtype::F32), ("f4", Dtype::F4), ("f16", Dtype::F16)] {
        let (old, other) = (noise(1, 4000), noise(2, 4000));
        let new = match dtype {
            Dtype::F32 => other,
            _ => [&old[..3000], &other[3000..3200], &old[3200..]].concat(),
        };
        for (checkpoint, bytes) in [(&mut base, old), (&mut result, new)] {
            let tensor = single(dtype, bytes).tensors.remove("w").unwrap();
            checkpoint.tensors.insert(name.into(), tensor);
        }
    }
    let delta = encode(&base, &result).unwrap();
    let path = |name: &str| folder.path().join(name);
    base.write_dir(&path("base")).unwrap();
    std::fs::write(path("delta"), &delta).unwrap();
    let run = |from: &str, to: &str, direction: &[&str]| {
        std::fs::create_dir(path(to)).unwrap();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tools/read_delta.py");
        let file = |folder: &str| path(folder).join("model.safetensors");
        let mut command = Command::new("python3");
        command.arg(script).arg(file(from)).arg(path("delta")).arg(file(to));
        let output = command.args(direction).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Checkpoint::read_dir(&path(to)).unwrap()
    };
    assert_eq!(run("base", "result", &[]), result);
    assert_eq!(run("result", "again", &["--back"]), base);
}
