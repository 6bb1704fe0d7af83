//! The realtime run with an adapter: versions, run states, restarts.

use super::world::{POLICY, World};
use artifact::checkpoint::Checkpoint;
use artifact::manifest::Parent;
use fixture::SPRINGTIDE;
use model::lora::{self, Adapter, Config, Targets};
use runs::Options;
use runs::publish::run_state::{self, RunState};
use runs::publish::{External, Weights, publish_external};
use std::path::Path;
use tokio::process::Command;
use uuid::Uuid;

fn options(world: &World, r: usize) -> Options {
    let mut options = world.options();
    options.realtime.lora = Some(Config {
        r,
        target_modules: Targets::Names(vec!["q_proj".into()]),
        ..Config::default()
    });
    options
}

/// Runs one step from the head in a trainer of its own. Returns the new version and its run state.
async fn step(world: &World, head: i64, step: i64, options: Options) -> (i64, RunState) {
    let cohort = world.sample(head, 8).await;
    world.insert_all(&cohort, "champion").await;
    let running = world.run(options);
    let version = world.head_after(head).await;
    running.stop().await;
    let run: Uuid = sqlx::query_scalar("select id from run where kind = 'realtime'")
        .fetch_one(&world.stack.pool)
        .await
        .unwrap();
    let key = run_state::key(run, step, version);
    (version, world.publisher.read_run_state(&key, None).await.unwrap())
}

/// Runs `springtide policy …` on the world's store. Returns whether it succeeded, and its output.
async fn command(world: &World, arguments: &str, folder: &Path) -> (bool, String) {
    let output = Command::new(&*SPRINGTIDE)
        .current_dir(folder)
        .arg("policy")
        .args(arguments.split(' '))
        .env("SPRINGTIDE__POLICY__NAME", POLICY)
        .env("SPRINGTIDE__POLICY__STORE", &world.stack.store_url)
        .env("SPRINGTIDE__POLICY__KEYS", &world.stack.keys_dir)
        .output()
        .await
        .unwrap();
    let output_text = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8_lossy(&output_text).into_owned(),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_with_an_adapter_continues_after_a_restart_and_starts_a_new_adapter_with_other_settings() {
    let world = World::start("lora").await;
    world.follow(1, world.base, 0).await;
    let (first, run_state) = step(&world, world.base, 1, options(&world, 2)).await;
    let base = world.materialize(world.base).await;
    // of the base only the adapted matrices change, and only the factors are stored
    let merged = lora::merged(&world.materialize(first).await).unwrap();
    let changed: Vec<&String> = merged
        .tensors
        .iter()
        .filter(|(name, tensor)| base.tensors[*name] != **tensor)
        .map(|(name, _)| name)
        .collect();
    assert!(!changed.is_empty() && changed.iter().all(|name| name.ends_with("q_proj.weight")));
    assert_eq!(run_state.lora.as_ref().unwrap().base, world.base);
    let manifest = world.manifest(first).await;
    let of_base = Parent {
        version: world.base,
        root: base.root(),
    };
    assert_eq!((manifest.adapts, manifest.delta), (Some(of_base), None));
    assert!(manifest.tensor_bytes < base.tensor_bytes() / 10);

    let (second, run_state) = step(&world, first, 2, options(&world, 2)).await;
    assert_eq!(run_state.optimizer_step, 2, "the moments were restored");
    let manifest = world.manifest(second).await;
    assert_eq!(manifest.adapts, Some(of_base));
    assert!(manifest.delta.is_some() && manifest.reference.is_some());
    let adapter = run_state.adapter().unwrap().unwrap();
    let merged = lora::merged(&world.materialize(second).await).unwrap();
    assert_eq!(adapter.merge(&base).unwrap().root(), merged.root());
    let parity = &world.metrics(2).await["mismatch"]["difference_max"];
    assert_eq!(parity.as_f64(), Some(0.0));
    let folder = tempfile::tempdir().unwrap();
    for arguments in [
        format!("export {second} --adapter --out adapter"),
        format!("export {second} --out version"),
        format!("export {} --out base", world.base),
        "merge base --adapter adapter --out merged".into(),
    ] {
        let (success, output) = command(&world, &arguments, folder.path()).await;
        assert!(success, "{arguments}: {output}");
    }
    let read = |name: &str| Checkpoint::read_dir(&folder.path().join(name)).unwrap();
    assert_eq!(read("merged").root(), read("version").root());
    assert_eq!(read("version").root(), merged.root());
    let (success, output) = command(&world, &format!("pull {second} pulled"), folder.path()).await;
    assert!(!success && output.contains("policy export"), "{output}");
    // what PEFT saved, as a version of another line
    let publish = async |parent: i64| {
        let external = External {
            line: "tuned".into(),
            parent,
            weights: Weights::Adapter(Adapter::read_dir(&folder.path().join("adapter")).unwrap()),
            with_checkpoint: false,
            reference: None,
        };
        publish_external(&world.publisher, external).await
    };
    let tuned = publish(world.base).await.unwrap().manifest;
    assert_eq!((tuned.adapts, tuned.root), (Some(of_base), manifest.root));
    let unchanged = publish(tuned.version).await.unwrap_err();
    assert!(unchanged.to_string().contains("nothing to publish"), "{unchanged}");

    let reported = |events: &[String]| events.iter().any(|event| event.contains("other settings of `lora`"));
    assert!(!reported(&world.events().await));

    // an adapter of an adapter is merged
    let (third, run_state) = step(&world, second, 3, options(&world, 3)).await;
    assert!(reported(&world.events().await), "{:?}", world.events().await);
    assert_eq!(run_state.lora.as_ref().unwrap().base, second);
    assert_eq!(run_state.optimizer_step, 1);
    let manifest = world.manifest(third).await;
    assert_eq!((manifest.adapts, manifest.delta), (None, None));
    let (fourth, run_state) = step(&world, third, 4, world.options()).await;
    assert_eq!(run_state.lora, None, "all weights again");
    assert!(world.manifest(fourth).await.delta.is_some());
    let (success, output) = command(&world, &format!("export {fourth} --adapter --out none"), folder.path()).await;
    assert!(!success && output.contains("has all weights"), "{output}");
}
