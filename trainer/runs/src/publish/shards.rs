//! Versions that several machines publish together. Each machine encodes and uploads one shard of
//! the delta and reports it. One machine merges the reports and publishes the version like
//! [`publish_external`](super::publish_external).
//!
//! No machine has all weights of either version in memory, so there is no full checkpoint and no
//! quantized copy.

use std::collections::BTreeMap;
use std::time::Instant;

use artifact::delta::{self, EncodedShard, ShardReport};
use artifact::manifest::{Manifest, Parent, Shard};
use artifact::reference::Reference;
use artifact::sign::{Envelope, SigningKey, TrustedKeys};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use store::{Pieces, Store};

use super::external::{check_line, commit};
use super::{Error, Publisher, Timings};

/// The version to publish.
#[derive(Debug, Clone)]
pub struct ShardedVersion {
    /// The name under which the shards were uploaded.
    pub name: String,
    /// Number of shards.
    pub of: usize,
    /// Created if it does not exist.
    pub line: String,
    /// The base of the delta: the line's head, or the start of a new line.
    pub parent: i64,
    /// The parent's files, and the version's. A file that the version lacks is taken from the
    /// parent.
    pub base: BTreeMap<String, Bytes>,
    pub files: BTreeMap<String, Bytes>,
    /// Of its trainer.
    pub reference: Option<Reference>,
}

/// A machine's report on its shard, signed, so that write access to the store is not enough to
/// change or move it.
#[derive(Debug, Serialize, Deserialize)]
struct Signed {
    policy: String,
    name: String,
    /// From 1.
    shard: usize,
    of: usize,
    /// [`ShardReport::to_bytes`] in base64.
    report: String,
}

/// The kind in the envelope's payload type.
const KIND: &str = "share";

/// One shard of a version.
#[derive(Clone, Copy)]
struct ShardId<'a> {
    policy: &'a str,
    name: &'a str,
    /// From 1.
    shard: usize,
    of: usize,
}

impl ShardId<'_> {
    /// Where its report waits for the publisher.
    fn report_key(self) -> String {
        let ShardId {
            policy,
            name,
            shard,
            of,
        } = self;
        format!("shares/{policy}/{name}/{shard}-of-{of}")
    }

    fn error(self, reason: impl Into<String>) -> Error {
        Error::Shard {
            name: self.name.into(),
            shard: self.shard,
            of: self.of,
            reason: reason.into(),
        }
    }

    fn missing(self) -> Error {
        Error::NoShard {
            name: self.name.into(),
            shard: self.shard,
            of: self.of,
        }
    }
}

/// Uploads shard `shard` (from 0) of `of`, and its report. Repeating it is a no-op. A different
/// shard under the same name is refused, because shards of two attempts do not make a version.
pub async fn put_shard(
    store: &Store,
    key: &SigningKey,
    policy: &str,
    (name, shard, of): (&str, usize, usize),
    encoded: &EncodedShard,
) -> Result<(), Error> {
    let id = ShardId {
        policy,
        name,
        shard: shard + 1,
        of,
    };
    match get_report(store, &key.trusted(), id).await {
        Ok(Some(before)) if before.shard().object != encoded.report.shard().object => {
            return Err(id.error("it was uploaded before with other weights: give every attempt a name of its own"));
        }
        // a report without a valid signature is replaced
        Ok(_) | Err(Error::Shard { .. }) => {}
        Err(error) => return Err(error),
    }
    store.put_object(policy, &encoded.object).await?;
    let signed = Signed {
        policy: policy.into(),
        name: name.into(),
        shard: id.shard,
        of,
        report: BASE64.encode(encoded.report.to_bytes()),
    };
    let payload = serde_json::to_vec(&signed).map_err(|error| id.error(error.to_string()))?;
    let envelope = Envelope::sign(KIND, &payload, key).to_bytes();
    let envelope: Bytes = envelope.map_err(|error| id.error(error.to_string()))?.into();
    store.put_private(&id.report_key(), &envelope).await?;
    Ok(())
}

/// The report on a shard, if there is one.
async fn get_report(store: &Store, trusted: &TrustedKeys, id: ShardId<'_>) -> Result<Option<ShardReport>, Error> {
    let envelope = match store.get_private(&id.report_key()).await {
        Err(store::Error::NotFound(_)) => return Ok(None),
        envelope => envelope?,
    };
    let read = || -> anyhow::Result<ShardReport> {
        let payload = Envelope::from_bytes(&envelope)?.verify(KIND, trusted)?;
        let signed: Signed = serde_json::from_slice(&payload)?;
        let found = (signed.policy.as_str(), signed.name.as_str(), signed.shard, signed.of);
        anyhow::ensure!(
            found == (id.policy, id.name, id.shard, id.of),
            "it is shard {} of {} of `{}`",
            signed.shard,
            signed.of,
            signed.name
        );
        Ok(ShardReport::from_bytes(&BASE64.decode(&signed.report)?)?)
    };
    read().map(Some).map_err(|error| id.error(error.to_string()))
}

