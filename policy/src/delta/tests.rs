//! Whole deltas: lossless, bound to their base and result, refused when a byte is wrong.

use super::*;
use crate::image::tests::sample;
use proptest::prelude::*;
use safetensors::Dtype;

/// `sample` after a step that touches every kind of change.
fn changed() -> Image {
    let mut image = sample();
    let weight = image.tensors.get_mut("a.weight").unwrap();
    let mut bytes = weight.bytes.to_vec();
    bytes[4] ^= 0x80; // another NaN payload
    bytes[3] ^= 0x80; // −0.0 becomes 0.0
    weight.bytes = bytes.into();
    image.tensors.remove("b.scalar");
    let shape = image.tensors.get_mut("c.empty").unwrap();
    shape.shape = vec![7, 0];
    let noise: Vec<u8> = (0..600u32).map(|i| ((i * i * 7) >> 3) as u8).collect();
    let added = TensorData::new(Dtype::U8, vec![600], noise).unwrap();
    image.tensors.insert("e.added".into(), added);
    let zeros = TensorData::new(Dtype::F32, vec![10, 10], vec![0; 400]).unwrap();
    image.tensors.insert("f.zeros".into(), zeros);
    image.files.insert("config.json".into(), "{\"a\": 1}".into());
    image.files.remove("empty.txt");
    image.files.insert("new.txt".into(), vec![b'a'; 500].into());
    image
}

/// Weights like a network's, and the same after a step that moves about `share` of them by one ulp.
fn step(weights: usize, share: f64) -> (Image, Image) {
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
    let image = |bytes: Vec<u8>| Image {
        tensors: [(
            "w".to_string(),
            TensorData::new(Dtype::BF16, vec![weights], bytes).unwrap(),
        )]
        .into(),
        ..Image::default()
    };
    (image(base), image(result))
}

/// The same delta with its checksum made right again after a change.
fn resealed(mut delta: Vec<u8>) -> Vec<u8> {
    let body = delta.len() - CHECKSUM_BYTES;
    let checksum = Digest::of(&delta[..body]);
    delta[body..].copy_from_slice(&checksum.0);
    delta
}

#[test]
fn every_kind_of_change_arrives_bit_for_bit_in_both_directions() {
    for (from, to) in [
        (sample(), changed()),
        (changed(), sample()),
        (Image::default(), sample()),
        (sample(), Image::default()),
        (sample(), sample()),
    ] {
        let delta = encode(&from, &to).unwrap();
        let arrived = apply(&from, &delta).unwrap();
        assert_eq!(arrived, to);
        assert_eq!(arrived.root(), to.root());
        let expected = Header {
            base: from.root(),
            result: to.root(),
        };
        assert_eq!(header(&delta).unwrap(), expected);
    }
}

#[test]
fn a_delta_of_one_percent_of_the_weights_is_a_hundredth_of_the_image() {
    let (base, result) = step(400_000, 0.01);
    let delta = encode(&base, &result).unwrap();
    assert_eq!(apply(&base, &delta).unwrap(), result);
    let ratio = 800_000.0 / delta.len() as f64;
    assert!(ratio > 90.0, "{ratio}");
    let stats = stats(&base, &result);
    assert_eq!(stats.total_weights, 400_000);
    assert!((3_500..4_500).contains(&stats.changed_weights), "{stats:?}");
}

#[test]
fn a_dense_change_is_never_larger_than_the_image_by_more_than_the_header() {
    for share in [0.1, 0.5, 1.0] {
        let (base, result) = step(50_000, share);
        let delta = encode(&base, &result).unwrap();
        assert_eq!(apply(&base, &delta).unwrap(), result);
        assert!(delta.len() < 100_000 * 2 / 5, "{share}: {}", delta.len());
    }
    let noise = |seed: u8| {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&[seed]);
        let mut bytes = vec![0; 4000];
        hasher.finalize_xof().fill(&mut bytes);
        let tensor = TensorData::new(Dtype::F32, vec![1000], bytes).unwrap();
        Image {
            tensors: [("w".to_string(), tensor)].into(),
            ..Image::default()
        }
    };
    let delta = encode(&noise(1), &noise(2)).unwrap();
    assert_eq!(apply(&noise(1), &delta).unwrap(), noise(2));
    assert!(delta.len() < 4000 + 220, "{}", delta.len());
}

