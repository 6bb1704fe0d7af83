//! Any checkpoints and any steps: lossless in both directions, and a broken delta never makes
//! another version. `SPRINGTIDE_DELTA_TENSORS=1000000` runs more cases.

use proptest::prelude::*;
use safetensors::Dtype;

use super::super::index::resealed;
use super::{ONE, apply, apply_within, encode, noise, single, small};
use crate::checkpoint::Checkpoint;
use crate::delta::{Patch, apply_reverse};
use crate::tensor::TensorData;

fn any_checkpoint() -> impl Strategy<Value = Checkpoint> {
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
    (tensors, files).prop_map(|(tensors, files)| Checkpoint {
        tensors: tensors
            .into_iter()
            .map(|(name, (dtype, shape, seed, flat))| {
                let size = crate::tensor::bytes_of(dtype, &shape).unwrap();
                let byte = |i: usize| if flat { seed / 128 } else { (i as u8).wrapping_mul(seed) };
                let bytes: Vec<u8> = (0..size).map(byte).collect();
                (name, TensorData::new(dtype, shape, bytes).unwrap())
            })
            .collect(),
        files: files.into_iter().map(|(name, bytes)| (name, bytes.into())).collect(),
    })
}

/// A tensor of any dtype before and after some of its weights took other bits.
fn any_step() -> impl Strategy<Value = (Dtype, Vec<u8>, Vec<u8>)> {
    let dtype = prop::sample::select(vec![
        Dtype::BF16,
        Dtype::F16,
        Dtype::F32,
        Dtype::F64,
        Dtype::C64,
        Dtype::I8,
        Dtype::U16,
        Dtype::I64,
        Dtype::F8_E4M3,
        Dtype::F8_E8M0,
        Dtype::F4,
        Dtype::BOOL,
    ]);
    let shares = prop_oneof![Just(0u8), Just(1), Just(10), Just(120), Just(255)];
    (dtype, 0usize..3000, any::<u8>(), shares, any::<bool>()).prop_map(|(dtype, weights, seed, share, near)| {
        let bytes = (weights * dtype.bitsize() / 8).next_multiple_of(dtype.bitsize().div_ceil(8));
        let width = crate::tensor::weight_bytes(dtype);
        let (old, chance) = (noise(seed, bytes), noise(seed.wrapping_add(1), bytes));
        let mut new = old.clone();
        for (weight, chance) in new.chunks_exact_mut(width).zip(chance.chunks_exact(width)) {
            if chance[0] < share {
                if near {
                    weight[0] = weight[0].wrapping_add(chance[0] % 3).wrapping_sub(1);
                } else {
                    weight.copy_from_slice(chance);
                }
            }
        }
        (dtype, old, new)
    })
}

/// Number of cases.
fn cases() -> ProptestConfig {
    let cases = std::env::var("SPRINGTIDE_DELTA_TENSORS");
    ProptestConfig::with_cases(cases.ok().and_then(|text| text.parse().ok()).unwrap_or(256))
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn a_delta_between_any_two_checkpoints_is_lossless(from in any_checkpoint(), to in any_checkpoint()) {
        let delta = encode(&from, &to).unwrap();
        prop_assert_eq!(apply(&from, &delta).unwrap(), to);
    }

    #[test]
    fn any_step_of_a_tensor_is_applied_and_reversed_bit_for_bit((dtype, old, new) in any_step()) {
        let (old, new) = (single(dtype, old), single(dtype, new));
        let delta = encode(&old, &new).unwrap();
        prop_assert_eq!(&apply(&old, &delta).unwrap(), &new);
        prop_assert_eq!(&apply_reverse(&new, &delta, &ONE).unwrap(), &old);
        let patch = Patch::decode(&old, old.root(), &delta, &ONE).unwrap();
        let mut bytes = old.tensors["w"].bytes.to_vec();
        patch.write("w", &mut bytes).unwrap();
        prop_assert_eq!(&bytes[..], &new.tensors["w"].bytes[..]);
    }

    #[test]
    fn arbitrary_bytes_behind_a_valid_checksum_never_panic_and_never_make_another_version(
        noise in prop::collection::vec(any::<u8>(), 1..40),
        position in 0usize..4000,
        which in 0usize..2,
    ) {
        let (base, result) = &small()[which];
        let mut delta = encode(base, result).unwrap();
        let start = position % delta.len();
        for (slot, byte) in delta[start..].iter_mut().zip(noise) {
            *slot = byte;
        }
        if let Ok(arrived) = apply_within(base, &resealed(delta), 1 << 20) {
            prop_assert_eq!(&arrived, result);
        }
    }
}
