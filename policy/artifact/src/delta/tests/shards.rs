//! Several shards make the delta of a single encoder. Incomplete reports are not merged.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::manifest::ObjectRef;

/// Two tensors of several frames, one of a few weights, one of none, of different widths; and a
/// file that changes.
fn pair() -> (Checkpoint, Checkpoint) {
    let (base, result) = lean(2 * FRAME_WEIGHTS + 4321);
    let several = |checkpoint: &Checkpoint, config: &'static str| {
        let w = &checkpoint.tensors["w"];
        let part = |from: usize, weights: usize, dtype: Dtype, shape: Vec<usize>| {
            let bytes = weights * dtype.bitsize() / 8;
            TensorData::new(dtype, shape, w.bytes.slice(from..from + bytes)).unwrap()
        };
        let tensors = [
            ("a", part(0, FRAME_WEIGHTS + 50, Dtype::BF16, vec![FRAME_WEIGHTS + 50])),
            ("b", part(600, 1000, Dtype::F32, vec![10, 100])),
            ("c", part(0, 0, Dtype::BF16, vec![0, 7])),
            ("d", w.clone()),
            ("e", part(1000, 300, Dtype::U8, vec![300])),
        ];
        Checkpoint {
            tensors: tensors.map(|(name, tensor)| (name.to_string(), tensor)).into(),
            files: [("config.json".to_string(), config.into())].into(),
        }
    };
    let (mut base, result) = (several(&base, "{}"), several(&result, "{\"a\": 1}"));
    base.tensors.insert("e".into(), result.tensors["e"].clone());
    (base, result)
}

fn spans<'a>(base: &'a Checkpoint, result: &'a Checkpoint, shard: usize, of: usize) -> Vec<FrameSpan<'a>> {
    let forms = base.tensors.iter();
    let forms = forms.map(|(name, tensor)| (name.as_str(), tensor.dtype, tensor.shape.as_slice()));
    let ranges = partition(forms, shard, of).unwrap();
    let span = |range: &FrameRange<'a>| FrameSpan {
        name: range.name,
        dtype: range.dtype,
        shape: range.shape,
        first_frame: range.frames.start,
        old: &base.tensors[range.name].bytes[range.bytes.clone()],
        new: &result.tensors[range.name].bytes[range.bytes.clone()],
        known: None,
    };
    ranges.iter().map(span).collect()
}

fn shards(base: &Checkpoint, result: &Checkpoint, of: usize) -> Vec<EncodedShard> {
    let shard = |shard| super::super::encode_shard(&spans(base, result, shard, of), &ONE).unwrap();
    (0..of).map(shard).collect()
}

#[test]
fn any_number_of_shards_makes_the_same_bytes() {
    let (base, result) = pair();
    for (base, result) in [(&base, &result), (&result, &base), (&base, &base)] {
        let alone = encode(base, result).unwrap();
        for of in [1, 2, 3, 4, 7, 40] {
            let shards = shards(base, result, of);
            let reports: Vec<ShardReport> = shards.iter().map(|shard| shard.report.clone()).collect();
            for (shard, report) in shards.iter().zip(&reports) {
                assert_eq!(report.shard().object, ObjectRef::of(&shard.object));
                assert_eq!(&ShardReport::from_bytes(&report.to_bytes()).unwrap(), report);
            }
            let merged = merge_shards(&reports, &base.files, &result.files).unwrap();
            assert_eq!(merged.header.base, base.root_anew());
            assert_eq!(merged.header.result, result.root_anew());
            assert_eq!(merged.tensor_bytes, result.tensor_bytes());
            let part = |shard: &EncodedShard| (shard.object.clone(), shard.report.shard().reverse_bytes);
            let mut parts: Vec<_> = shards.iter().map(part).collect();
            parts.push((merged.files.into(), 0));
            assert!(concat(&merged.head, &parts).unwrap() == alone, "{of} shards");
        }
    }
}

#[test]
fn every_frame_has_one_shard_and_shards_about_the_same_work() {
    let (base, _) = pair();
    for of in [1, 2, 3, 5, 64] {
        let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
        let mut most = 0;
        for shard in 0..of {
            let own = spans(&base, &base, shard, of);
            most = most.max(own.iter().map(|span| span.new.len()).sum());
            for span in own {
                let next = seen.entry(span.name).or_default();
                assert_eq!(*next, span.first_frame, "{} of {of}", span.name);
                *next += span.new.len().div_ceil(FRAME_WEIGHTS * weight_bytes(span.dtype));
            }
        }
        assert_eq!(seen.into_values().collect::<Vec<_>>(), [2, 1, 0, 3, 1]);
        let fair = base.tensor_bytes() as usize / of;
        assert!(most <= fair + 2 * FRAME_WEIGHTS, "{most} of {of}");
    }
}

