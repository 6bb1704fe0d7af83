//! The device gives the same weights, patches and digests as the CPU, bit for bit. The kernels run
//! as C++ on this machine's processor, with the threads in ascending and in descending order. With
//! `SPRINGTIDE_TEST_DEVICE=0` (`make check NAME=cuda`) they run on that GPU.

mod host;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::checkpoint::Checkpoint;
use crate::delta::{FRAME_WEIGHTS, encode, encode_changes};
use crate::tensor::TensorData;
use crate::threads::Threads;

const ONE: Threads = Threads::ONE;
const WIDTHS: [(Dtype, usize); 5] = [
    (Dtype::U8, 1),
    (Dtype::BF16, 2),
    (Dtype::F32, 4),
    (Dtype::F64, 8),
    (Dtype::C64, 8),
];

fn devices() -> Vec<Device> {
    match std::env::var("SPRINGTIDE_TEST_DEVICE") {
        Ok(ordinal) => vec![gpu(ordinal.parse().unwrap())],
        Err(_) => [false, true]
            .map(|backwards| Device {
                driver: Arc::new(host::Host::new(backwards)),
            })
            .into(),
    }
}

#[cfg(feature = "cuda")]
fn gpu(ordinal: usize) -> Device {
    Device::open(ordinal).unwrap()
}

#[cfg(not(feature = "cuda"))]
fn gpu(_: usize) -> Device {
    panic!("the tests are built without the feature `cuda`: use `make check NAME=cuda`");
}

fn noise(random: &mut StdRng, bytes: usize) -> Vec<u8> {
    let mut noise = vec![0; bytes];
    random.fill(&mut noise[..]);
    noise
}

/// Which weights differ.
#[derive(Debug, Clone, Copy)]
enum Kind {
    None,
    All,
    /// A fraction of them, in their lowest bit.
    Share(f64),
    /// The first and the last.
    Ends,
    /// Some, in any one byte, including NaN payloads and signs.
    Bytes,
    /// All of every second frame, and some of the others.
    DenseFrames,
}

const KINDS: [Kind; 8] = [
    Kind::None,
    Kind::All,
    Kind::Share(0.01),
    Kind::Share(0.3),
    Kind::Share(0.51),
    Kind::Ends,
    Kind::Bytes,
    Kind::DenseFrames,
];

/// `old` with changes of this kind.
fn changed(random: &mut StdRng, old: &[u8], width: usize, kind: Kind) -> Vec<u8> {
    let mut new = old.to_vec();
    let weights = old.len() / width;
    for (i, weight) in new.chunks_exact_mut(width).enumerate() {
        match kind {
            Kind::All => weight.iter_mut().for_each(|byte| *byte = !*byte),
            Kind::Share(share) if random.random_bool(share) => weight[0] ^= 1,
            Kind::Ends if i == 0 || i + 1 == weights => weight[width - 1] ^= 0x80,
            Kind::Bytes if random.random_bool(0.02) => weight[random.random_range(0..width)] ^= random.random::<u8>(),
            Kind::DenseFrames if i / FRAME_WEIGHTS % 2 == 1 || i % 1000 == 7 => weight[0] ^= 0x55,
            _ => {}
        }
    }
    new
}

/// The changes, found by comparing one weight after the other.
fn expected(old: &[u8], new: &[u8], width: usize) -> Vec<Change> {
    let frames = old.chunks(FRAME_WEIGHTS * width).zip(new.chunks(FRAME_WEIGHTS * width));
    let value = |weight: &[u8]| weight.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
    frames
        .map(|(old, new)| {
            let weights = old.chunks(width).zip(new.chunks(width)).enumerate();
            let found: Vec<_> = weights
                .filter(|(_, (old, new))| old != new)
                .map(|(i, (_, new))| (i as u32, value(new)))
                .collect();
            match found.len() {
                0 => Change::Same,
                n if n > old.len() / width / 2 + 1 => Change::All(new.to_vec()),
                _ => Change::Some(found),
            }
        })
        .collect()
}

#[test]
fn differing_weights_are_found_for_any_number_width_and_position() {
    let mut random = StdRng::seed_from_u64(1);
    for device in devices() {
        for (dtype, width) in WIDTHS {
            let mut sizes = vec![0, 1, 7, 8, 9, 63, 64, 65, 1023, 1024, 1025, 32_767, 32_769, 70_001];
            sizes.extend((0..6).map(|_| random.random_range(0..40_000)));
            for weights in sizes {
                for kind in KINDS {
                    let old = noise(&mut random, weights * width);
                    let new = changed(&mut random, &old, width, kind);
                    let (before, after) = (device.upload(&old).unwrap(), device.upload(&new).unwrap());
                    let found = device.changes(dtype, &before, &after).unwrap();
                    assert_eq!(found, expected(&old, &new, width), "{dtype} {weights} {kind:?}");
                }
            }
        }
    }
}

