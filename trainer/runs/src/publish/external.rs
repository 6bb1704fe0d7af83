//! Versions that another trainer made. They are published as the child of a version, like a step,
//! but without what only a run has: claim, run state, dispositions.
//!
//! The line's head is the fence. Weights that were not made from the head are refused. A trainer
//! that was thought dead can therefore only upload objects and a manifest that nobody follows.

use super::{Error, Publisher, Timings, record};
use artifact::checkpoint::Checkpoint;
use artifact::delta;
use artifact::manifest::{Manifest, Parent};
use artifact::reference::Reference;
use std::sync::Arc;
use std::time::Instant;

/// How many differences of form an error lists.
const DIFFERENCES_MAX: usize = 5;

/// Weights to publish, and where.
#[derive(Debug, Clone)]
pub struct External {
    /// Created if it does not exist.
    pub line: String,
    /// The version that the weights were made from: the line's head, or the start of a new line.
    pub parent: i64,
    pub checkpoint: Checkpoint,
    /// Write the full checkpoint beside the delta even if none is due.
    pub with_checkpoint: bool,
    /// Of a model that ours does not compute.
    pub reference: Option<Reference>,
}

/// What was published.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub manifest: Manifest,
    /// How many weights differ from the parent's.
    pub stats: delta::Stats,
    /// Files that were taken from the parent.
    pub inherited: Vec<String>,
    pub timings: Timings,
    /// Time to materialize the parent, seconds.
    pub parent_seconds: f64,
}

/// Publishes external weights on a line that no run writes.
pub async fn publish_external(publisher: &Publisher, external: External) -> Result<Outcome, Error> {
    let External {
        line,
        parent,
        mut checkpoint,
        with_checkpoint,
        reference,
    } = external;
    let (parent_row, head) = check_line(publisher, &line, parent).await?;
    let started = Instant::now();
    let parent_checkpoint = publisher.load(parent).await?;
    let parent_seconds = started.elapsed().as_secs_f64();
    let mut differences = parent_checkpoint.form_differences(&checkpoint);
    if !differences.is_empty() {
        let more = differences.len().saturating_sub(DIFFERENCES_MAX);
        differences.truncate(DIFFERENCES_MAX);
        if more > 0 {
            differences.push(format!("and {more} more"));
        }
        return Err(Error::Form { parent, differences });
    }
    // many trainers save weights without the tokenizer's files
    let mut inherited = vec![];
    for (name, bytes) in &parent_checkpoint.files {
        if !checkpoint.files.contains_key(name) {
            checkpoint.files.insert(name.clone(), bytes.clone());
            inherited.push(name.clone());
        }
    }
    if checkpoint == *parent_checkpoint {
        return Err(Error::Unchanged(parent));
    }
    let checkpoint = Arc::new(checkpoint);

    let started = Instant::now();
    let checkpoints = (Arc::clone(&parent_checkpoint), Arc::clone(&checkpoint));
    let parent = Parent {
        version: parent,
        root: parent_row.root,
    };
    let objects = publisher
        .objects(
            started,
            parent,
            checkpoints,
            with_checkpoint || head.is_none(),
            reference,
        )
        .await?;
    let reserved = publisher.reserve(None).await?;
    let branch = head.map_or(0, |(_, branch)| branch);
    let mut manifest = publisher.manifest_of(&objects, parent, line, branch, checkpoint.tensor_bytes());
    publisher.put_manifest(&mut manifest, reserved, None).await?;
    publisher.restore_missing(&objects).await?;
    let mut timings = objects.timings(started);
    drop(objects);
    let started = Instant::now();
    commit(publisher, &manifest, head.is_none()).await?;
    timings.commit = started.elapsed().as_secs_f64();
    let stats = tokio::task::spawn_blocking(move || delta::stats(&parent_checkpoint, &checkpoint)).await?;
    Ok(Outcome {
        manifest,
        stats,
        inherited,
        timings,
        parent_seconds,
    })
}

/// Checks that `parent` may get a child on the line. Returns the parent, and the line's head and
/// branch if it exists.
pub(super) async fn check_line(
    publisher: &Publisher,
    line: &str,
    parent: i64,
) -> Result<(record::Version, Option<(i64, i32)>), Error> {
    check_name(line)?;
    let parent_row = record::version(&publisher.pool, &publisher.policy, parent).await?;
    let head = record::line(&publisher.pool, &publisher.policy, line).await?;
    if let Some((head, _)) = head.filter(|(head, _)| *head != parent) {
        let line = line.into();
        return Err(Error::NotHead { line, head, parent });
    }
    let mut connection = publisher.pool.acquire().await?;
    match record::active_run(&mut connection, &publisher.policy, line).await? {
        Some(run) => Err(Error::LineTaken { line: line.into(), run }),
        None => Ok((parent_row, head)),
    }
}

/// The commit, and the announcement.
pub(super) async fn commit(publisher: &Publisher, manifest: &Manifest, new_line: bool) -> Result<(), Error> {
    let mut transaction = edge::database::begin(&publisher.pool).await?;
    record::commit_external(&mut transaction, manifest, new_line).await?;
    transaction.commit().await?;
    publisher.announce(manifest.version).await;
    Ok(())
}

/// Names that begin with `run-` belong to runs.
fn check_name(line: &str) -> Result<(), Error> {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let fits = (1..=32).contains(&line.len()) && line.starts_with(|c: char| c.is_ascii_lowercase());
    match fits && line.chars().all(allowed) && !line.starts_with("run-") {
        true => Ok(()),
        false => Err(Error::LineName(line.into())),
    }
}
