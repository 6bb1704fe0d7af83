//! An engine that serves adapters of its base beside each other.

use super::fake::{adapter, first, loaded};
use super::*;

fn weights(checkpoint: Arc<Checkpoint>) -> VersionWeights {
    VersionWeights {
        given: checkpoint.clone(),
        checkpoint,
    }
}

async fn stand(folder: &Path) -> Stand {
    Stand::with(1, |fakes| Options {
        vllm: vec![Server {
            adapters: true,
            ..vllm(&fakes[0])
        }],
        adapters_dir: folder.to_owned(),
        ..Options::default()
    })
    .await
}

/// Names of the adapters that the engine has, and of the folders that are there.
fn there(stand: &Stand, folder: &Path) -> (Vec<String>, usize) {
    let names = stand.fakes[0].held().adapters.keys().cloned().collect();
    (names, std::fs::read_dir(folder).unwrap().count())
}

#[tokio::test(flavor = "multi_thread")]
async fn one_engine_serves_its_base_and_adapters_beside_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let mut stand = stand(folder.path()).await;
    let (base, checkpoint) = loaded(1, None, first());
    let mut wanted = vec![(base, weights(checkpoint))];
    for serial in [2, 3, 4] {
        let (version, checkpoint) = adapter(serial);
        wanted.push((version, weights(checkpoint)));
    }
    for (version, weights) in &wanted {
        let begun = stand.updater.begin(version, weights, &BTreeSet::new()).await.unwrap();
        assert_eq!(begun, Some(0));
        assert!(stand.updater.gets(version.serial));
    }
    // dropping what waits for them ends none of them
    while let Ok(Some((_, ended))) = tokio::time::timeout(Duration::from_secs(9), stand.updater.next_end()).await {
        ended.unwrap();
    }
    for (version, _) in &wanted {
        assert!(stand.updater.serves(version.serial));
        assert!(finished(&stand.ask(version, 5).await));
    }
    assert_eq!(stand.fakes[0].updates(), Vec::<&str>::new(), "its base weights stay");
    assert_eq!(there(&stand, folder.path()).0.len(), 4);

    // other weights are no version of this engine
    let (other, checkpoint) = version(9);
    let (weights_of, none) = (weights(checkpoint), BTreeSet::new());
    let refused = stand.updater.begin(&other, &weights_of, &none).await.unwrap_err();
    assert!(refused.to_string().contains("none of the 1 engines"), "{refused:#}");
    assert!(!stand.updater.serves(9));

    // a version that no route and no request holds is unloaded
    let (retired, _) = wanted.remove(1);
    let name = format!("springtide-{}-{}", retired.serial, retired.root.short());
    stand.updater.adapt(&wanted).await;
    assert!(there(&stand, folder.path()).0.contains(&name), "it is still needed");
    drop(retired);
    stand.updater.adapt(&wanted).await;
    let (names, folders) = there(&stand, folder.path());
    assert!(names.len() == folders && !names.contains(&name), "{names:?}");
    assert!(!stand.updater.serves(2));
    for (version, _) in &wanted {
        assert!(finished(&stand.ask(version, 5).await));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_engine_gets_its_adapters_again_and_one_with_another_base_none() {
    let folder = tempfile::tempdir().unwrap();
    let mut stand = stand(folder.path()).await;
    let (one, checkpoint) = adapter(2);
    let wanted = [(one.clone(), weights(checkpoint))];
    while !stand.updater.serves(2) {
        stand.updater.adapt(&wanted).await;
        let _ = stand.updater.next_end().await;
    }
    assert!(finished(&stand.ask(&one, 5).await));
    stand.fakes[0].restart();
    // it answers 404 for the adapter, and is out of traffic until it has it again
    let mut asked = stand.submit(&one, 5);
    while stand.updater.serves(2) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    while !stand.updater.serves(2) {
        stand.updater.adapt(&wanted).await;
        let _ = stand.updater.next_end().await;
    }
    let mut events = Vec::new();
    while let Some(event) = asked.recv().await {
        events.push(event);
    }
    assert!(finished(&events));

    stand.fakes[0].restart();
    {
        let (_, other) = version(7);
        let mut held = stand.fakes[0].held();
        held.model = Arc::new(ExactModel::from_checkpoint(&other).unwrap());
        held.checkpoint = Checkpoint::clone(&other);
        held.name = "another".into();
    }
    while stand.updater.serves(2) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for _ in 0..3 {
        stand.updater.adapt(&wanted).await;
        let _ = stand.updater.next_end().await;
        assert!(!stand.updater.serves(2), "the probe shows that the base is another one");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
