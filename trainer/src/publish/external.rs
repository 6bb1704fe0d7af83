//! Versions that another trainer made: weights from outside, published as the child of a version exactly as a step is, but for
//! what only a run has (a claim, a checkpoint, dispositions).
//!
//! The line's head is the fence: what was not made from the head is refused, so a trainer that was thought dead and wakes up
//! can put objects and a manifest that nobody follows, and nothing else.

use super::{Error, Publisher, Timings, record};
use policy::delta;
use policy::image::Image;
use policy::manifest::{Manifest, Parent};
use policy::store::Pieces;
use std::sync::Arc;
use std::time::Instant;
use time::OffsetDateTime;

/// How many differences of form an error names.
const DIFFERENCES_MAX: usize = 5;

/// What is published, and where.
#[derive(Debug, Clone)]
pub struct External {
    /// Made where it is not there.
    pub line: String,
    /// The version that the weights were made from: the line's head, or what a new line begins on.
    pub parent: i64,
    pub image: Image,
    /// Write the whole image beside the delta even if none is due.
    pub whole: bool,
}

/// What was published.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub manifest: Manifest,
    /// How many weights differ from the parent's.
    pub stats: delta::Stats,
    /// Files that the folder did not have and the parent did.
    pub inherited: Vec<String>,
    pub timings: Timings,
    /// Putting the parent together, seconds.
    pub parent_seconds: f64,
}

/// Publishes weights from outside on a line that no run writes.
pub async fn publish_external(publisher: &Publisher, external: External) -> Result<Outcome, Error> {
    let External {
        line,
        parent,
        mut image,
        whole,
    } = external;
    let (known, stand) = line_of(publisher, &line, parent).await?;
    let started = Instant::now();
    let materialised = publisher
        .store
        .materialise(&publisher.policy, parent, &publisher.trusted, &[])
        .await?;
    let parent_image = materialised.image;
    let parent_seconds = started.elapsed().as_secs_f64();
    let mut differences = parent_image.form_differences(&image);
    if !differences.is_empty() {
        let more = differences.len().saturating_sub(DIFFERENCES_MAX);
        differences.truncate(DIFFERENCES_MAX);
        if more > 0 {
            differences.push(format!("and {more} more"));
        }
        return Err(Error::Form { parent, differences });
    }
    // trainers save weights, and often nothing of the tokenizer
    let mut inherited = vec![];
    for (name, bytes) in &parent_image.files {
        if !image.files.contains_key(name) {
            image.files.insert(name.clone(), bytes.clone());
            inherited.push(name.clone());
        }
    }
    if image == *parent_image {
        return Err(Error::Unchanged(parent));
    }
    let image = Arc::new(image);

    let started = Instant::now();
    let image_due = whole || stand.is_none();
    let images = (Arc::clone(&parent_image), Arc::clone(&image));
    let parent = Parent {
        version: parent,
        root: known.root,
    };
    let objects = publisher.objects(started, parent, images, image_due).await?;
    let place = publisher.place(None).await?;
    let mut manifest = Manifest {
        policy: publisher.policy.clone(),
        version: place.serial,
        root: objects.root,
        parent: Some(parent),
        line,
        branch: stand.map_or(0, |(_, branch)| branch),
        image: objects.image.as_ref().map(Pieces::object),
        delta: Some(objects.delta.object()),
        tensor_bytes: image.tensor_bytes(),
        run: None,
        fence: 0,
        created_at: OffsetDateTime::now_utc(),
        quantised: objects.quantised.clone(),
        delta_shards: vec![],
    };
    publisher.put_manifest(&mut manifest, place, None).await?;
    publisher.make_good(&objects).await?;
    let mut timings = Timings {
        encode: objects.encode_seconds,
        upload: started.elapsed().as_secs_f64() - objects.encode_seconds,
        commit: 0.0,
    };
    drop(objects);
    let started = Instant::now();
    commit(publisher, &manifest, stand.is_none()).await?;
    timings.commit = started.elapsed().as_secs_f64();
    let stats = tokio::task::spawn_blocking(move || delta::stats(&parent_image, &image)).await?;
    Ok(Outcome {
        manifest,
        stats,
        inherited,
        timings,
        parent_seconds,
    })
}

/// The parent, and where the line stands (head and branch) if it is there. Refuses what may not be published.
pub(super) async fn line_of(
    publisher: &Publisher,
    line: &str,
    parent: i64,
) -> Result<(record::Version, Option<(i64, i32)>), Error> {
    check_name(line)?;
    let known = record::version(&publisher.pool, &publisher.policy, parent).await?;
    let stand = record::line(&publisher.pool, &publisher.policy, line).await?;
    if let Some((head, _)) = stand.filter(|(head, _)| *head != parent) {
        let line = line.into();
        return Err(Error::NotHead { line, head, parent });
    }
    let mut connection = publisher.pool.acquire().await?;
    match record::writer(&mut connection, &publisher.policy, line).await? {
        Some(run) => Err(Error::LineTaken { line: line.into(), run }),
        None => Ok((known, stand)),
    }
}

/// The commit, and the announcement.
pub(super) async fn commit(publisher: &Publisher, manifest: &Manifest, begins: bool) -> Result<(), Error> {
    let mut transaction = publisher.pool.begin().await?;
    record::commit_external(&mut transaction, manifest, begins).await?;
    transaction.commit().await?;
    publisher.announce(manifest.version).await;
    Ok(())
}

/// Lines of runs are named after them.
fn check_name(line: &str) -> Result<(), Error> {
    let letters = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let fits = (1..=32).contains(&line.len()) && line.starts_with(|c: char| c.is_ascii_lowercase());
    match fits && line.chars().all(letters) && !line.starts_with("run-") {
        true => Ok(()),
        false => Err(Error::LineName(line.into())),
    }
}
