//! Deltas that several trainer ranks encode and several engine ranks read. Each rank has only parts
//! of the tensors.

use std::collections::BTreeMap;

use super::*;
use artifact::delta::{Change, FRAME_WEIGHTS, FrameRange, FrameSpan, TensorSlice};
use artifact::merkle::ChunkHash;

/// TensorSlice along dimension 0, along dimension 1, by expert, and not at all.
const SLICES: [(&str, Option<usize>); 4] = [
    ("embed.weight", Some(0)),
    ("mlp.down.weight", Some(1)),
    ("mlp.experts", Some(0)),
    ("norm.weight", None),
];

/// Frames of three tensors end within rows.
fn version(step: u32) -> Checkpoint {
    let tensor = |name: u32, dtype: Dtype, shape: &[usize]| {
        let weights: usize = shape.iter().product();
        let width = dtype.bitsize() / 8;
        let mut bytes = Vec::with_capacity(weights * width);
        for at in 0..weights as u32 {
            let random = (at ^ name << 27).wrapping_mul(2_654_435_761);
            let moved = (1..=step).filter(|step| (random >> 7) % 97 == step * 13 % 97).count() as u32;
            let bits = 0x3c00 + (random >> 22) + moved;
            bytes.extend(&bits.to_le_bytes()[..2]);
            bytes.resize(bytes.len() + width - 2, 0);
        }
        TensorData::new(dtype, shape.to_vec(), bytes).unwrap()
    };
    let tensors = [
        ("embed.weight", tensor(1, Dtype::BF16, &[1200, 1000])),
        ("mlp.down.weight", tensor(2, Dtype::BF16, &[1000, 2200])),
        ("mlp.experts", tensor(3, Dtype::BF16, &[8, 100, 40])),
        ("norm.weight", tensor(4, Dtype::F32, &[1000])),
    ];
    Checkpoint {
        tensors: tensors.map(|(name, tensor)| (name.to_string(), tensor)).into(),
        files: [("config.json".to_string(), "{}".into())].into(),
    }
}

/// A rank's parts of all tensors. The first rank has the tensors that are not sliced.
struct Rank {
    slices: BTreeMap<&'static str, TensorSlice>,
    parts: BTreeMap<&'static str, Vec<u8>>,
}

fn ranks(checkpoint: &Checkpoint, of: usize) -> Vec<Rank> {
    let rank = |rank: usize| {
        let slice = |(name, dim): (&'static str, Option<usize>)| {
            let tensor = &checkpoint.tensors[name];
            let slice = match dim {
                Some(dim) => TensorSlice::even(tensor.dtype, &tensor.shape, dim, rank, of),
                None => TensorSlice::even(tensor.dtype, &tensor.shape, 0, 0, 1),
            };
            (name, slice.unwrap())
        };
        let slices: BTreeMap<_, _> = SLICES.map(slice).into();
        let part = |(&name, slice): (&&'static str, &TensorSlice)| {
            (name, slice.take(&checkpoint.tensors[name].bytes).unwrap())
        };
        Rank {
            parts: slices.iter().map(part).collect(),
            slices,
        }
    };
    (0..of).map(rank).collect()
}

fn ranges(checkpoint: &Checkpoint, rank: usize, of: usize) -> Vec<FrameRange<'_>> {
    let forms = checkpoint.tensors.iter();
    let forms = forms.map(|(name, tensor)| (name.as_str(), tensor.dtype, tensor.shape.as_slice()));
    delta::partition(forms, rank, of).unwrap()
}