/// The report on a shard whose object exists.
async fn get_shard(publisher: &Publisher, trusted: &TrustedKeys, id: ShardId<'_>) -> Result<ShardReport, Error> {
    if let Some(report) = get_report(&publisher.store, trusted, id).await?
        && publisher.store.object_exists(id.policy, &report.shard().object).await?
    {
        return Ok(report);
    }
    Err(id.missing())
}

/// The full checkpoint of the version that a delta in shards makes of its parent.
async fn whole(publisher: &Publisher, parent: i64, head: Bytes, shards: &[Shard]) -> Result<Pieces, Error> {
    let base = publisher.load(parent).await?;
    let mut objects = Vec::new();
    for shard in shards {
        let object = publisher.store.get_object(&publisher.policy, &shard.object).await?;
        objects.push((object, shard.reverse_bytes));
    }
    let threads = publisher.store.threads().clone();
    tokio::task::spawn_blocking(move || {
        let delta = delta::concat(&head, &objects)?;
        let (checkpoint, _) = delta::apply_within(&base, &delta, u64::MAX, &threads)?;
        Ok(Pieces::new(checkpoint.to_pieces()?))
    })
    .await?
}

/// Publishes the version that all shards make together.
pub async fn publish_shards(publisher: &Publisher, version: ShardedVersion) -> Result<(Manifest, Timings), Error> {
    let ShardedVersion {
        name,
        of,
        line,
        parent,
        base,
        mut files,
        reference,
    } = version;
    let (parent_row, line_head) = check_line(publisher, &line, parent).await?;
    let started = Instant::now();
    let (store, policy) = (&publisher.store, publisher.policy.as_str());
    let ids = (1..=of).map(|shard| ShardId {
        policy,
        name: &name,
        shard,
        of,
    });
    let trusted = publisher.trusted().await?;
    let mut reports = vec![];
    for id in ids.clone() {
        reports.push(get_shard(publisher, &trusted, id).await?);
    }
    for (name, bytes) in &base {
        files.entry(name.clone()).or_insert_with(|| bytes.clone());
    }
    let mut delta_shards = reports.iter().map(ShardReport::shard).collect::<Vec<_>>();
    let merged = tokio::task::spawn_blocking(move || delta::merge_shards(&reports, &base, &files)).await??;
    let header = merged.header;
    if header.base != parent_row.root {
        return Err(Error::OtherBase {
            parent,
            root: parent_row.root,
            found: header.base,
        });
    }
    if header.base == header.result {
        return Err(Error::Unchanged(parent));
    }
    let (head, own) = (Bytes::from(merged.head), Bytes::from(merged.files));
    let head_bytes = head.clone();
    let pieces = || (Pieces::new(vec![head]), Pieces::new(vec![own]));
    let (head, own) = tokio::task::spawn_blocking(pieces).await?;
    let mut objects = vec![&head];
    if own.object().size_bytes > 0 {
        delta_shards.push(Shard {
            object: own.object(),
            reverse_bytes: 0,
        });
        objects.push(&own);
    }
    for pieces in &objects {
        store.put_pieces(policy, pieces).await?;
    }
    let delta_bytes =
        objects[0].object().size_bytes + delta_shards.iter().map(|shard| shard.object.size_bytes).sum::<u64>();
    let chain_bytes = publisher.chain_bytes(parent, line_head.is_none()).await?;
    let full =
        match chain_bytes.saturating_add(delta_bytes).saturating_mul(2) > merged.tensor_bytes || line_head.is_none() {
            true => Some(whole(publisher, parent, head_bytes, &delta_shards).await?),
            false => None,
        };
    if let Some(full) = &full {
        store.put_pieces(policy, full).await?;
        objects.push(full);
    }
    let reserved = publisher.reserve(None).await?;
    let branch = line_head.map_or(0, |(_, branch)| branch);
    let named_parent = Parent {
        version: parent,
        root: parent_row.root,
    };
    let mut manifest = Manifest {
        checkpoint: full.as_ref().map(Pieces::object),
        delta: Some(head.object()),
        delta_shards,
        reference,
        ..publisher.manifest(header.result, Some(named_parent), line, branch, merged.tensor_bytes)
    };
    publisher.put_manifest(&mut manifest, reserved, None).await?;
    store.reupload_missing(policy, &objects).await?;
    // garbage collection may have deleted a shard that existed before; only its machine can upload
    // it again
    for (id, shard) in ids.clone().zip(&manifest.delta_shards) {
        if !store.object_exists(policy, &shard.object).await? {
            return Err(id.missing());
        }
    }
    let mut timings = Timings {
        encode: 0.0,
        upload: started.elapsed().as_secs_f64(),
        commit: 0.0,
    };
    let started = Instant::now();
    commit(publisher, &manifest, line_head.is_none()).await?;
    timings.commit = started.elapsed().as_secs_f64();
    for id in ids {
        if let Err(error) = store.delete_private(&id.report_key()).await {
            tracing::warn!(%error, name, shard = id.shard, "could not delete the report on a shard");
        }
    }
    Ok((manifest, timings))
}
