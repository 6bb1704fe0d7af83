//! The realtime run of an adapter: versions, checkpoints, restarts.

use super::world::{POLICY, World};
use crate::support::SPRINGTIDE;
use policy::image::Image;
use policy::lora::{Config, Targets};
use std::path::Path;
use tokio::process::Command;
use trainer::Options;
use trainer::checkpoint::{self, Checkpoint};
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

/// One step from the head, by a process of its own; the version that it made, and its checkpoint.
async fn step(world: &World, head: i64, step: i64, options: Options) -> (i64, Checkpoint) {
    let cohort = world.sample(head, 8).await;
    world.insert_all(&cohort, "champion").await;
    let running = world.run(options);
    let version = world.head_after(head).await;
    running.stop().await;
    let run: Uuid = sqlx::query_scalar("select id from run where kind = 'realtime'")
        .fetch_one(&world.stack.pool)
        .await
        .unwrap();
    let key = checkpoint::key(run, step, version);
    (version, world.publisher.read_checkpoint(&key).await.unwrap())
}

/// `springtide policy …` on the world's store: whether it went well, and what it said.
async fn command(world: &World, arguments: &str, folder: &Path) -> (bool, String) {
    let output = Command::new(SPRINGTIDE)
        .current_dir(folder)
        .arg("policy")
        .args(arguments.split(' '))
        .env("SPRINGTIDE__POLICY__NAME", POLICY)
        .env("SPRINGTIDE__POLICY__STORE", &world.stack.store_url)
        .env("SPRINGTIDE__POLICY__KEYS", &world.stack.keys_dir)
        .output()
        .await
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_of_an_adapter_goes_on_after_a_restart_and_begins_anew_with_other_settings() {
    let world = World::start("lora").await;
    world.follow(1, world.base, 0).await;
    let (first, checkpoint) = step(&world, world.base, 1, options(&world, 2)).await;
    let (base, image) = (world.materialise(world.base).await, world.materialise(first).await);
    let changed: Vec<&String> = image
        .tensors
        .iter()
        .filter(|(name, tensor)| base.tensors[*name] != **tensor)
        .map(|(name, _)| name)
        .collect();
    assert!(!changed.is_empty() && changed.iter().all(|name| name.ends_with("q_proj.weight")));
    assert_eq!(checkpoint.lora.as_ref().unwrap().base, world.base);

    let (second, checkpoint) = step(&world, first, 2, options(&world, 2)).await;
    assert_eq!(checkpoint.optimiser_step, 2, "the moments were restored");
    let adapter = checkpoint.adapter().unwrap().unwrap();
    assert_eq!(
        adapter.merge(&base).unwrap().root(),
        world.materialise(second).await.root()
    );
    let parity = &world.metrics(2).await["mismatch"]["difference_max"];
    assert_eq!(parity.as_f64(), Some(0.0));
    let folder = tempfile::tempdir().unwrap();
    for arguments in [
        format!("export {second} --adapter --out adapter"),
        format!("export {second} --out version"),
        format!("export {} --out base", world.base),
        "merge base --adapter adapter --out merged".into(),
    ] {
        let (good, said) = command(&world, &arguments, folder.path()).await;
        assert!(good, "{arguments}: {said}");
    }
    let read = |name: &str| Image::read_dir(&folder.path().join(name)).unwrap();
    assert_eq!(read("merged").root(), read("version").root());
    let arguments = format!("export {} --adapter --out none", world.base);
    let (good, said) = command(&world, &arguments, folder.path()).await;
    assert!(!good && said.contains("imported"), "{said}");

    let said = |events: &[String]| events.iter().any(|event| event.contains("other settings of `lora`"));
    assert!(!said(&world.events().await));

    let (third, checkpoint) = step(&world, second, 3, options(&world, 3)).await;
    assert!(said(&world.events().await), "{:?}", world.events().await);
    assert_eq!(checkpoint.lora.as_ref().unwrap().base, second);
    assert_eq!(checkpoint.optimiser_step, 1);
    let (fourth, checkpoint) = step(&world, third, 4, world.options()).await;
    assert_eq!(checkpoint.lora, None, "all weights again");
    for (version, why) in [(fourth, "has no adapter"), (first, "is gone")] {
        let arguments = format!("export {version} --adapter --out none");
        let (good, said) = command(&world, &arguments, folder.path()).await;
        assert!(!good && said.contains(why), "{said}");
    }
}
