//! Several shards make the delta of a single encoder. Incomplete reports are not merged.

use std::collections::BTreeMap;

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
fn spans_that_are_not_complete_frames_are_refused() {
    let (base, result) = pair();
    let all = spans(&base, &result, 0, 1);
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