/// Each rank compares its weights and sends the changes to the ranks that encode the frames, which
/// have the base. Those upload shards and one rank merges them.
async fn publish(f: &Fixture, base: (&Manifest, &Checkpoint), next: &Checkpoint, of: usize) -> Manifest {
    let (parent, base) = base;
    let mut changes: BTreeMap<(String, usize), Vec<(u32, u64)>> = BTreeMap::new();
    for (rank, (old, new)) in ranks(base, of).iter().zip(ranks(next, of)).enumerate() {
        for (name, slice) in &old.slices {
            if rank > 0 && SLICES.contains(&(name, None)) {
                continue;
            }
            let changed = slice.compare(&old.parts[name], &new.parts[name]).unwrap();
            for (frame, weights) in slice.in_frames(&changed) {
                changes.entry((name.to_string(), frame)).or_default().extend(weights);
            }
        }
    }
    let (mut reports, mut delta_shards) = (vec![], vec![]);
    for rank in 0..of {
        let mut encoded = vec![];
        for range in ranges(base, rank, of) {
            let (old, width) = (
                &base.tensors[range.name].bytes[range.bytes.clone()],
                artifact::tensor::weight_bytes(range.dtype),
            );
            let mut new = old.to_vec();
            let mut known = vec![];
            for (frame, bytes) in range.frames.clone().zip(new.chunks_mut(FRAME_WEIGHTS * width)) {
                let mut weights = changes.remove(&(range.name.into(), frame)).unwrap_or_default();
                weights.sort_unstable();
                for &(index, value) in &weights {
                    bytes[index as usize * width..][..width].copy_from_slice(&value.to_le_bytes()[..width]);
                }
                known.push(Change::Some(weights));
            }
            encoded.push((range, old, new, known));
        }
        let spans = encoded.iter().map(|(range, old, new, known)| FrameSpan {
            name: range.name,
            dtype: range.dtype,
            shape: range.shape,
            first_frame: range.frames.start,
            old,
            new,
            known: Some(known),
        });
        let shard = delta::encode_shard(&spans.collect::<Vec<_>>(), &Threads::ONE).unwrap();
        let object = f.store.put_object(POLICY, &shard.object).await.unwrap();
        assert_eq!(shard.report.shard().object, object);
        delta_shards.push(shard.report.shard());
        reports.push(shard.report);
    }
    let merged = delta::merge_shards(&reports, &base.files, &next.files).unwrap();
    assert_eq!(merged.header.base, parent.root);
    let manifest = Manifest {
        version: parent.version + 1,
        root: merged.header.result,
        parent: Some(Parent {
            version: parent.version,
            root: parent.root,
        }),
        checkpoint: None,
        delta: Some(f.store.put_object(POLICY, &merged.head.into()).await.unwrap()),
        delta_shards,
        tensor_bytes: merged.tensor_bytes,
        ..parent.clone()
    };
    let outcome = f.store.put_manifest(&manifest, &f.key).await.unwrap();
    assert_eq!(outcome, PutOutcome::Created);
    manifest
}

/// Each rank fetches the payloads of a span of frames whose base it has, verifies the result and
/// sends the changes to the ranks that hold the weights. Returns each rank's parts and fetched
/// payload bytes.
async fn follow(f: &Fixture, base: &Checkpoint, manifest: &Manifest, of: usize) -> (Vec<Rank>, Vec<usize>) {
    let mut ranks = ranks(base, of);
    let delta = f.store.open_delta(POLICY, manifest).await.unwrap();
    let mut fetched = vec![];
    let mut subtrees: BTreeMap<&str, Vec<ChunkHash>> = BTreeMap::new();
    for rank in 0..of {
        let mut bytes_fetched = 0;
        for range in ranges(base, rank, of) {
            let tensor = &base.tensors[range.name];
            let mut bytes = tensor.bytes[range.bytes.clone()].to_vec();
            let payload = delta.payload(&f.store, range.name, range.frames.clone()).await.unwrap();
            bytes_fetched += payload.len();
            let changes = delta
                .slices
                .changes(range.name, range.frames.start, &payload, &mut bytes)
                .unwrap();
            for (frame, change) in range.frames.clone().zip(&changes) {
                for rank in &mut ranks {
                    let own = rank.slices[range.name].own(frame, change);
                    rank.slices[range.name]
                        .write(&own, rank.parts.get_mut(range.name).unwrap())
                        .unwrap();
                }
            }
            let frame = FRAME_WEIGHTS * artifact::tensor::weight_bytes(range.dtype);
            for (n, bytes) in bytes.chunks(frame).enumerate() {
                let subtree = delta::frame_hash(bytes, range.bytes.start + n * frame, tensor.bytes.len());
                subtrees.entry(range.name).or_default().push(subtree);
            }
        }
        fetched.push(bytes_fetched);
    }
    // No rank had a whole tensor, and all digests match the manifest.
    for (name, subtrees) in subtrees {
        let tensor = &base.tensors[name];
        let digest = delta::tensor_digest(&subtrees, tensor.dtype, tensor.bytes.len());
        assert_eq!(Some(digest), delta.slices.result(name), "{name}");
    }
    (ranks, fetched)
}

