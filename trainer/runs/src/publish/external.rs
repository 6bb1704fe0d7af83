//! Versions that another trainer made. They are published as the child of a version, like a step,
//! but without what only a run has: claim, run state, dispositions.
//!
//! The line's head is the fence. Weights that were not made from the head are refused. A trainer
//! that was thought dead can therefore only upload objects and a manifest that nobody follows.

use super::{Content, Error, Publisher, Timings, record};
use artifact::checkpoint::Checkpoint;
use artifact::delta;
use artifact::manifest::{Manifest, Parent};
use artifact::reference::Reference;
use model::lora::{self, Adapter};
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
    pub weights: Weights,
    /// Write the full checkpoint beside the delta even if none is due.
    pub with_checkpoint: bool,
    /// Of a model that ours does not compute.
    pub reference: Option<Reference>,
}

/// The weights that are published.
#[derive(Debug, Clone)]
pub enum Weights {
    All(Checkpoint),
    /// Of what the parent adapts, or of the parent if it has all weights.
    Adapter(Adapter),
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
        weights,
        with_checkpoint,
        reference,
    } = external;
    let (parent_row, head) = check_line(publisher, &line, parent).await?;
    let started = Instant::now();
    let parent_checkpoint = publisher.load(parent).await?;
    let parent_seconds = started.elapsed().as_secs_f64();
    let of_parent = Parent {
        version: parent,
        root: parent_row.root,
    };
    let mut inherited = vec![];
    let (checkpoint, adapts) = match weights {
        Weights::All(mut checkpoint) => {
            inherited = complete(parent, &*lora::merged(&parent_checkpoint)?, &mut checkpoint)?;
            (checkpoint, None)
        }
        Weights::Adapter(adapter) => {
            let base = parent_checkpoint.base();
            let version = base.with_adapter(&adapter.version_of(&base)?);
            (version, publisher.adapted(parent).await?.or(Some(of_parent)))
        }
    };
    if checkpoint == *parent_checkpoint {
        return Err(Error::Unchanged(parent));
    }
    let checkpoint = Arc::new(checkpoint);

    let started = Instant::now();
    let content = Content {
        parent: publisher
            .base_of_delta(parent, adapts, Arc::clone(&parent_checkpoint))
            .await?,
        checkpoint: Arc::clone(&checkpoint),
        adapts,
        given: reference,
    };
    let parent = of_parent;
    let objects = publisher
        .objects(started, parent, content, with_checkpoint || head.is_none())
        .await?;
    let reserved = publisher.reserve(None).await?;
    let branch = head.map_or(0, |(_, branch)| branch);
    let mut manifest = publisher.manifest_of(&objects, parent, line, branch);
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

/// Fails if the weights have another form than their parent's. Gives them the files that they lack: many trainers save
/// weights without the tokenizer's. Returns their names.
fn complete(parent: i64, of_parent: &Checkpoint, checkpoint: &mut Checkpoint) -> Result<Vec<String>, Error> {
    let mut differences = of_parent.form_differences(checkpoint);
    if !differences.is_empty() {
        let more = differences.len().saturating_sub(DIFFERENCES_MAX);
        differences.truncate(DIFFERENCES_MAX);
        if more > 0 {
            differences.push(format!("and {more} more"));
        }
        return Err(Error::Form { parent, differences });
    }
    let mut inherited = vec![];
    for (name, bytes) in &of_parent.files {
        if !checkpoint.files.contains_key(name) {
            checkpoint.files.insert(name.clone(), bytes.clone());
            inherited.push(name.clone());
        }
    }
    Ok(inherited)
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
