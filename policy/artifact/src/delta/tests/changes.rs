//! [`encode_changes`]: given changes are used, impossible ones are refused.

use super::*;

fn parts() -> (Checkpoint, Checkpoint, Vec<(u32, u64)>) {
    let (base, result) = lean(5000);
    let (old, new) = (&base.tensors["w"].bytes, &result.tensors["w"].bytes);
    let mut differing = vec![];
    frame::differing(2, old, new, &mut differing);
    let value = |index: u32| simd::value::<2>(simd::at(new, index));
    let values = differing.into_iter().map(|index| (index, value(index))).collect();
    (base, result, values)
}

fn of(changes: Vec<Change>) -> Changes {
    [("w".to_string(), changes)].into()
}

#[test]
fn known_changes_give_the_same_delta_as_a_comparison() {
    let (base, result, values) = parts();
    let expected = (result.clone(), encode(&base, &result).unwrap());
    let new = result.tensors["w"].bytes.to_vec();
    // also if weights are named that do not change
    let old = &base.tensors["w"].bytes;
    let every = (0..5000)
        .map(|index| {
            let found = values.iter().find(|value| value.0 == index);
            found
                .copied()
                .unwrap_or((index, simd::value::<2>(simd::at(old, index))))
        })
        .collect();
    for change in [Change::Some(values), Change::All(new), Change::Some(every)] {
        assert!(encode_changes(&base, &of(vec![change]), &ONE).unwrap() == expected);
    }
    let same = (base.clone(), encode(&base, &base).unwrap());
    for changes in [Changes::new(), of(vec![Change::Same]), of(vec![Change::Some(vec![])])] {
        assert!(encode_changes(&base, &changes, &ONE).unwrap() == same);
    }
}

#[test]
fn changes_that_are_not_of_the_base_are_refused() {
    let (base, _, values) = parts();
    let twice = [&values[..1], &values[..]].concat();
    for changes in [
        vec![],
        vec![Change::Same, Change::Same],
        vec![Change::All(vec![0; 9998])],
        vec![Change::Some(vec![(5000, 0)])],
        vec![Change::Some(twice)],
    ] {
        let error = encode_changes(&base, &of(changes), &ONE).unwrap_err();
        assert!(matches!(error, Error::Malformed(_)), "{error}");
    }
    let unknown = [("v".to_string(), vec![])].into();
    assert!(encode_changes(&base, &unknown, &ONE).is_err());
}