#[test]
fn partial_frames_and_batches_are_compared() {
    let mut random = StdRng::seed_from_u64(2);
    for device in devices() {
        for weights in [
            FRAME_WEIGHTS - 1,
            FRAME_WEIGHTS,
            FRAME_WEIGHTS + 1,
            4 * FRAME_WEIGHTS + 12_345,
        ] {
            for kind in [Kind::Share(0.01), Kind::Ends, Kind::DenseFrames] {
                let old = noise(&mut random, weights * 2);
                let new = changed(&mut random, &old, 2, kind);
                let (before, after) = (device.upload(&old).unwrap(), device.upload(&new).unwrap());
                let found = device.changes(Dtype::BF16, &before, &after).unwrap();
                assert!(found == expected(&old, &new, 2), "{weights} {kind:?}");
            }
        }
    }
}

/// A base and a result with tensors of every width.
fn pair(random: &mut StdRng, sizes: &[usize]) -> (Checkpoint, Checkpoint) {
    let (mut base, mut result) = (Checkpoint::default(), Checkpoint::default());
    for (n, &weights) in sizes.iter().enumerate() {
        let (dtype, width) = WIDTHS[n % WIDTHS.len()];
        let kind = KINDS[random.random_range(0..KINDS.len())];
        let old = noise(random, weights * width);
        let new = changed(random, &old, width, kind);
        for (checkpoint, bytes) in [(&mut base, old), (&mut result, new)] {
            let tensor = TensorData::new(dtype, vec![weights], bytes).unwrap();
            checkpoint.tensors.insert(format!("t{n:02}"), tensor);
        }
    }
    base.files.insert("config.json".into(), "{}".into());
    result.files = base.files.clone();
    (base, result)
}

/// A few tensors of each width, one of them longer than a frame.
fn random_pair(random: &mut StdRng) -> (Checkpoint, Checkpoint) {
    let mut sizes: Vec<usize> = (0..12).map(|_| random.random_range(0..3000)).collect();
    sizes[random.random_range(0..12)] = FRAME_WEIGHTS + random.random_range(0..1000);
    pair(random, &sizes)
}

fn upload(device: &Device, checkpoint: &Checkpoint) -> BTreeMap<String, Tensor> {
    let tensors = checkpoint.tensors.iter();
    tensors
        .map(|(name, tensor)| (name.clone(), device.upload(&tensor.bytes).unwrap()))
        .collect()
}

fn assert_holds(tensors: &BTreeMap<String, Tensor>, checkpoint: &Checkpoint) {
    for (name, tensor) in tensors {
        assert!(tensor.download().unwrap() == **checkpoint.tensors[name].bytes, "{name}");
    }
}

#[test]
fn changes_found_on_the_device_give_the_same_delta() {
    let mut random = StdRng::seed_from_u64(3);
    for device in devices() {
        for _ in 0..12 {
            let (base, result) = random_pair(&mut random);
            let (old, new) = (upload(&device, &base), upload(&device, &result));
            let found = base.tensors.iter().map(|(name, tensor)| {
                let found = device.changes(tensor.dtype, &old[name], &new[name]).unwrap();
                (name.clone(), found)
            });
            let (encoded, delta) = encode_changes(&base, &found.collect(), &ONE).unwrap();
            assert!(encoded == result);
            assert!(delta == encode(&base, &result, &ONE).unwrap());
        }
    }
}

#[test]
fn a_patch_is_repeated_and_reverted_after_an_interrupted_write() {
    let mut random = StdRng::seed_from_u64(4);
    for device in devices() {
        for _ in 0..8 {
            let (base, result) = random_pair(&mut random);
            let delta = encode(&base, &result, &ONE).unwrap();
            let patch = Patch::decode(&base, base.root(), &delta, &ONE).unwrap();
            let tensors = upload(&device, &base);
            let staged = device.stage(&patch, &tensors).unwrap();
            assert_eq!(staged.state().unwrap(), PatchState::Base);
            staged.apply().unwrap();
            assert_holds(&tensors, &result);
            staged.write().unwrap();
            assert_holds(&tensors, &result);
            staged.revert().unwrap();
            assert_holds(&tensors, &base);
            assert_eq!(staged.state().unwrap(), PatchState::Base);

            // the result's bytes up to a random position, then the base's
            let mut torn = base.clone();
            for (name, tensor) in &mut torn.tensors {
                let at = random.random_range(0..=tensor.bytes.len());
                tensor.bytes = [&result.tensors[name].bytes[..at], &tensor.bytes[at..]].concat().into();
            }
            for (result, end) in [(true, &result), (false, &base)] {
                let tensors = upload(&device, &torn);
                let staged = device.stage(&patch, &tensors).unwrap();
                if result { staged.apply() } else { staged.revert() }.unwrap();
                assert_holds(&tensors, end);
            }
        }
    }
}