#[test]
fn the_wrong_base_is_refused_by_name() {
    let delta = encode(&sample(), &changed()).unwrap();
    let error = apply(&changed(), &delta).unwrap_err();
    assert!(matches!(error, Error::WrongBase { expected, .. } if expected == sample().root()));
}

#[test]
fn every_flipped_byte_and_every_truncation_is_refused() {
    let delta = encode(&sample(), &changed()).unwrap();
    for position in 0..delta.len() {
        for flip in [0x01, 0x10, 0x80, 0xff] {
            let mut broken = delta.clone();
            broken[position] ^= flip;
            assert!(apply(&sample(), &broken).is_err(), "{position}");
        }
        assert!(apply(&sample(), &delta[..position]).is_err(), "{position}");
    }
    let longer = [&delta[..], &[0]].concat();
    assert!(apply(&sample(), &longer).is_err());
}

#[test]
fn a_flipped_byte_behind_a_valid_checksum_never_makes_another_version() {
    let delta = encode(&sample(), &changed()).unwrap();
    for position in 0..delta.len() - CHECKSUM_BYTES {
        for bit in 0..8 {
            let mut broken = delta.clone();
            broken[position] ^= 1 << bit;
            // an equal result is possible: a frame may be coded in more than one way
            if let Ok(result) = apply(&sample(), &resealed(broken)) {
                assert_eq!(result, changed(), "{position}");
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
fn another_format_version_is_refused_by_its_number() {
    let mut delta = encode(&sample(), &changed()).unwrap();
    delta[8] = 2;
    assert!(matches!(apply(&sample(), &delta).unwrap_err(), Error::FormatVersion(2)));
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

fn any_image() -> impl Strategy<Value = Image> {
    let dtype = prop_oneof![
        Just(Dtype::BF16),
        Just(Dtype::F32),
        Just(Dtype::F64),
        Just(Dtype::U8),
        Just(Dtype::F8_E4M3),
        Just(Dtype::BOOL),
        Just(Dtype::C64),
    ];
    let tensor = (
        dtype,
        prop::collection::vec(0usize..5, 0..3),
        any::<u8>(),
        any::<bool>(),
    );
    let tensors = prop::collection::btree_map("[a-d]", tensor, 0..4);
    let files = prop::collection::btree_map("[x-z]", prop::collection::vec(any::<u8>(), 0..9), 0..3);
    (tensors, files).prop_map(|(tensors, files)| Image {
        tensors: tensors
            .into_iter()
            .map(|(name, (dtype, shape, seed, flat))| {
                let size = crate::image::bytes_of(dtype, &shape).unwrap();
                let byte = |i: usize| if flat { seed / 128 } else { (i as u8).wrapping_mul(seed) };
                let bytes: Vec<u8> = (0..size).map(byte).collect();
                (name, TensorData::new(dtype, shape, bytes).unwrap())
            })
            .collect(),
        files: files.into_iter().map(|(name, bytes)| (name, bytes.into())).collect(),
    })
}

proptest! {
    #[test]
    fn any_two_images_are_joined_losslessly(from in any_image(), to in any_image()) {
        let delta = encode(&from, &to).unwrap();
        prop_assert_eq!(apply(&from, &delta).unwrap(), to);
    }

    #[test]
    fn arbitrary_bytes_behind_a_valid_frame_never_panic(
        noise in prop::collection::vec(any::<u8>(), 1..40),
        position in 0usize..400,
    ) {
        let mut delta = encode(&sample(), &changed()).unwrap();
        let body = delta.len() - CHECKSUM_BYTES;
        let start = position % body;
        for (slot, byte) in delta[start..body].iter_mut().zip(noise) {
            *slot = byte;
        }
        if let Ok(result) = apply(&sample(), &resealed(delta)) {
            prop_assert_eq!(result, changed());
        }
    }
}