#[tokio::test]
async fn trainers_and_engines_of_any_number_of_ranks_have_the_same_bytes() {
    let (base, next) = (version(1), version(2));
    let alone = delta::encode(&base, &next, &Threads::ONE).unwrap();
    for senders in [1, 2, 4] {
        let f = fixture();
        let first = first(&f, &base).await;
        let manifest = publish(&f, (&first, &base), &next, senders).await;
        assert_eq!(manifest.root, next.root());
        assert_eq!(manifest.delta_shards.len(), senders);
        assert_eq!(manifest.delta_bytes(), Some(alone.len() as u64));
        for receivers in [1, 2, 4] {
            let (arrived, fetched) = follow(&f, &base, &manifest, receivers).await;
            for (rank, expected) in arrived.iter().zip(ranks(&next, receivers)) {
                assert!(rank.parts == expected.parts, "{senders} and {receivers} ranks");
            }
            // Each payload is fetched once, and no rank fetches most of them.
            let payloads = delta::header(&alone).map(|_| fetched.iter().sum::<usize>()).unwrap();
            let most = fetched.iter().max().unwrap();
            assert!(*most <= payloads / receivers + payloads / 3, "{fetched:?}");
        }
        // The merged delta equals one that a single rank would encode.
        let rebuilt = f.materialize(2, &[(1, Arc::new(base.clone()))]).await.unwrap();
        assert_eq!(rehashed(&rebuilt.checkpoint), manifest.root);
        assert_eq!(rebuilt.bytes_fetched, alone.len() as u64);
        let back = f.materialize(1, &[(2, rebuilt.checkpoint.clone())]).await.unwrap();
        assert_eq!((back.path, rehashed(&back.checkpoint)), (vec![2, 1], first.root));
    }
}

async fn first(f: &Fixture, base: &Checkpoint) -> Manifest {
    let mut manifest = f.chain(1, 1).await.remove(0).0;
    std::fs::remove_file(f.path(&format!("policy/{POLICY}/version/{:010}.json", 1))).unwrap();
    std::fs::remove_file(f.object_path(&manifest.checkpoint.unwrap())).unwrap();
    manifest.root = base.root();
    manifest.tensor_bytes = base.tensor_bytes();
    manifest.checkpoint = Some(f.store.put_object(POLICY, &base.to_bytes().unwrap()).await.unwrap());
    f.store.put_manifest(&manifest, &f.key).await.unwrap();
    manifest
}

#[tokio::test]
async fn a_missing_or_damaged_shard_makes_the_delta_unusable() {
    let (base, next) = (version(1), version(2));
    let f = fixture();
    let first = first(&f, &base).await;
    let manifest = publish(&f, (&first, &base), &next, 4).await;
    assert!(f.store.reachable(POLICY, 2, &f.trusted()).await.is_ok());
    let held = [(1, Arc::new(base.clone()))];
    let shard = f.object_path(&manifest.delta_shards[1].object);
    let sound = std::fs::read(&shard).unwrap();
    let mut flipped = sound.clone();
    flipped[sound.len() / 3] ^= 1;
    for spoiled in [Some(flipped), Some(sound[1..].to_vec()), None] {
        match &spoiled {
            Some(bytes) => std::fs::write(&shard, bytes).unwrap(),
            None => std::fs::remove_file(&shard).unwrap(),
        }
        let error = f.materialize(2, &held).await.unwrap_err();
        assert!(matches!(error, Error::NoPath { .. }), "{error}");
        let catalog = f.store.catalog(POLICY, &f.trusted()).await.unwrap();
        let lengths_differ = spoiled.is_none_or(|bytes| bytes.len() != sound.len());
        assert_eq!(catalog.costs(&Default::default()).of(2).is_none(), lengths_differ);
        assert_eq!(
            f.store.reachable(POLICY, 2, &f.trusted()).await.is_err(),
            lengths_differ
        );
    }
    // A checkpoint bypasses it.
    let mut with_checkpoint = manifest.clone();
    with_checkpoint.checkpoint = Some(f.store.put_object(POLICY, &next.to_bytes().unwrap()).await.unwrap());
    std::fs::remove_file(f.path(&format!("policy/{POLICY}/version/{:010}.json", 2))).unwrap();
    f.store.put_manifest(&with_checkpoint, &f.key).await.unwrap();
    let rebuilt = f.materialize(2, &held).await.unwrap();
    assert_eq!(
        (rebuilt.path, rehashed(&rebuilt.checkpoint)),
        (vec![2], with_checkpoint.root)
    );
}