#[test]
fn digests_equal_xxh3_at_every_length() {
    let mut random = StdRng::seed_from_u64(5);
    for device in devices() {
        let mut lengths: Vec<usize> = (1..2300).collect();
        lengths.extend([4096, 65_535, 65_536, 65_537, 1 << 20, (1 << 21) - 1, 1 << 21, 1 << 23]);
        let bytes = noise(&mut random, (1 << 23) + 12_344);
        let tensor = device.upload(&bytes).unwrap();
        let ranges: Vec<_> = lengths
            .into_iter()
            .map(|length| {
                let start = random.random_range(0..=(bytes.len() - length) / 16) * 16;
                start..start + length
            })
            .collect();
        let expected: Vec<_> = ranges.iter().map(|at| delta::digest(&bytes[at.clone()])).collect();
        let parts = ranges.iter().map(|at| (&tensor.0, at.clone()));
        let hashes = hash::Hashes::new(&device.driver, parts).unwrap();
        assert_eq!(hashes.digests().unwrap(), expected);

        for (dtype, width) in WIDTHS {
            let frames = bytes.chunks(FRAME_WEIGHTS * width).map(delta::digest);
            assert_eq!(device.digests(dtype, &tensor).unwrap(), frames.collect::<Vec<_>>());
        }
        assert_eq!(device.digests(Dtype::F32, &device.upload(&[]).unwrap()).unwrap(), []);
    }
}

#[test]
fn a_patch_on_other_bytes_is_refused_and_reverted() {
    let mut random = StdRng::seed_from_u64(6);
    for device in devices() {
        let (base, _) = pair(&mut random, &[500, 500, 500]);
        let mut result = base.clone();
        let tensor = result.tensors.get_mut("t01").unwrap();
        tensor.bytes = changed(&mut random, &tensor.bytes, 2, Kind::Share(0.05)).into();
        let delta = encode(&base, &result, &ONE).unwrap();
        let patch = Patch::decode(&base, base.root(), &delta, &ONE).unwrap();
        let Change::Some(values) = &patch.pieces("t01")[0].new else {
            panic!("not sparse");
        };
        // a weight that the patch does not change
        let unchanged = (0..500).find(|i| values.iter().all(|&(index, _)| index != *i)).unwrap();
        let mut wrong = base.clone();
        let tensor = wrong.tensors.get_mut("t01").unwrap();
        let mut bytes = tensor.bytes.to_vec();
        bytes[2 * unchanged as usize] ^= 1;
        tensor.bytes = bytes.into();
        let tensors = upload(&device, &wrong);
        let staged = device.stage(&patch, &tensors).unwrap();
        assert_eq!(staged.state().unwrap(), PatchState::Neither);
        assert!(matches!(staged.apply(), Err(Error::NotResult)));
        assert_holds(&tensors, &wrong);
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused_before_a_write() {
    let mut random = StdRng::seed_from_u64(7);
    let devices = [devices(), devices()];
    for (device, other) in devices[0].iter().zip(&devices[1]) {
        let (base, result) = pair(&mut random, &[300, 300]);
        let delta = encode(&base, &result, &ONE).unwrap();
        let patch = Patch::decode(&base, base.root(), &delta, &ONE).unwrap();
        let Some(name) = patch.tensors().next() else { continue };
        let mut tensors = upload(device, &base);
        let bytes = tensors[name].bytes();
        tensors.insert(name.into(), device.upload(&vec![0; bytes - 1]).unwrap());
        let error = device.stage(&patch, &tensors).unwrap_err();
        assert!(matches!(error, Error::Size { needed, found, .. } if needed == bytes && found == bytes - 1));
        tensors.remove(name);
        let error = device.stage(&patch, &tensors).unwrap_err();
        assert!(matches!(error, Error::NoTensor(missing) if missing == name));
        let elsewhere = upload(other, &base);
        assert!(matches!(device.stage(&patch, &elsewhere), Err(Error::Elsewhere)));
        let (a, b) = (device.upload(&[1; 8]).unwrap(), device.upload(&[1; 12]).unwrap());
        assert!(matches!(device.changes(Dtype::F32, &a, &b), Err(Error::Bounds { .. })));
        assert!(matches!(device.changes(Dtype::F64, &b, &b), Err(Error::Bounds { .. })));
    }
}
