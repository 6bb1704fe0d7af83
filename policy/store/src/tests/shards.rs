//! Deltas that several trainer ranks encode. Each rank has only parts of the tensors.

use super::*;
use artifact::delta::{FrameRange, FrameSpan};

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

fn ranges(checkpoint: &Checkpoint, rank: usize, of: usize) -> Vec<FrameRange<'_>> {
    let forms = checkpoint.tensors.iter();
    let forms = forms.map(|(name, tensor)| (name.as_str(), tensor.dtype, tensor.shape.as_slice()));
    delta::partition(forms, rank, of).unwrap()
}

/// Each rank encodes and uploads its frames, and one of them merges the shards.
async fn publish(f: &Fixture, base: (&Manifest, &Checkpoint), next: &Checkpoint, of: usize) -> Manifest {
    let (parent, base) = base;
    let (mut reports, mut delta_shards) = (vec![], vec![]);
    for rank in 0..of {
        let spans = ranges(base, rank, of).into_iter().map(|range| FrameSpan {
            name: range.name,
            dtype: range.dtype,
            shape: range.shape,
            first_frame: range.frames.start,
            old: &base.tensors[range.name].bytes[range.bytes.clone()],
            new: &next.tensors[range.name].bytes[range.bytes.clone()],
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

#[tokio::test]
async fn trainers_of_any_number_of_ranks_publish_the_same_bytes() {
    let (base, next) = (version(1), version(2));
    let alone = delta::encode(&base, &next, &Threads::ONE).unwrap();
    for senders in [1, 2, 4] {
        let f = fixture();
        let first = first(&f, &base).await;
        let manifest = publish(&f, (&first, &base), &next, senders).await;
        assert_eq!(manifest.root, next.root());
        assert_eq!(manifest.delta_shards.len(), senders);
        assert_eq!(manifest.delta_bytes(), Some(alone.len() as u64));
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
async fn a_shard_in_the_trash_is_still_readable() {
    let (base, next) = (version(1), version(2));
    let f = fixture();
    let first = first(&f, &base).await;
    let manifest = publish(&f, (&first, &base), &next, 1).await;
    let shard = manifest.delta_shards[0].object;
    let read = async || f.store.read_range(POLICY, &shard, 0..9).await;
    let before = read().await.unwrap();
    let trash = f.path(&format!("policy/{POLICY}/trash/{}", shard.digest));
    std::fs::create_dir_all(trash.parent().unwrap()).unwrap();
    std::fs::rename(f.object_path(&shard), &trash).unwrap();
    assert_eq!(read().await.unwrap(), before);
    assert!(f.store.object_exists(POLICY, &shard).await.unwrap());
    std::fs::remove_file(&trash).unwrap();
    let error = read().await.unwrap_err();
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