#[test]
fn incomplete_shard_reports_are_refused() {
    let (base, result) = pair();
    let reports: Vec<ShardReport> = shards(&base, &result, 3)
        .into_iter()
        .map(|shard| shard.report)
        .collect();
    let refused = |reports: &[ShardReport], what: &str| {
        let error = merge_shards(reports, &base.files, &result.files).unwrap_err();
        assert!(matches!(error, Error::Malformed(_)), "{what}: {error}");
    };
    let [one, two, three] = <[ShardReport; 3]>::try_from(reports).unwrap();
    refused(&[one.clone(), two.clone()], "the last is missing");
    refused(&[two.clone(), three.clone()], "the first is missing");
    refused(&[one.clone(), three.clone()], "one between is missing");
    refused(&[one.clone(), one.clone(), two.clone(), three.clone()], "one twice");
    refused(&[two.clone(), one.clone(), three.clone()], "another order");
    merge_shards(&[one, two, three], &base.files, &result.files).unwrap();
}

#[test]
fn changes_that_are_not_all_are_refused() {
    let (base, result) = pair();
    // the others are so small or so dense that planes code them
    let large = |span: &FrameSpan<'_>| ["a", "d"].contains(&span.name);
    for span in spans(&base, &result, 0, 1).into_iter().filter(large) {
        let width = crate::tensor::weight_bytes(span.dtype);
        let frames = span
            .old
            .chunks(FRAME_WEIGHTS * width)
            .zip(span.new.chunks(FRAME_WEIGHTS * width));
        let value = |bytes: &[u8], at: u32| {
            let mut value = [0; 8];
            value[..width].copy_from_slice(&bytes[at as usize * width..][..width]);
            u64::from_le_bytes(value)
        };
        let known = frames.map(|(old, new)| {
            let mut indices = vec![];
            frame::differing(width, old, new, &mut indices);
            indices.iter().map(|&at| (at, value(new, at))).collect::<Vec<_>>()
        });
        let known: Vec<Vec<(u32, u64)>> = known.collect();
        let shared = |known: &[Vec<(u32, u64)>]| {
            let known: Vec<Change> = known.iter().map(|values| Change::Some(values.clone())).collect();
            let span = FrameSpan {
                known: Some(&known),
                ..span
            };
            encode_shard(&[span], &ONE).map(drop)
        };
        shared(&known).unwrap();
        for frame in 0..known.len() {
            let mut fewer = known.clone();
            if fewer[frame].pop().is_some() {
                assert!(
                    shared(&fewer).is_err(),
                    "the last change of frame {frame} was not named"
                );
            }
            fewer[frame].clear();
            assert_eq!(
                shared(&fewer).is_err(),
                !known[frame].is_empty(),
                "none of frame {frame} was"
            );
        }
    }
}

#[test]
fn spans_that_are_not_complete_frames_are_refused() {
    let (base, result) = pair();
    let all = spans(&base, &result, 0, 1);
    let is_sparse = [Change::Same];
    let beyond = [Change::Same, Change::Same, Change::Some(vec![(5000, 0)])];
    fn changed<'a>(mut span: FrameSpan<'a>, change: impl FnOnce(&mut FrameSpan<'a>)) -> Error {
        change(&mut span);
        encode_shard(&[span], &ONE).unwrap_err()
    }
    let errors = [
        changed(all[3], |span| {
            span.old = &span.old[2..];
        }),
        changed(all[3], |span| {
            (span.old, span.new) = (&span.old[2..], &span.new[2..]);
        }),
        changed(all[3], |span| {
            (span.old, span.new) = (&span.old[..2], &span.new[..2]);
        }),
        changed(all[3], |span| {
            span.first_frame = 1;
        }),
        changed(all[3], |span| {
            span.first_frame = usize::MAX;
        }),
        changed(all[3], |span| {
            span.known = Some(&is_sparse);
        }),
        changed(all[3], |span| {
            span.known = Some(&beyond);
        }),
    ];
    for error in errors {
        assert!(matches!(error, Error::Malformed(_)), "{error}");
    }
}

#[test]
fn a_shard_number_out_of_range_is_refused_and_a_spare_shard_is_empty() {
    assert!(partition([], 0, 0).is_err() && partition([], 2, 2).is_err());
    assert_eq!(partition([], 1, 2).unwrap(), []);
}

#[test]
fn a_shard_shorter_than_its_reverse_data_is_refused() {
    let parts = [(bytes::Bytes::from_static(b"abc"), 4)];
    assert!(matches!(concat(b"", &parts), Err(Error::Malformed(_))));
}