#[tokio::test]
async fn a_frame_reader_accepts_single_object_deltas_and_only_those_of_its_manifest() {
    let f = fixture();
    let versions = f.chain(3, 10).await;
    let (manifest, checkpoint) = &versions[2];
    let delta = f.store.open_delta(POLICY, manifest).await.unwrap();
    let mut bytes = versions[1].1.tensors["w"].bytes.to_vec();
    let payload = delta.payload(&f.store, "w", 0..1).await.unwrap();
    delta.slices.apply_fetched("w", 0, &payload, &mut bytes).unwrap();
    assert_eq!(bytes, checkpoint.tensors["w"].bytes[..]);
    assert!(delta.payload(&f.store, "x", 0..1).await.unwrap().is_empty());
    let mut other = manifest.clone();
    other.delta = versions[1].0.delta;
    let error = f.store.open_delta(POLICY, &other).await.unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    other.delta = None;
    let error = f.store.open_delta(POLICY, &other).await.unwrap_err();
    assert!(matches!(error, Error::Document { .. }), "{error}");
}

#[tokio::test]
async fn a_shard_in_the_trash_is_still_readable() {
    let (base, next) = (version(1), version(2));
    let f = fixture();
    let first = first(&f, &base).await;
    let manifest = publish(&f, (&first, &base), &next, 1).await;
    let delta = f.store.open_delta(POLICY, &manifest).await.unwrap();
    let before = delta.payload(&f.store, "embed.weight", 0..2).await.unwrap();
    let shard = manifest.delta_shards[0].object;
    let trash = f.path(&format!("policy/{POLICY}/trash/{}", shard.digest));
    std::fs::create_dir_all(trash.parent().unwrap()).unwrap();
    std::fs::rename(f.object_path(&shard), &trash).unwrap();
    assert_eq!(delta.payload(&f.store, "embed.weight", 0..2).await.unwrap(), before);
    assert!(f.store.object_exists(POLICY, &shard).await.unwrap());
    std::fs::remove_file(&trash).unwrap();
    let error = delta.payload(&f.store, "embed.weight", 0..2).await.unwrap_err();
    assert!(matches!(error, Error::NotFound(_)), "{error}");
    assert!(!f.store.object_exists(POLICY, &shard).await.unwrap());
}

#[tokio::test]
async fn gc_keeps_the_shards_of_a_needed_delta() {
    let checkpoints: Vec<Checkpoint> = (1..=4).map(version).collect();
    let f = fixture();
    let mut manifests = vec![first(&f, &checkpoints[0]).await];
    for n in 1..4 {
        let manifest = publish(&f, (&manifests[n - 1], &checkpoints[n - 1]), &checkpoints[n], 2).await;
        manifests.push(manifest);
    }
    let orphan = f.store.put_object(POLICY, &"nobody's".into()).await.unwrap();
    f.age();
    // Only the newest version is live, and the others are on the path to it.
    let collected = f.collect(&f.store, false).await.unwrap();
    assert_eq!(collected.live, [4].into());
    assert_eq!(collected.deleted.into_keys().collect::<Vec<_>>(), [orphan.digest]);
    let rebuilt = f.materialize(4, &[]).await.unwrap();
    assert_eq!(rehashed(&rebuilt.checkpoint), checkpoints[3].root());
}
