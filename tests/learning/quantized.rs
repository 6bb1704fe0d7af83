//! Quantized copies: publishers name their roots in the manifest; `springtide policy` makes the
//! copies from the version's bytes and refuses a copy with another root.

use artifact::checkpoint::Checkpoint;
use artifact::manifest::{Manifest, Quantized};
use artifact::quant::{self, Spec};
use artifact::threads::Threads;
use fixture::store::{json, name, policy, trained, world};
use runs::publish::{External, Publisher, QuantizedCopies, publish_external};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

async fn publish(publisher: &Publisher, parent: i64, checkpoint: &Checkpoint) -> Manifest {
    let external = External {
        line: "realtime".into(),
        parent,
        weights: runs::publish::Weights::All(checkpoint.clone()),
        with_checkpoint: false,
        reference: None,
    };
    publish_external(publisher, external).await.unwrap().manifest
}

fn copy(checkpoint: &Checkpoint, spec: Spec) -> Checkpoint {
    quant::quantize(checkpoint, spec, &Threads::ONE).unwrap()
}

fn roots(checkpoint: &Checkpoint) -> Vec<Quantized> {
    let named = Spec::ALL.map(|spec| Quantized {
        spec: spec.name().into(),
        root: copy(checkpoint, spec).root(),
    });
    named.into()
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| {
            (
                name(&path).rsplit('/').next().unwrap().into(),
                std::fs::read(&path).unwrap(),
            )
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exported_copy_is_the_one_that_its_manifest_names() {
    let (stack, mut publisher, checkpoint, base) = world("quantised").await;
    publisher.quantized = QuantizedCopies::new(&Spec::ALL, None);
    // the base has no copies; the first version is quantized from scratch, the second from the
    // copies of the first
    let checkpoints = [trained(&checkpoint, 1), trained(&trained(&checkpoint, 1), 2)];
    let first = publish(&publisher, base, &checkpoints[0]).await;
    let second = publish(&publisher, first.version, &checkpoints[1]).await;
    assert_eq!(
        (&first.quantized, &second.quantized),
        (&roots(&checkpoints[0]), &roots(&checkpoints[1]))
    );
    let serial = second.version.to_string();

    let at = |folder: &str| stack.dir.path().join(folder);
    for spec in Spec::ALL {
        let expected = copy(&checkpoints[1], spec);
        let (one, other) = (at(&format!("one-{spec}")), at(&format!("other-{spec}")));
        for folder in [&one, &other] {
            let export = ["export", &serial, "--quantized", spec.name(), "--out", name(folder)];
            let (success, stdout, stderr) = policy(&stack, &export, false).await;
            assert!(success, "{stdout}{stderr}");
        }
        assert_eq!(files(&one), files(&other));
        assert_eq!(Checkpoint::read_dir(&one).unwrap(), expected);

        // pull the copy beside the version itself, then update both
        let (plain, pulled) = (at(&format!("plain-{spec}")), at(&format!("pulled-{spec}")));
        for (manifest, checkpoint) in [(&first, &checkpoints[0]), (&second, &checkpoints[1])] {
            let serial = manifest.version.to_string();
            let base = ["--base", name(&plain)];
            let pull = ["pull", &serial, name(&pulled), "--quantized", spec.name(), "--json"];
            let arguments: Vec<&str> = match plain.exists() {
                true => pull.iter().chain(&base).copied().collect(),
                false => pull.into(),
            };
            let report = json(&stack, &arguments, false).await;
            assert_eq!(
                report["quantised"]["root"].as_str().unwrap(),
                copy(checkpoint, spec).root().to_string()
            );
            assert_eq!(Checkpoint::read_dir(&pulled).unwrap(), copy(checkpoint, spec));
            if plain.exists() {
                // only the delta was fetched
                let delta = manifest.delta.unwrap().size_bytes;
                assert_eq!(report["fetched_bytes"].as_u64(), Some(delta));
            }
            assert_eq!(json(&stack, &pull, false).await["fetched_bytes"], 0);
            json(&stack, &["pull", &serial, name(&plain), "--json"], false).await;
        }
        // a copy cannot be the base of a delta
        let new = at("new");
        let wrong = ["pull", &serial, name(&new), "--base", name(&pulled)];
        let (success, _, stderr) = policy(&stack, &wrong, false).await;
        assert!(!success && stderr.contains("is a quantized copy"), "{stderr}");
    }

    let known: Value = json(&stack, &["inspect", &serial, "--json"], false).await;
    assert_eq!(
        known["manifest"]["quantised"].as_array().unwrap().len(),
        Spec::ALL.len()
    );
    let (success, stdout, stderr) = policy(&stack, &["inspect", &serial], false).await;
    assert!(
        success && stdout.contains("int4-sym-g32.1, content hash "),
        "{stdout}{stderr}"
    );
    let (success, stdout, stderr) = policy(&stack, &["verify", &serial, "--quantized"], false).await;
    assert!(
        success && stdout.matches("of the manifest").count() == Spec::ALL.len(),
        "{stdout}{stderr}"
    );
    let (success, stdout, stderr) = policy(&stack, &["verify", &base.to_string(), "--quantized"], false).await;
    assert!(
        success && stdout.contains("names no quantized copies"),
        "{stdout}{stderr}"
    );
    let (serial, none) = (base.to_string(), at("none"));
    let export = ["export", &serial, "--quantized", "int4-sym-g32.1", "--out", name(&none)];
    let (success, _, stderr) = policy(&stack, &export, false).await;
    assert!(
        !success && stderr.contains("policy.quantised") && !none.exists(),
        "{stderr}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_with_another_root_is_refused_and_an_unknown_spec_is_ignored() {
    let (stack, publisher, checkpoint, base) = world("quantised-wrong").await;
    let next = trained(&checkpoint, 1);
    let stderr = publish(&publisher, base, &next).await;
    assert!(stderr.quantized.is_empty());
    // a manifest of a newer program that quantizes differently
    let later = Manifest {
        version: stderr.version + 1,
        quantized: vec![
            Quantized {
                spec: "mxfp4-b32.1".into(),
                root: next.root(),
            },
            Quantized {
                spec: Spec::Fp8.name().into(),
                root: copy(&checkpoint, Spec::Fp8).root(),
            },
        ],
        ..stderr
    };
    publisher.store.put_manifest(&later, &publisher.key).await.unwrap();
    let serial = later.version.to_string();
    let pulled = stack.dir.path().join("pulled");
    json(&stack, &["pull", &serial, name(&pulled), "--json"], false).await;
    assert_eq!(Checkpoint::read_dir(&pulled).unwrap(), next);
    let copied = stack.dir.path().join("copied");
    let refused = async |arguments: &[&str], why: &str| {
        let (success, stdout, stderr) = policy(&stack, arguments, false).await;
        assert!(!success && stderr.contains(why) && !copied.exists(), "{stdout}{stderr}");
    };
    let base = ["--base", name(&pulled)];
    let fp8 = Spec::Fp8.name();
    refused(&["pull", &serial, name(&copied), "--quantized", fp8], "do not use it").await;
    refused(
        &["pull", &serial, name(&copied), "--quantized", fp8, base[0], base[1]],
        "do not use it",
    )
    .await;
    refused(
        &["export", &serial, "--quantized", fp8, "--out", name(&copied)],
        "do not use it",
    )
    .await;
    refused(
        &["pull", &serial, name(&copied), "--quantized", "mxfp4-b32.1"],
        "known are fp8-e4m3-b128.1",
    )
    .await;
    refused(&["verify", &serial, "--quantized"], "do not use it").await;
    let (success, stdout, stderr) = policy(&stack, &["fsck"], false).await;
    assert!(success && stdout.contains("copies by mxfp4-b32.1"), "{stdout}{stderr}");
}
