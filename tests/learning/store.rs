//! External trainer → policy store → serving, and out of the store again: the commands of
//! `springtide policy` on a real store, database and log.

use artifact::checkpoint::Checkpoint;
use artifact::sign::{Role, SigningKey};
use fixture::Stack;
use fixture::serving;
use fixture::store::{json, name, policy, trained, world};
use runs::publish::{Error, External, publish_external};
use serde_json::Value;
use std::path::Path;
use store::Store;
use uuid::Uuid;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weights_of_an_external_trainer_are_published_served_and_pulled() {
    let (stack, _, base_checkpoint, base) = world("outside").await;
    let releases = serving::releases(&stack);
    releases.round().await.unwrap();
    let replica = serving::serve(&stack, None, stack.dir.path().join("serve")).await;
    serving::wait_for(&replica.url, "demo@champion", base).await;

    // Many ranks write shards; the index must come last.
    let folder = stack.dir.path().join("rank-output");
    let mut checkpoint = trained(&base_checkpoint, 1);
    checkpoint.files.clear();
    checkpoint.write_shards(&folder, 4_096).unwrap();
    let index = folder.join("model.safetensors.index.json");
    let written = std::fs::read(&index).unwrap();
    std::fs::remove_file(&index).unwrap();
    let parent = base.to_string();
    let publish = [
        "publish",
        name(&folder),
        "--line",
        "realtime",
        "--parent",
        &parent,
        "--json",
    ];
    let (success, _, stderr) = policy(&stack, &publish, true).await;
    assert!(!success && stderr.contains("comes last"), "{stderr}");
    std::fs::write(&index, written).unwrap();
    let published = json(&stack, &publish, true).await;
    let version = published["version"].as_i64().unwrap();
    assert!(published["delta_bytes"].as_u64() < published["tensor_bytes"].as_u64().map(|bytes| bytes / 4));
    assert_eq!(published["image_bytes"], Value::Null);
    assert_eq!(
        published["inherited"].as_array().unwrap().len(),
        base_checkpoint.files.len()
    );

    // The champion follows the line, so the version is served.
    assert_eq!(releases.round().await.unwrap().changes, 2, "learner and champion");
    serving::wait_for(&replica.url, "demo@champion", version).await;

    // A second publication from the same parent is refused.
    let (success, _, stderr) = policy(&stack, &publish, true).await;
    assert!(
        !success && stderr.contains(&format!("is at version {version}")),
        "{stderr}"
    );

    // A pull needs only the store and the public keys.
    let out = stack.dir.path().join("pulled");
    let pulled = json(&stack, &["pull", "champion", name(&out), "--json"], false).await;
    assert_eq!(pulled["version"].as_i64(), Some(version));
    let whole = Checkpoint::read_dir(&out).unwrap();
    assert_eq!(whole.root().to_string(), published["root"]);
    assert_eq!(
        (&whole.tensors, &whole.files),
        (&checkpoint.tensors, &base_checkpoint.files)
    );

    // A second pull fetches nothing; after a step it fetches one delta.
    let again = json(&stack, &["pull", "champion", name(&out), "--json"], false).await;
    assert_eq!(again["fetched_bytes"], 0);
    let next = trained(&whole, 2);
    next.write_dir(&stack.dir.path().join("next")).unwrap();
    let parent = version.to_string();
    let next_folder = stack.dir.path().join("next");
    let arguments = [
        "publish",
        name(&next_folder),
        "--line",
        "realtime",
        "--parent",
        &parent,
        "--json",
    ];
    let second = json(&stack, &arguments, true).await;
    let serial = second["version"].to_string();
    let pulled = json(
        &stack,
        &["pull", &serial, name(&out), "--json", "--shard-bytes", "5000"],
        false,
    )
    .await;
    assert_eq!(pulled["fetched_bytes"], second["delta_bytes"]);
    assert_eq!(Checkpoint::read_dir(&out).unwrap(), next);
    assert!(!stack.dir.path().join("pulled.old").exists() && !stack.dir.path().join("pulled.partial").exists());
    // A pull refuses to delete other files.
    std::fs::write(out.join("notes.txt"), "mine").unwrap();
    let (success, _, stderr) = policy(&stack, &["pull", &parent, name(&out)], false).await;
    assert!(!success && stderr.contains("notes.txt"), "{stderr}");

    // An exported version is equal when it is read again.
    let exported = stack.dir.path().join("exported");
    let arguments = ["export", &serial, "--out", name(&exported), "--shard-bytes", "6000"];
    let (success, stdout, stderr) = policy(&stack, &arguments, false).await;
    assert!(success, "{stdout}{stderr}");
    assert_eq!(
        Checkpoint::read_dir(&exported).unwrap().root().to_string(),
        second["root"]
    );
    replica.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publications_that_do_not_fit_parent_or_line_are_refused() {
    let (stack, publisher, checkpoint, base) = world("unfit").await;
    let external = |line: &str, parent: i64, checkpoint: Checkpoint| External {
        line: line.into(),
        parent,
        weights: runs::publish::Weights::All(checkpoint),
        with_checkpoint: false,
        reference: None,
    };
    let publish = async |line: &str, parent: i64, checkpoint: Checkpoint| {
        publish_external(&publisher, external(line, parent, checkpoint)).await
    };
    let mut other = trained(&checkpoint, 1);
    let (first, tensor) = other.tensors.pop_first().unwrap();
    other.tensors.insert("lm_head.extra".into(), tensor);
    let error = publish("ext", base, other).await.unwrap_err().to_string();
    assert!(
        error.contains(&format!("`{first}` is missing")) && error.contains("is new"),
        "{error}"
    );
    assert!(matches!(
        publish("ext", base, checkpoint.clone()).await,
        Err(Error::Unchanged(_))
    ));
    assert!(matches!(
        publish("ext", 9_999, trained(&checkpoint, 1)).await,
        Err(Error::NoSuchVersion(9_999))
    ));
    assert!(matches!(
        publish("run-1", base, trained(&checkpoint, 1)).await,
        Err(Error::LineName(_))
    ));
    // A line that a run writes is refused.
    let run = Uuid::now_v7();
    sqlx::query("insert into run (id, kind, policy, line, status, config) values ($1, 'realtime', 'demo', 'realtime', 'running', '{}')")
        .bind(run)
        .execute(&stack.pool)
        .await
        .unwrap();
    let error = publish("realtime", base, trained(&checkpoint, 1)).await.unwrap_err();
    assert!(
        matches!(&error, Error::LineTaken { run: taken, .. } if *taken == run),
        "{error}"
    );
    // A new line begins with a checkpoint. A stale trainer then publishes from an old head.
    let first = publish("ext", base, trained(&checkpoint, 1)).await.unwrap();
    assert!(first.manifest.checkpoint.is_some() && first.manifest.delta.is_some());
    let head = first.manifest.version;
    publish("ext", head, trained(&checkpoint, 2)).await.unwrap();
    for parent in [base, head] {
        let error = publish("ext", parent, trained(&checkpoint, 3)).await.unwrap_err();
        assert!(matches!(error, Error::NotHead { .. }), "{error}");
    }
    // Of two concurrent publications that begin a line, one is committed.
    let (one, two) = tokio::join!(
        publish("both", base, trained(&checkpoint, 7)),
        publish("both", base, trained(&checkpoint, 8))
    );
    assert_eq!(
        usize::from(one.is_ok()) + usize::from(two.is_ok()),
        1,
        "{one:?} {two:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_list_check_keep_and_collect_the_store() {
    let (stack, publisher, checkpoint, base) = world("keep").await;
    let (mut head, mut last) = (base, checkpoint);
    for step in 1..=18 {
        last = trained(&last, step);
        let external = External {
            line: "ext".into(),
            parent: head,
            weights: runs::publish::Weights::All(last.clone()),
            with_checkpoint: step % 6 == 0,
            reference: None,
        };
        head = publish_external(&publisher, external).await.unwrap().manifest.version;
    }
    let rows = json(&stack, &["versions", "--json"], false).await;
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 19);
    assert_eq!(rows[0]["version"].as_i64(), Some(head));
    assert!(rows.iter().all(|row| row["path_bytes"].is_u64()));
    let (success, table, _) = policy(&stack, &["versions", "--line", "ext", "--limit", "3"], false).await;
    assert!(
        success && table.lines().count() == 5 && table.contains("15 older ones"),
        "{table}"
    );

    let (success, stdout, stderr) = policy(&stack, &["squash"], false).await;
    assert!(success && stdout.contains("squashed deltas made"), "{stdout}{stderr}");
    assert!(!stdout.contains("\n0 squashed deltas made"), "{stdout}");
    let number = head.to_string();
    let known = json(&stack, &["inspect", &number, "--json"], false).await;
    assert_eq!(known["signed_by"][0]["trusted"], true);
    assert_eq!(known["delta"]["there"], true);
    let (success, stdout, stderr) = policy(&stack, &["verify", &number, "--deep"], false).await;
    assert!(success && stdout.contains("is whole"), "{stdout}{stderr}");
    let report = json(&stack, &["fsck", "--deep", "--json"], true).await;
    assert_eq!(report["findings"].as_array().unwrap().len(), 0, "{report}");

    // Keep one version, and make everything older than a day.
    let pinned = (head - 10).to_string();
    let (success, stdout, _) = policy(&stack, &["keep", &pinned, "--reason", "the paper"], false).await;
    assert!(success, "{stdout}");
    let (success, _, stderr) = policy(&stack, &["gc", "--grace", "5s"], true).await;
    assert!(!success && stderr.contains("ten minutes"), "{stderr}");
    age(&stack);
    let [of_nobody, attempt, ended] = run_files(&stack, head).await;
    let would = json(&stack, &["gc", "--grace", "0s", "--dry-run", "--json"], true).await;
    assert_eq!(would["run_files"].as_object().unwrap().len(), 2, "{would}");
    assert!(would["deleted_bytes"].as_u64().unwrap() > 0, "{would}");
    let needed: Vec<i64> = would["needed"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_i64)
        .collect();
    assert!(
        needed.contains(&(head - 10)) && needed.contains(&base) && needed.contains(&head),
        "{needed:?}"
    );
    let count = || std::fs::read_dir(objects(&stack)).unwrap().count();
    let before = count();
    age_below(&stack.dir.path().join("store/private/run"));
    let done = json(&stack, &["gc", "--yes", "--json"], true).await;
    assert_eq!(done["deleted"].as_array().unwrap().len(), before - count());
    assert_eq!(done["run_files"].as_object().unwrap().len(), 1, "{done}");
    let states = Store::open(&stack.store_url)
        .unwrap()
        .list_private("run")
        .await
        .unwrap();
    assert!(states.contains_key(&of_nobody), "of another database");
    assert!(states.contains_key(&ended), "its version is younger than a day");
    assert!(!states.contains_key(&attempt));
    let (success, stdout, stderr) = policy(&stack, &["fsck"], true).await;
    assert!(success, "{stdout}{stderr}");

    // A lost version that only a run needs is found where the database can be asked.
    let lost = head - 1;
    // Its own delta, that of the head, which works in reverse, and those over several steps lead to it.
    std::fs::remove_dir_all(policy_folder(&stack).join("fold")).unwrap();
    for version in [lost, head] {
        let of = json(&stack, &["inspect", &version.to_string(), "--json"], false).await;
        std::fs::remove_file(objects(&stack).join(of["delta"]["digest"].as_str().unwrap())).unwrap();
        if let Some(checkpoint) = of["image"]["digest"].as_str().filter(|_| version == lost) {
            std::fs::remove_file(objects(&stack).join(checkpoint)).unwrap();
        }
    }
    let (success, stdout, stderr) = policy(&stack, &["fsck", "--grace", "0s"], true).await;
    assert!(success, "{stdout}{stderr}");
    let need = "insert into run (kind, policy, line, status, config, base_version)
                values ('sft', 'demo', 'waits', 'paused', '{}', $1)";
    sqlx::query(need).bind(lost).execute(&stack.pool).await.unwrap();
    let (success, stdout, _) = policy(&stack, &["fsck", "--grace", "0s"], true).await;
    assert!(
        !success && stdout.contains(&format!("ERROR: version {lost}")),
        "{stdout}"
    );
    let (success, stdout, _) = policy(&stack, &["fsck", "--grace", "0s"], false).await;
    assert!(
        success && stdout.contains("note: the database: it was not asked"),
        "{stdout}"
    );

    // Damage makes fsck fail.
    let digest = known["image"]["digest"].as_str().unwrap();
    std::fs::remove_file(objects(&stack).join(digest)).unwrap();
    let (success, stdout, stderr) = policy(&stack, &["fsck"], false).await;
    assert!(
        !success && stderr.contains("NOT whole") && stdout.contains("ERROR: "),
        "{stdout}{stderr}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_move_trust_from_one_key_to_the_next() {
    let (stack, publisher, checkpoint, base) = world("keys").await;
    for name in ["trainer-next", "release"] {
        SigningKey::load_or_create(&stack.keys_dir, name).unwrap();
    }
    SigningKey::create(&stack.keys_dir, "root", Role::Root).unwrap();
    let run = async |arguments: &[&str]| {
        let (success, stdout, stderr) = policy(&stack, arguments, true).await;
        assert!(success, "{arguments:?}: {stdout}{stderr}");
        stdout
    };
    let keys = run(&["keys"]).await;
    assert_eq!(
        (keys.lines().count(), keys.matches("trusted").count()),
        (5, 4),
        "{keys}"
    );
    assert!(
        run(&["resign", "--by", "trainer-next"])
            .await
            .starts_with("1 documents")
    );
    assert!(
        run(&["resign", "--by", "trainer-next"])
            .await
            .starts_with("0 documents")
    );
    // Only the old key signs this one.
    let external = External {
        line: "ext".into(),
        parent: base,
        weights: runs::publish::Weights::All(trained(&checkpoint, 1)),
        with_checkpoint: false,
        reference: None,
    };
    let late = publish_external(&publisher, external)
        .await
        .unwrap()
        .manifest
        .version
        .to_string();
    run(&["verify", &late]).await;
    let by_another = ["revoke", "trainer", "--by", "release", "--reason", "theft", "--yes"];
    let (success, _, stderr) = policy(&stack, &by_another, false).await;
    assert!(!success && stderr.contains("only a root key"), "{stderr}");
    let revoke = ["revoke", "trainer", "--reason", "the machine was lost"];
    let (success, _, stderr) = policy(&stack, &revoke, false).await;
    assert!(!success && stderr.contains("--yes"), "{stderr}");
    run(&[&revoke[..], &["--yes"]].concat()).await;
    assert!(run(&["keys"]).await.contains("REVOKED"));
    run(&["verify", &base.to_string()]).await;
    let (success, _, stderr) = policy(&stack, &["verify", &late], false).await;
    assert!(!success && stderr.contains("revoked"), "{stderr}");
    let (success, _, stderr) = policy(&stack, &["gc"], true).await;
    assert!(!success && stderr.contains("nothing is deleted"), "{stderr}");
    let (success, _, stderr) = policy(&stack, &["resign", "--by", "trainer"], false).await;
    assert!(!success && stderr.contains("is revoked"), "{stderr}");
}

fn policy_folder(stack: &Stack) -> std::path::PathBuf {
    Path::new(stack.store_url.strip_prefix("file://").unwrap()).join("policy/demo")
}

fn objects(stack: &Stack) -> std::path::PathBuf {
    policy_folder(stack).join("object")
}

/// Makes all objects look two days old.
/// Run states: of a run that no database knows, of an attempt that made no step, and of the step that
/// made the version before the head. The run has ended.
async fn run_files(stack: &Stack, head: i64) -> [String; 3] {
    let run = Uuid::now_v7();
    let keys = [
        format!("run/{}/0000000001-0000000001.safetensors", Uuid::now_v7()),
        format!("run/{run}/0000000001-0000000001.safetensors"),
        format!("run/{run}/0000000001-{:010}.safetensors", head - 1),
    ];
    let store = Store::open(&stack.store_url).unwrap();
    for key in &keys {
        store
            .put_private(key, &bytes::Bytes::from_static(b"state"))
            .await
            .unwrap();
    }
    let insert = "insert into run (id, kind, policy, line, status, config) values ($1, 'sft', 'demo', 'ended', 'cancelled', '{}')";
    sqlx::query(insert).bind(run).execute(&stack.pool).await.unwrap();
    let insert =
        "insert into step (run_id, step, version, parent, cohort_digest, metrics, checkpoint_key, run_state_digest)
                  values ($1, 1, $2, $2 - 1, '\\x00', '{}', $3, sha256(''))";
    let insert = sqlx::query(insert).bind(run).bind(head - 1).bind(&keys[2]);
    insert.execute(&stack.pool).await.unwrap();
    keys
}

fn age(stack: &Stack) {
    age_below(&objects(stack));
}

/// Makes all files of a folder two days old.
fn age_below(folder: &Path) {
    let two_days_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(2 * 86_400);
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => age_below(&path),
            false => {
                let file = std::fs::File::options().write(true).open(path).unwrap();
                file.set_modified(two_days_ago).unwrap();
            }
        }
    }
}
