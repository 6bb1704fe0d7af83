//! Other ways to carry the same change of 16-bit weights, in the same language and on the same
//! bytes. Verified is what all of them are: the XXH3-128 of what they make is taken with the time.

use crate::pairs::Pair;
use crate::{Row, alone, best};
use rayon::prelude::*;
use std::io::{Read, Write};
use std::process::Command;
use twox_hash::XxHash3_128;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Encodes new given old; applies to old, in place where it can.
struct Rival {
    name: &'static str,
    encode: fn(&[u8], &[u8]) -> Vec<u8>,
    apply: fn(&mut [u8], &[u8]),
    rounds: usize,
}

const RIVALS: &[Rival] = &[
    rival("XOR + zstd-1 (arc_v2, stitch)", |old, new| xor(old, new, 1), unxor),
    rival("XOR + zstd-3", |old, new| xor(old, new, 3), unxor),
    rival("u16 gap + value + zstd-1 (slime)", gap_value, apply_gap_value),
    rival("u8/u16 rows and columns + value + zstd-1 (PULSE)", pulse, apply_pulse),
    rival("int32 + bf16 (TRL)", int32, apply_int32),
    Rival {
        rounds: 1,
        ..rival("zstd --patch-from, level 3", patch_from, apply_patch_from)
    },
];

const fn rival(name: &'static str, encode: fn(&[u8], &[u8]) -> Vec<u8>, apply: fn(&mut [u8], &[u8])) -> Rival {
    Rival {
        name,
        encode,
        apply,
        rounds: 3,
    }
}

pub fn rows(pair: &Pair, cores: usize) -> Result<Vec<Row>> {
    let bytes = pair.new.len();
    let part = bytes.div_ceil(cores).next_multiple_of(8192);
    let expected: Vec<u128> = pair.new.chunks(part).map(XxHash3_128::oneshot).collect();
    let mut rows = vec![];
    for rival in RIVALS {
        let delta = (rival.encode)(&pair.old, &pair.new);
        let mut decoded = pair.old.clone();
        (rival.apply)(&mut decoded, &delta);
        if decoded != pair.new {
            // gaps or steps of rows that its fields have no room for
            println!("| {} | {}: cannot carry it | | | | | |", pair.name, rival.name);
            continue;
        }
        let olds: Vec<&[u8]> = pair.old.chunks(part).collect();
        let news: Vec<&[u8]> = pair.new.chunks(part).collect();
        let deltas: Vec<_> = olds
            .iter()
            .zip(&news)
            .map(|(old, new)| (rival.encode)(old, new))
            .collect();
        let encode = alone(
            bytes,
            rival.rounds,
            || (),
            |()| drop((rival.encode)(&pair.old, &pair.new)),
        );
        let encode_all = best(
            bytes,
            rival.rounds,
            || (),
            |()| {
                olds.par_iter()
                    .zip(&news)
                    .for_each(|(old, new)| drop((rival.encode)(old, new)));
            },
        );
        let apply = alone(
            bytes,
            rival.rounds,
            || pair.old.clone(),
            |old| {
                (rival.apply)(old, &delta);
                std::hint::black_box(XxHash3_128::oneshot(old));
            },
        );
        let fresh = || olds.iter().map(|old| old.to_vec()).collect::<Vec<_>>();
        let apply_all = best(bytes, rival.rounds, fresh, |olds| {
            let parts = olds.par_iter_mut().zip(&deltas).zip(&expected);
            parts.for_each(|((old, delta), expected)| {
                (rival.apply)(old, delta);
                assert_eq!(XxHash3_128::oneshot(old), *expected);
            });
        });
        rows.push(Row {
            pair: pair.name.clone(),
            way: rival.name.into(),
            delta_bytes: delta.len(),
            model_bytes: bytes,
            encode: Some(encode),
            apply: Some(apply),
            encode_all: Some(encode_all),
            apply_all: Some(apply_all),
        });
    }
    Ok(rows)
}

fn zstd(bytes: &[u8], level: i32) -> Vec<u8> {
    zstd::bulk::compress(bytes, level).unwrap_or_default()
}

