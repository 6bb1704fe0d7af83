//! Reverse paths, from a newer held version to an older one over the deltas in between.

use super::*;

#[tokio::test]
async fn a_holder_of_a_newer_version_applies_deltas_in_reverse() {
    let f = fixture();
    let versions = f.chain(12, 100).await;
    let held = [(12, versions[11].1.clone())];
    let back = f.materialize(9, &held).await.unwrap();
    assert_eq!(back.path, [12, 11, 10, 9]);
    assert_eq!(back.checkpoint, versions[8].1);
    assert_eq!(rehashed(&back.checkpoint), versions[8].0.root);
    let deltas: u64 = versions[9..]
        .iter()
        .map(|(manifest, _)| manifest.delta.unwrap().size_bytes)
        .sum();
    assert_eq!(back.bytes_fetched, deltas);
    // A checkpoint that is cheaper.
    let near = fixture();
    let versions = near.chain(60, 2).await;
    let held = [(60, versions[59].1.clone())];
    assert_eq!(near.materialize(2, &held).await.unwrap().path, [2]);
}

#[tokio::test]
async fn broken_or_irreversible_deltas_are_bypassed() {
    let f = fixture();
    let mut versions = f.chain(6, 100).await;
    // A changed file: its delta has no reverse section.
    let (parent, base) = versions.last().unwrap().clone();
    let mut checkpoint = (*base).clone();
    checkpoint
        .files
        .insert("config.json".into(), Bytes::from_static(b"{\"changed\": 1}"));
    let delta = delta::encode(&base, &checkpoint, &Threads::ONE).unwrap();
    let manifest = Manifest {
        version: 7,
        root: checkpoint.root(),
        parent: Some(Parent {
            version: 6,
            root: parent.root,
        }),
        delta: Some(f.store.put_object(POLICY, &delta.into()).await.unwrap()),
        checkpoint: None,
        ..parent
    };
    f.store.put_manifest(&manifest, &f.key).await.unwrap();
    versions.push((manifest, Arc::new(checkpoint)));
    let held = [(7, versions[6].1.clone())];
    assert_eq!(f.materialize(5, &held).await.unwrap().path, [1, 2, 3, 4, 5]);
    // Forwards, it is still used.
    assert_eq!(f.materialize(7, &[]).await.unwrap().checkpoint, versions[6].1);

    // First a delta on the path is damaged, then the held version is not the claimed one.
    let held = [(6, versions[5].1.clone())];
    assert_eq!(f.materialize(4, &held).await.unwrap().path, [6, 5, 4]);
    std::fs::write(f.object_path(&versions[4].0.delta.unwrap()), b"damaged").unwrap();
    let around = f.materialize(4, &held).await.unwrap();
    assert_eq!(
        (around.path, around.checkpoint),
        (vec![1, 2, 3, 4], versions[3].1.clone())
    );
    let wrong = [(6, versions[2].1.clone())];
    let around = f.materialize(4, &wrong).await.unwrap();
    assert_eq!(
        (around.path, around.checkpoint),
        (vec![1, 2, 3, 4], versions[3].1.clone())
    );
}

#[tokio::test]
async fn another_branch_is_reached_through_the_common_ancestor() {
    let f = fixture();
    let versions = f.chain(5, 100).await;
    let (parent, base) = &versions[2];
    let mut checkpoint = (**base).clone();
    let mut bytes = checkpoint.tensors["w"].bytes.to_vec();
    bytes[7] ^= 1;
    checkpoint.tensors.get_mut("w").unwrap().bytes = bytes.into();
    let delta = delta::encode(base, &checkpoint, &Threads::ONE).unwrap();
    let branch = Manifest {
        version: 6,
        branch: 1,
        root: checkpoint.root(),
        parent: Some(Parent {
            version: 3,
            root: parent.root,
        }),
        delta: Some(f.store.put_object(POLICY, &delta.into()).await.unwrap()),
        checkpoint: None,
        ..parent.clone()
    };
    f.store.put_manifest(&branch, &f.key).await.unwrap();
    // From the branch in reverse to the line.
    let held = [(6, Arc::new(checkpoint))];
    let back = f.materialize(5, &held).await.unwrap();
    assert_eq!((back.path, back.checkpoint), (vec![6, 3, 4, 5], versions[4].1.clone()));
}
