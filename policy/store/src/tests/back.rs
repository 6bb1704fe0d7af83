//! Ways back: from a newer version at hand to an older one over the deltas between them.

use super::*;

#[tokio::test]
async fn who_holds_a_newer_version_goes_back_over_the_deltas_between() {
    let f = fixture();
    let versions = f.chain(12, 100).await;
    let held = [(12, versions[11].1.clone())];
    let back = f.materialise(9, &held).await.unwrap();
    assert_eq!(back.path, [12, 11, 10, 9]);
    assert_eq!(back.image, versions[8].1);
    assert_eq!(rehashed(&back.image), versions[8].0.root);
    let deltas: u64 = versions[9..]
        .iter()
        .map(|(manifest, _)| manifest.delta.unwrap().size_bytes)
        .sum();
    assert_eq!(back.bytes_fetched, deltas);
    // an image that is nearer
    let near = fixture();
    let versions = near.chain(60, 2).await;
    let held = [(60, versions[59].1.clone())];
    assert_eq!(near.materialise(2, &held).await.unwrap().path, [2]);
}

#[tokio::test]
async fn a_way_back_that_is_broken_or_leads_forward_only_is_gone_around() {
    let f = fixture();
    let mut versions = f.chain(6, 100).await;
    // a file that changes: its delta has no way back
    let (parent, base) = versions.last().unwrap().clone();
    let mut image = (*base).clone();
    image
        .files
        .insert("config.json".into(), Bytes::from_static(b"{\"changed\": 1}"));
    let delta = delta::encode(&base, &image, &Threads::ONE).unwrap();
    let manifest = Manifest {
        version: 7,
        root: image.root(),
        parent: Some(Parent {
            version: 6,
            root: parent.root,
        }),
        delta: Some(f.store.put_object(POLICY, &delta.into()).await.unwrap()),
        image: None,
        ..parent
    };
    f.store.put_manifest(&manifest, &f.key).await.unwrap();
    versions.push((manifest, Arc::new(image)));
    let held = [(7, versions[6].1.clone())];
    assert_eq!(f.materialise(5, &held).await.unwrap().path, [1, 2, 3, 4, 5]);
    // forward it is followed all the same
    assert_eq!(f.materialise(7, &[]).await.unwrap().image, versions[6].1);

    // one delta on the way is damaged, and then what is held is not what it is said to be
    let held = [(6, versions[5].1.clone())];
    assert_eq!(f.materialise(4, &held).await.unwrap().path, [6, 5, 4]);
    std::fs::write(f.object_path(&versions[4].0.delta.unwrap()), b"damaged").unwrap();
    let around = f.materialise(4, &held).await.unwrap();
    assert_eq!((around.path, around.image), (vec![1, 2, 3, 4], versions[3].1.clone()));
    let wrong = [(6, versions[2].1.clone())];
    let around = f.materialise(4, &wrong).await.unwrap();
    assert_eq!((around.path, around.image), (vec![1, 2, 3, 4], versions[3].1.clone()));
}

#[tokio::test]
async fn another_branch_is_reached_by_way_of_the_version_both_come_from() {
    let f = fixture();
    let versions = f.chain(5, 100).await;
    let (parent, base) = &versions[2];
    let mut image = (**base).clone();
    let mut bytes = image.tensors["w"].bytes.to_vec();
    bytes[7] ^= 1;
    image.tensors.get_mut("w").unwrap().bytes = bytes.into();
    let delta = delta::encode(base, &image, &Threads::ONE).unwrap();
    let branch = Manifest {
        version: 6,
        branch: 1,
        root: image.root(),
        parent: Some(Parent {
            version: 3,
            root: parent.root,
        }),
        delta: Some(f.store.put_object(POLICY, &delta.into()).await.unwrap()),
        image: None,
        ..parent.clone()
    };
    f.store.put_manifest(&branch, &f.key).await.unwrap();
    // from the branch back to the line that it left
    let held = [(6, Arc::new(image))];
    let back = f.materialise(5, &held).await.unwrap();
    assert_eq!((back.path, back.image), (vec![6, 3, 4, 5], versions[4].1.clone()));
}