fn unzstd(bytes: &[u8], size: usize) -> Vec<u8> {
    zstd::bulk::decompress(bytes, size).unwrap_or_default()
}

fn xor(old: &[u8], new: &[u8], level: i32) -> Vec<u8> {
    let differs: Vec<u8> = old.iter().zip(new).map(|(old, new)| old ^ new).collect();
    zstd(&differs, level)
}

fn unxor(old: &mut [u8], delta: &[u8]) {
    let differs = unzstd(delta, old.len());
    for (old, differs) in old.iter_mut().zip(differs) {
        *old ^= differs;
    }
}

/// Indices of the weights that differ.
fn changed(old: &[u8], new: &[u8]) -> Vec<u32> {
    let mut changed = vec![];
    for (block, (old, new)) in old.chunks(128).zip(new.chunks(128)).enumerate() {
        if old != new {
            let weights = old.as_chunks::<2>().0.iter().zip(new.as_chunks::<2>().0).enumerate();
            changed.extend(
                weights
                    .filter(|(_, (old, new))| old != new)
                    .map(|(i, _)| (block * 64 + i) as u32),
            );
        }
    }
    changed
}

fn values<'a>(new: &'a [u8], changed: &'a [u32]) -> impl Iterator<Item = u8> + 'a {
    changed
        .iter()
        .flat_map(|&i| [new[2 * i as usize], new[2 * i as usize + 1]])
}

/// Gaps of more than 65,535 do not occur at these densities; a bridge would cost a value.
fn gap_value(old: &[u8], new: &[u8]) -> Vec<u8> {
    let changed = changed(old, new);
    let mut last = 0;
    let mut out: Vec<u8> = vec![];
    for &i in &changed {
        out.extend(((i - last) as u16).to_le_bytes());
        last = i;
    }
    out.extend(values(new, &changed));
    sized(&out)
}

fn apply_gap_value(old: &mut [u8], delta: &[u8]) {
    let bytes = unsized_(delta);
    let (gaps, values) = bytes.split_at(bytes.len() / 2);
    let mut at = 0;
    for (gap, value) in gaps.as_chunks::<2>().0.iter().zip(values.as_chunks::<2>().0) {
        at += usize::from(u16::from_le_bytes(*gap));
        old[2 * at..2 * at + 2].copy_from_slice(value);
    }
}

/// Rows of 4096: u8 steps of the row, u16 columns, as differences within a row; then values.
fn pulse(old: &[u8], new: &[u8]) -> Vec<u8> {
    let changed = changed(old, new);
    let (mut rows, mut columns): (Vec<u8>, Vec<u8>) = (vec![], vec![]);
    let (mut row, mut column) = (0, 0);
    for &i in &changed {
        let same = i >> 12 == row;
        rows.push(((i >> 12) - row).min(255) as u8);
        columns.extend(((i & 4095) - if same { column } else { 0 }).to_le_bytes()[..2].iter());
        (row, column) = (i >> 12, i & 4095);
    }
    rows.extend(columns);
    rows.extend(values(new, &changed));
    sized(&rows)
}

fn apply_pulse(old: &mut [u8], delta: &[u8]) {
    let bytes = unsized_(delta);
    let count = bytes.len() / 5;
    let (rows, rest) = bytes.split_at(count);
    let (columns, values) = rest.split_at(2 * count);
    let (mut row, mut column) = (0, 0);
    for ((step, change), value) in rows
        .iter()
        .zip(columns.as_chunks::<2>().0)
        .zip(values.as_chunks::<2>().0)
    {
        let change = usize::from(u16::from_le_bytes(*change));
        column = if *step == 0 { column + change } else { change };
        row += usize::from(*step);
        let at = 2 * (row * 4096 + column);
        old[at..at + 2].copy_from_slice(value);
    }
}

fn int32(old: &[u8], new: &[u8]) -> Vec<u8> {
    let changed = changed(old, new);
    let mut out: Vec<u8> = changed.iter().flat_map(|i| i.to_le_bytes()).collect();
    out.extend(values(new, &changed));
    out
}