/// A tensor's shape, the divided dimension, and a range of it.
fn any_slice() -> impl Strategy<Value = (Vec<usize>, usize, std::ops::Range<usize>)> {
    prop::collection::vec(1usize..7, 1..4).prop_flat_map(|shape| {
        let dims = 0..shape.len();
        (Just(shape), dims).prop_flat_map(|(shape, dim)| {
            let extent = shape[dim];
            (Just(shape), Just(dim), 0..=extent, 0..=extent)
                .prop_map(|(shape, dim, a, b)| (shape, dim, a.min(b)..a.max(b)))
        })
    })
}

proptest! {
    #[test]
    fn a_slice_is_taken_compared_and_written_back((shape, dim, range) in any_slice(), seed in any::<u8>()) {
        let weights: usize = shape.iter().product();
        let (old, chance) = (noise(seed, weights * 2), noise(seed.wrapping_add(1), weights * 2));
        let mut new = old.clone();
        for (new, chance) in new.chunks_exact_mut(2).zip(chance.chunks_exact(2)) {
            if chance[0] % 3 == 0 {
                new.copy_from_slice(chance);
            }
        }
        let slice = TensorSlice::new(Dtype::BF16, &shape, dim, range.clone()).unwrap();
        let (part, next) = (slice.take(&old).unwrap(), slice.take(&new).unwrap());
        prop_assert_eq!(part.len(), slice.weights() * 2);
        // the owner of each weight, by walking over all indices
        let inner: usize = shape[dim + 1..].iter().product();
        let expected = (0..weights).filter(|at| range.contains(&(at / inner % shape[dim])));
        let expected: Vec<u8> = expected.flat_map(|at| [old[at * 2], old[at * 2 + 1]]).collect();
        prop_assert_eq!(&part, &expected);

        let changed = slice.compare(&part, &next).unwrap();
        let mut differing = vec![];
        frame::differing(2, &old, &new, &mut differing);
        let every_change = Change::Some(differing.iter().map(|&at| (at, simd::value::<2>(simd::at(&new, at)))).collect());
        prop_assert_eq!(&slice.own(0, &every_change), &changed);
        prop_assert_eq!(&slice.own(0, &Change::Same), &vec![]);

        for weights in [changed.clone(), slice.own(0, &Change::All(new.clone()))] {
            let mut arrived = part.clone();
            slice.write(&weights, &mut arrived).unwrap();
            prop_assert_eq!(&arrived, &next);
        }
        let mut rebuilt = old.clone();
        for (frame, values) in slice.in_frames(&changed) {
            prop_assert_eq!(frame, 0);
            Change::Some(values).write(2, &mut rebuilt);
        }
        prop_assert_eq!(slice.take(&rebuilt).unwrap(), next);
    }
}

#[test]
fn a_row_split_touches_few_frames_and_a_column_split_all() {
    let shape = [4096, 1024];
    let rows = TensorSlice::even(Dtype::BF16, &shape, 0, 1, 4).unwrap();
    assert_eq!((rows.frames(), rows.weights()), (1..2, 1 << 20));
    assert_eq!(
        TensorSlice::new(Dtype::BF16, &shape, 0, 1000..1030).unwrap().frames(),
        0..2
    );
    assert_eq!(TensorSlice::new(Dtype::BF16, &shape, 0, 7..7).unwrap().frames(), 0..0);
    let columns = TensorSlice::even(Dtype::BF16, &shape, 1, 3, 4).unwrap();
    assert_eq!((columns.frames(), columns.weights()), (0..4, 1 << 20));
    // the second of two frames, by its own indices
    let columns = columns.in_frames(&[(0, 7), (255, 8), (256 * 1024, 9)]);
    let expected = [(0, vec![(768, 7), (1023, 8)]), (1, vec![(768, 9)])];
    assert_eq!(columns, expected.into());
}

#[test]
fn slices_out_of_range_are_refused() {
    let even = |shape: &[usize], dim, rank, of| TensorSlice::even(Dtype::BF16, shape, dim, rank, of);
    assert!(even(&[4, 4], 1, 3, 4).is_ok());
    assert!(even(&[4, 4], 2, 0, 1).is_err());
    assert!(even(&[4, 4], 1, 4, 4).is_err());
    assert!(even(&[4, 4], 1, 0, 3).is_err());
    assert!(even(&[4, 4], 1, 0, 0).is_err());
    assert!(TensorSlice::new(Dtype::BF16, &[4, 4], 0, 3..5).is_err());
    assert!(TensorSlice::new(Dtype::F4, &[4, 4], 0, 0..1).is_err());
    let slice = even(&[4, 4], 1, 3, 4).unwrap();
    assert!(slice.take(&[0; 31]).is_err());
    assert!(slice.compare(&[0; 8], &[0; 7]).is_err());
    assert!(slice.write(&[(4, 0)], &mut [0; 8]).is_err());
    assert!(slice.write(&[(u64::MAX, 0)], &mut [0; 8]).is_err());
}