fn apply_int32(old: &mut [u8], delta: &[u8]) {
    let (indices, values) = delta.split_at(delta.len() / 6 * 4);
    for (index, value) in indices.as_chunks::<4>().0.iter().zip(values.as_chunks::<2>().0) {
        let at = 2 * u32::from_le_bytes(*index) as usize;
        old[at..at + 2].copy_from_slice(value);
    }
}

/// With its size before compression.
fn sized(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes()[..], &zstd(bytes, 1)].concat()
}

fn unsized_(delta: &[u8]) -> Vec<u8> {
    let Some((size, packed)) = delta.split_first_chunk() else {
        return vec![];
    };
    unzstd(packed, u64::from_le_bytes(*size) as usize)
}

fn patch_from(old: &[u8], new: &[u8]) -> Vec<u8> {
    let encode = || -> std::io::Result<Vec<u8>> {
        let mut encoder = zstd::stream::write::Encoder::with_ref_prefix(vec![], 3, old)?;
        encoder.long_distance_matching(true)?;
        encoder.window_log(window(old))?;
        encoder.write_all(new)?;
        encoder.finish()
    };
    encode().unwrap_or_default()
}

fn apply_patch_from(old: &mut [u8], delta: &[u8]) {
    let decode = || -> std::io::Result<Vec<u8>> {
        let mut decoder = zstd::stream::read::Decoder::with_ref_prefix(delta, old)?;
        decoder.window_log_max(window(old))?;
        let mut out = Vec::with_capacity(old.len());
        decoder.read_to_end(&mut out)?;
        Ok(out)
    };
    if let Ok(result) = decode() {
        old.copy_from_slice(&result);
    }
}

fn window(bytes: &[u8]) -> u32 {
    (2 * bytes.len()).ilog2().clamp(20, 31) + 1
}

/// bsdiff and xdelta3 where they are installed, as they are run: with their start and their files.
pub fn programs(pair: &Pair) -> Result<Vec<Row>> {
    let folder = std::env::temp_dir().join(format!("springtide-bench-delta-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let path = |name: &str| folder.join(name).to_string_lossy().into_owned();
    std::fs::write(path("old"), &pair.old)?;
    std::fs::write(path("new"), &pair.new)?;
    let (old, new, delta, result) = (path("old"), path("new"), path("delta"), path("result"));
    let programs: [(&str, Vec<&str>, &str, Vec<&str>); 2] = [
        (
            "bsdiff",
            vec![&old, &new, &delta],
            "bspatch",
            vec![&old, &result, &delta],
        ),
        (
            "xdelta3",
            vec!["-e", "-f", "-9", "-s", &old, &new, &delta],
            "xdelta3",
            vec!["-d", "-f", "-s", &old, &delta, &result],
        ),
    ];
    let mut rows = vec![];
    for (name, encode, applier, apply) in programs {
        if Command::new(name).arg("-V").output().is_err() {
            println!("| {} | {name}: not installed | | | | | |", pair.name);
            continue;
        }
        let run = |program: &str, arguments: &[&str]| -> Result<f64> {
            let started = std::time::Instant::now();
            let status = Command::new(program).args(arguments).status()?;
            if !status.success() {
                return Err(format!("{program} {arguments:?}: {status}").into());
            }
            Ok(pair.new.len() as f64 / started.elapsed().as_secs_f64() / 1e9)
        };
        let encode = run(name, &encode)?;
        let apply = run(applier, &apply)?;
        if std::fs::read(&result)? != pair.new {
            return Err(format!("{name}: not lossless").into());
        }
        rows.push(Row {
            pair: pair.name.clone(),
            way: format!("{name} (program)"),
            delta_bytes: std::fs::metadata(&delta)?.len() as usize,
            model_bytes: pair.new.len(),
            encode: Some(encode),
            apply: Some(apply),
            encode_all: None,
            apply_all: None,
        });
    }
    std::fs::remove_dir_all(&folder)?;
    Ok(rows)
}
